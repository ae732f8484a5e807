"""What a caller gets through HTTP: every verdict and refusal, batches as their calls finish, a whole corpus."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from loadtest.corpus import Agreement, compare, read_corpus
from sandbox import Answer, Limits, SandboxClient, SandboxError, ToolCall

from .processes import family, until
from .stack import Stack, stack

#: Ends when somebody kills it.
ENDLESS_CALL = {"code": "import time; time.sleep(1000)", "limits": {"wall_s": 60}}

NDJSON = {"accept": "application/x-ndjson"}
MIB = 1024 * 1024

#: Calls that the gateway of `service` holds at a time.
MAX_IN_FLIGHT = 200

#: 1,318 programs that a model wrote, with what they printed elsewhere. It lies beside a checkout, not in it.
CORPUS = Path(__file__).parents[3] / "shared" / "data" / "tora_gsm8k_70b.jsonl"
#: A syntax error, whose record is the error's text; and a loop without end, whose record is its timeout.
BROKEN, ENDLESS = "tora-70b-v1.0/587/0", "tora-70b-v1.0/881/0"

#: Code, limits, and what must come back.
VERDICTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("print(6 * 7)", {}, {"status": "ok", "exit_code": 0, "signal": None, "stdout": "42\n", "stderr": ""}),
    (
        "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)",
        {},
        {"status": "error", "exit_code": 3, "signal": None, "stdout": "out\n", "stderr": "err\n"},
    ),
    (
        "import os; print('out', flush=True); os.kill(os.getpid(), 11)",
        {},
        {"status": "signaled", "exit_code": None, "signal": 11, "stdout": "out\n", "stderr": ""},
    ),
    (
        "import time; print('out', flush=True); time.sleep(60)",
        {"wall_s": 0.5},
        {"status": "timeout", "exit_code": None, "stdout": "out\n", "stderr": ""},
    ),
    (
        "print('out', flush=True)\nwhile True: pass",
        {"cpu_s": 0.5, "wall_s": 30},
        {"status": "timeout", "exit_code": None, "stdout": "out\n", "stderr": ""},
    ),
    (
        "print('out', flush=True); x = bytearray(200 * 2**20)",
        {"memory_bytes": 64 * MIB},
        {"status": "memory_limit", "stdout": "out\n"},
    ),
    (
        "print('x' * 5000)",
        {"output_bytes": 1000},
        {"status": "output_limit", "stdout": "x" * 1000, "stdout_truncated": True, "stderr_truncated": False},
    ),
    (
        "import sys; sys.stderr.write('x' * 5000)",
        {"output_bytes": 1000},
        {"status": "output_limit", "stderr": "x" * 1000, "stdout_truncated": False, "stderr_truncated": True},
    ),
]


def kill_programs(running: Stack) -> None:
    """End all programs that run now, so that nobody has to wait for one that would not end."""
    processes = family(running.pid)
    forkservers = {process.parent for process in processes if process.command == "init"}
    for process in processes:
        if process.parent in forkservers and process.command != "init":
            os.kill(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def service() -> Iterator[Stack]:
    """A stack that no test here harms."""
    with stack(SANDBOX_GATEWAY__MAX_IN_FLIGHT=str(MAX_IN_FLIGHT)) as running:
        yield running


@pytest.mark.parametrize(
    ("code", "limits", "expected"), VERDICTS, ids=[f"{v[2]['status']}" for v in VERDICTS]
)
def test_a_verdict(service: Stack, code: str, limits: dict[str, Any], expected: dict[str, Any]) -> None:
    """A program's end is answered with 200, its status, how it ended and what it wrote on either stream."""
    name = uuid4().hex
    answer = service.run(code, id=name, limits=limits)
    result = answer.json()
    assert answer.status_code == 200
    assert {field: result[field] for field in expected} == expected
    assert (result["id"], result["reason"]) == (name, None)
    assert result["usage"]["wall_s"] > 0


def test_an_uncaught_exception_has_its_traceback(service: Stack) -> None:
    """The traceback has the program's own lines, and nothing of ours."""
    result = service.run("def f():\n    return 1 // 0\nf()\n").json()
    assert (result["status"], result["exit_code"], result["stdout"]) == ("error", 1, "")
    lines = result["stderr"].splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("ZeroDivisionError: ")
    assert re.findall(r"line (\d+), in (\S+)", result["stderr"]) == [("3", "<module>"), ("2", "f")]
    assert result["exception"] == {
        "type": "ZeroDivisionError",
        "message": result["stderr"].splitlines()[-1].partition(": ")[2],
        "line": 2,
        "source": "    return 1 // 0",
    }


def test_head_and_tail(service: Stack) -> None:
    """A call that wants less of its output than it may write gets both ends, and how much there was."""
    result = service.run("for n in range(1000): print(n)", keep_bytes=12).json()
    assert (result["status"], result["stdout"], result["stdout_tail"]) == ("ok", "0\n1\n2\n", "8\n999\n")
    assert (result["stdout_truncated"], result["stdout_bytes"], result["stderr_bytes"]) == (True, 3890, 0)


def test_the_same_again(service: Stack) -> None:
    """With both seeds a program says the same each time; without them it does not."""
    code = "import numpy, random\nprint(numpy.random.rand(), random.random(), hash('a'))"
    seeded = [service.run(code, hash_seed=0, random_seed=seed).json() for seed in (7, 7, 8)]
    assert [result["status"] for result in seeded] == ["ok"] * 3
    first, again, other = (result["stdout"] for result in seeded)
    assert first == again != other
    assert service.run(code, random_seed=7).json()["stdout"].split()[:2] == first.split()[:2]


def test_stdin_files_and_the_last_value(service: Stack) -> None:
    """What a call brings is there for its program, and the value of its last line is shown when asked for."""
    fields = {"stdin": "3\n", "files": {"a/b.txt": "4"}, "echo_last_value": True}
    result = service.run("int(input()) * int(open('a/b.txt').read())", **fields).json()
    assert (result["status"], result["stdout"]) == ("ok", "12\n")


def test_a_call_that_cannot_start_in_time(service: Stack) -> None:
    """A call whose deadline passes while all slots are taken is a fault: 504, and in a batch in its place."""

    def backlog() -> dict[str, Any]:
        return dict(service.http.get("/v1/status").json()["backlog"])

    def batch(*calls: dict[str, Any]) -> list[dict[str, Any]]:
        return list(service.http.post("/v1/batch", json={"calls": calls}).json()["results"])

    [worker] = service.http.get("/v1/status").json()["workers"]
    late: dict[str, Any] = {"code": "print(1)", "deadline_s": 0.01}
    with ThreadPoolExecutor() as threads:
        blocked = threads.submit(batch, *[ENDLESS_CALL] * worker["slots"])
        until(lambda: backlog()["running"] == worker["slots"], "a full worker")
        alone = threads.submit(service.run, **late)
        together = threads.submit(batch, late, {"code": "print(2)"})
        until(lambda: backlog()["waiting"] == 3 and backlog()["oldest_wait_s"] > 0.2, "three that wait")
        kill_programs(service)
        assert {result["status"] for result in blocked.result()} == {"signaled"}
        answer = alone.result()
        assert (answer.status_code, answer.json()["error"]["name"]) == (504, "QueueTimeout")
        fault, verdict = together.result()
        assert (fault["status"], verdict["status"]) == ("queue_timeout", "ok")
        assert "past its deadline" in fault["reason"]


def test_a_batch_is_answered_in_order(service: Stack) -> None:
    """Each result stands at the place of its call, and a wrong call fails none of the others."""
    calls: list[dict[str, Any]] = [{"code": f"print({number})"} for number in range(40)]
    calls[7] = {"code": "print(7)", "limits": {"wall_s": -1}}
    answer = service.http.post("/v1/batch", json={"calls": calls})
    results = answer.json()["results"]
    error = results.pop(7)["error"]
    assert (answer.status_code, error["name"]) == (200, "InvalidCall")
    assert error["message"].startswith("limits.wall_s: ")
    assert [result["stdout"] for result in results] == [f"{number}\n" for number in range(40) if number != 7]


def test_a_slow_call_does_not_hold_a_fast_one(service: Stack) -> None:
    """In NDJSON the fast calls of a batch, and those of other requests, are answered while a slow one runs."""
    calls = [ENDLESS_CALL, {"code": "print(1)"}, {"code": "print(2)"}]
    with service.http.stream("POST", "/v1/batch", json={"calls": calls}, headers=NDJSON) as response:
        lines = response.iter_lines()
        first = [json.loads(next(lines)) for _ in range(2)]
        assert sorted((line["index"], line["stdout"]) for line in first) == [(1, "1\n"), (2, "2\n")]
        assert service.run("print(3)").json()["stdout"] == "3\n"
        assert service.http.get("/v1/status").json()["in_flight"] == 3
        kill_programs(service)
        last = json.loads(next(lines))
        assert (last["index"], last["status"], last["signal"]) == (0, "signaled", signal.SIGKILL)
        assert list(lines) == []


@pytest.mark.parametrize(
    ("call", "field"),
    [
        ({}, "code"),
        ({"code": 1}, "code"),
        ({"code": "", "cod": ""}, "cod"),
        ({"code": "", "limits": {"wall_s": 61}}, "limits.wall_s"),
        ({"code": "", "files": {"../x": ""}}, "files.../x"),
        ({"code": "", "id": "a b"}, "id"),
    ],
)
def test_a_wrong_call_is_refused_by_its_field(service: Stack, call: dict[str, Any], field: str) -> None:
    """422, and the message begins with the field that is wrong."""
    answer = service.http.post("/v1/run", json=call)
    assert (answer.status_code, answer.json()["error"]["name"]) == (422, "InvalidCall")
    assert answer.json()["error"]["message"].startswith(field)


def test_too_much_is_refused(service: Stack) -> None:
    """413 for a body over the bound, and for a batch of too many calls."""
    calls = {"calls": [{"code": ""}] * 1025}
    answers = [
        service.http.post("/v1/run", content=b"x" * (16 * MIB + 1)),
        service.http.post("/v1/batch", json=calls),
    ]
    assert [(answer.status_code, answer.json()["error"]["name"]) for answer in answers] == [
        (413, "CallTooLarge")
    ] * 2


def test_a_full_gateway_refuses(service: Stack) -> None:
    """429 with a time to wait for what would be one call too many; the calls under way are not touched."""
    calls = [{"code": "print(1)"}, ENDLESS_CALL]
    with service.http.stream("POST", "/v1/batch", json={"calls": calls}, headers=NDJSON) as response:
        lines = response.iter_lines()
        next(lines)  # both are held until both are done
        many = {"calls": [{"code": ""}] * (MAX_IN_FLIGHT - 1)}
        answer = service.http.post("/v1/batch", json=many)
        assert (answer.status_code, answer.json()["error"]["name"]) == (429, "Overloaded")
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["retry_after_s"] > 0
        kill_programs(service)
        assert json.loads(next(lines))["status"] == "signaled"


@contextmanager
def lonely_gateway(redis_url: str) -> Iterator[httpx.Client]:
    """A gateway on a Redis where no worker is of its namespace, and a client of it."""
    variables = {
        "REDIS_URL": redis_url,
        "SANDBOX_REDIS__NAMESPACE": "lonely",
        "SANDBOX_GATEWAY__NOTICE_S": "0",
        "SANDBOX_GATEWAY__PORT": "0",
    }
    command = [sys.executable, "-P", "-m", "gateway"]
    environ = {**os.environ, **variables}  # noqa: TID251
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        events = (json.loads(line) for line in process.stderr if line.startswith("{"))
        address = next(event["address"] for event in events if event["event"] == "listening")
        with httpx.Client(base_url=address, timeout=30, trust_env=False) as http:
            yield http
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(30) == 0


def test_nobody_there_to_run_a_call(service: Stack) -> None:
    """503 at once with the reason and a time to wait, when no worker is alive."""
    [socket] = service.directory.glob("sandbox-redis-*/redis.sock")
    with lonely_gateway(f"unix://{socket}") as http:
        until(lambda: "worker" in http.get("/readyz").text, "news of the workers")
        answer = http.post("/v1/run", json={"code": "print(1)"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"] == {
        "name": "Unavailable",
        "message": "no worker is alive",
        "retry_after_s": 1.0,
    }


async def run_corpus(url: str, calls: list[ToolCall]) -> list[Answer]:
    """All calls, through few enough at a time for the gateway's bound."""
    async with SandboxClient(url, max_in_flight=MAX_IN_FLIGHT // 2) as client:
        return await client.run_many(calls)


def test_programs_print_what_they_printed_elsewhere(service: Stack) -> None:
    """Of 1,318 recorded programs only the two differ whose record is an error and not an output."""
    if not CORPUS.exists():
        pytest.skip(f"no corpus beside the checkout: {CORPUS.name}")
    programs = read_corpus(CORPUS)
    assert len(programs) == 1318
    short = {ENDLESS: Limits(wall_s=3)}
    calls = [ToolCall(code=p.code, deadline_s=150, limits=short.get(p.id, Limits())) for p in programs]
    answers = asyncio.run(run_corpus(service.url, calls))
    different = {
        program.id: "no result" if isinstance(answer, SandboxError) else answer.status.value
        for program, answer in zip(programs, answers, strict=True)
        if compare(program, answer) is not Agreement.EXACT
    }
    assert different == {BROKEN: "error", ENDLESS: "timeout"}
