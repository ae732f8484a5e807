"""Piston's language, field by field."""

from __future__ import annotations

import base64
import json
from typing import Any
from uuid import uuid4

import pytest

from gateway.dialects.piston import to_stage
from gateway.readiness import Obstacle
from gateway.tenants import ANONYMOUS
from sandbox.calls import MIB, CallStatus, ToolResult, Usage
from sandbox.settings import RedisSettings

from ..conftest import Serve, Service, bench, opened, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXECUTE = "/api/v2/execute"
ASK = {"language": "python", "version": "3.x", "files": [{"content": "echo hé"}]}
STAGE = {
    "stdout": "", "stderr": "", "output": "", "code": 0, "signal": None, "message": None, "status": None, "cpu_time": 0,
    "wall_time": 0, "memory": None,
}  # fmt: skip


async def answer(service: Service, **changed: Any) -> dict[str, Any]:
    response = await service.http.post(EXECUTE, json=ASK | changed)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def refusal(service: Service, body: Any) -> str:
    content = body if isinstance(body, str) else json.dumps(body)
    response = await service.http.post(EXECUTE, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["message"]
    return response.json()["message"]


async def test_every_field_of_an_answer(service: Service) -> None:
    """A program that ends well has code 0, and null for all that did not happen; the version is the worker's Python."""
    given = await answer(service)
    assert given == {
        "language": "python", "version": "3.13.1", "run": STAGE | {"stdout": "hé", "output": "hé"},
    }  # fmt: skip
    assert list(given["run"]) == list(STAGE)


async def test_runtimes(service: Service) -> None:
    """What clients ask for first has the Python of the workers."""
    response = await service.http.get("/api/v2/runtimes")
    assert response.json() == [
        {"language": "python", "version": "3.13.1", "aliases": ["py", "py3", "python3", "python3.13"]}
    ]


async def test_defaults(service: Service) -> None:
    """3 s of both times as in the original, this service's most of memory, no input."""
    await answer(service, stdin=None, args=[], run_timeout=0, run_memory_limit=-1, compile_timeout=1)
    call = service.worker.seen[-1].call
    assert (call.code, call.stdin, call.files) == ("echo hé", "", {})
    assert (call.limits.wall_s, call.limits.cpu_s) == (3.0, 3.0)
    assert (call.limits.memory_bytes, call.limits.output_bytes) == (2048 * MIB, MIB)


async def test_every_field_of_a_request(service: Service) -> None:
    """Times are ms, memory is bytes, and the first file that is text is the program, which also lies under its name."""
    files = [
        {"name": "data/a.bin", "content": base64.b64encode(b"\xff\0").decode(), "encoding": "base64"},
        {"name": "solve.py", "content": "echo", "encoding": "utf8"},
        {"content": "ff00", "encoding": "hex"},
        {"name": "b.txt", "content": "text", "encoding": "rot13"},
    ]
    await answer(
        service, language="py3", version=">=3.8 <4", files=files, stdin="in", run_timeout=2500, run_cpu_time=1500,
        run_memory_limit=256 * MIB, compile_memory_limit=-1, compile_cpu_time=3, unknown=1,
    )  # fmt: skip
    call = service.worker.seen[-1].call
    assert (call.code, call.stdin) == ("echo", "in")
    assert (call.limits.wall_s, call.limits.cpu_s, call.limits.memory_bytes) == (2.5, 1.5, 256 * MIB)
    found = {name: getattr(file, "base64", file) for name, file in call.files.items()}
    assert found == {"data/a.bin": b"\xff\0", "solve.py": "echo", "file2.code": b"\xff\0", "b.txt": "text"}


async def test_what_is_refused(service: Service) -> None:
    """A request that is wrong is 400 with `message`, in the original's words where it has some."""
    b64 = {"name": "a", "content": "%", "encoding": "base64"}
    for changed, words in [
        ({"language": None}, "language is required as a string"),
        ({"version": 3}, "version is required as a string"),
        ({"files": "x"}, "files is required as an array"),
        ({"files": [{"content": ""}, {"name": "x"}]}, "files[1].content is required as a string"),
        ({"files": []}, "files must include at least one utf8 encoded file"),
        ({"files": [b64]}, "files must include at least one utf8 encoded file"),
        ({"language": "cobol"}, "cobol-3.x runtime is unknown"),
        ({"language": "Python"}, "Python-3.x runtime is unknown"),
        ({"version": "2"}, "python-2 runtime is unknown"),
        ({"version": "3.12.0"}, "python-3.12.0 runtime is unknown"),
        ({"version": ""}, "version is required as a string"),
        ({"run_timeout": "9"}, "If specified, run_timeout must be a number"),
        ({"compile_memory_limit": []}, "If specified, compile_memory_limit must be a number"),
        ({"run_timeout": 60_001}, "run_timeout cannot exceed the configured limit of 60000"),
        ({"run_cpu_time": 60_001}, "run_cpu_time cannot exceed the configured limit of 60000"),
        ({"run_cpu_time": -1}, "run_cpu_time must be non-negative"),
        (
            {"run_memory_limit": 2**31 + 1},
            "run_memory_limit cannot exceed the configured limit of 2147483648",
        ),
        ({"run_memory_limit": 1}, "limits.memory_bytes: Input should be greater than or equal to 16777216"),
        (
            {"args": ["1"]},
            "args are not supported by this service: a program can read what it needs from stdin",
        ),
        ({"files": [{"content": ""}, b64]}, "files.a: Input should be base64"),
        ({"files": [{"content": ""}, b64 | {"encoding": "hex"}]}, "files[1].content: Input should be hex"),
        (
            {"files": [{"name": "../x", "content": ""}]},
            "files.../x.[key]: Value error, must be a relative path",
        ),
    ]:
        assert (await refusal(service, ASK | changed)).startswith(words), changed
    assert (await refusal(service, "{")).startswith("body: Invalid JSON")


async def test_another_content_type(service: Service) -> None:
    """What does not call itself JSON is 415."""
    for headers in ({"content-type": "text/plain"}, {}):
        response = await service.http.post(EXECUTE, content=json.dumps(ASK), headers=headers)
        assert (response.status_code, response.json()) == (
            415,
            {"message": "requests must be of type application/json"},
        )


async def test_what_is_no_verdict(start: Serve) -> None:
    """A full service and a call that waited too long are 429, a gateway that ends is 503, and a fault is 500."""
    service = await start(gateway={"max_in_flight": 1, "max_body_bytes": 2048})

    async def ends(code: str) -> tuple[int, str]:
        response = await service.http.post(EXECUTE, json=ASK | {"files": [{"content": code}]})
        return response.status_code, response.json()["message"]

    assert await ends("late") == (429, "no slot was free in time")
    assert await ends("fault") == (500, "the jail broke")
    assert await ends("x" * 4096) == (413, "the request is larger than 2048 bytes")
    with service.gateway.admission.enter(ANONYMOUS):
        assert await ends("echo") == (429, "1 of 1 calls are in flight here")
    service.gateway.readiness.refusing = Obstacle("draining", "this gateway ends")
    assert await ends("echo") == (503, "this gateway ends")


async def test_workers_of_several_pythons(redis_url: str) -> None:
    """All are listed, the newest first, and a version is good if every worker that may get the call has it."""
    redis = RedisSettings(url=redis_url, namespace=uuid4().hex)
    async with bench(redis) as start, opened(redis) as queue:
        service = await start()
        readiness = service.gateway.readiness
        other = service.worker.info().model_copy(update={"id": "other", "python": "3.9.18"})
        await queue.announce(other, ttl_s=60)
        await until(lambda: len(readiness.workers) == 2)
        listed = (await service.http.get("/api/v2/runtimes")).json()
        assert [one["version"] for one in listed] == ["3.13.1", "3.9.18"]
        assert await refusal(service, ASK | {"version": "3.13"}) == "python-3.13 runtime is unknown"
        assert (await answer(service))["version"] == "3.13.1", "the one that ran it"


async def test_a_worker_that_does_not_tell_its_python(redis_url: str) -> None:
    """As long as no worker says which Python it has no version can be promised, and nothing runs."""
    async with bench(RedisSettings(url=redis_url, namespace=uuid4().hex)) as start:
        service = await start()
        service.worker.python = ""
        await until(lambda: not service.gateway.readiness.workers[0].python)
        assert (await service.http.get("/api/v2/runtimes")).json() == []
        silent = await service.http.post(EXECUTE, json=ASK)
    assert (silent.status_code, silent.json()["message"]) == (
        503,
        "no worker has said yet which Python it has",
    )


USAGE = Usage(wall_s=1.2345, cpu_s=0.5, memory_peak_bytes=9000)
ENDS = [
    ({"status": "ok", "exit_code": 0}, (0, None, None, None)),
    ({"status": "error", "exit_code": 3}, (3, None, "RE", "Exited with error status 3")),
    ({"status": "signaled", "signal": 11}, (None, "SIGSEGV", "SG", "Caught fatal signal 11")),
    ({"status": "signaled", "signal": 40}, (None, None, "SG", "Caught fatal signal 40")),
    ({"status": "timeout", "signal": 9}, (None, "SIGKILL", "TO", "Time limit exceeded")),
    ({"status": "memory_limit", "exit_code": 0}, (None, "SIGKILL", "SG", "Memory limit exceeded")),
    ({"status": "output_limit", "stdout_truncated": True}, (None, "SIGKILL", "OL", "stdout length exceeded")),
    ({"status": "output_limit", "stderr_truncated": True}, (None, "SIGKILL", "EL", "stderr length exceeded")),
]


async def test_the_words_for_each_end() -> None:
    """Each way to end has its code, signal, status and message, and all say what it used and what it printed."""
    for fields, words in ENDS:
        stage = to_stage(ToolResult(id="a", stdout="o", stderr="e", usage=USAGE, **fields))
        assert (stage.code, stage.signal, stage.status, stage.message) == words
        assert (stage.stdout, stage.stderr, stage.output) == ("o", "e", "oe")
        assert (stage.wall_time, stage.cpu_time, stage.memory) == (1234, 500, 9000)
    verdicts = {CallStatus(fields["status"]) for fields, _ in ENDS}
    assert verdicts == {status for status in CallStatus if not status.is_fault}
