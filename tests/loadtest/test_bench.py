"""`sandbox bench`, on the real service."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from aiohttp.test_utils import unused_port
from typer.testing import CliRunner

from loadtest.bench import bench_app
from loadtest.load import Arrivals
from loadtest.measure import Options, measure
from loadtest.stack import own_stack, standin_stack
from sandbox import ConfigError, InvalidCall

pytestmark = pytest.mark.usefixtures("_jail_runtime")

SECOND = Arrivals("constant", rates=(20,), seconds=1)


@pytest.fixture(scope="module")
def url(_jail_runtime: None) -> Iterator[str]:
    """A whole service."""
    with own_stack() as running:
        yield running.url


@contextmanager
def fusion() -> Iterator[str]:
    """A service with the API of SandboxFusion, in which every program prints 1."""
    ran = {"status": "Finished", "execution_time": 0.001, "return_code": 0, "stdout": "1\n", "stderr": ""}
    answer = json.dumps({"status": "Success", "message": "", "run_result": ran}).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200 if (self.path, asked["language"]) == ("/run_code", "python") else 404)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as a person gives it."""
    command = [sys.executable, "-m", "sandbox", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


def test_a_bench_is_an_object_a_page_and_a_trace(url: str, tmp_path: Path) -> None:
    """One command measures two loads, prints one object, and writes page and calls; these are a plan for the next."""
    page, calls = tmp_path / "page.html", tmp_path / "calls.jsonl"
    common = ("--url", url, "--json")

    first = bench(
        *common, "--rate", "10", "--rate", "30", "--seconds", "1", "--html", str(page), "--calls", str(calls)
    )
    again = bench(*common, "--arrivals", "trace", "--trace", str(calls))

    found = json.loads(first.stdout)
    assert (found["how"], found["answered_by"], found["workload"]) == ("measured", "jail", "mixed")
    assert [run["load"] for run in found["runs"]] == ["poisson 10/s", "poisson 30/s"]
    assert found["runs"][1]["started_s"] >= found["runs"][0]["seconds"]  # each lasts its time
    for run in found["runs"]:
        assert run["right"] == run["answered"] == run["calls"] == sum(run["outcomes"].values())
        assert 0 < run["p50_s"] <= run["p99_s"] <= run["p999_s"]
        assert 0 < run["added_p50_s"] < run["p50_s"]
        assert run["cpu_s_per_call"] is None
    # Whether the generator was on time is this machine's business; that the exit code says it is ours.
    assert first.returncode == (3 if any(run["invalid"] for run in found["runs"]) else 0)
    assert "sandbox bench --url" in page.read_text()

    lines = [json.loads(line) for line in calls.read_text().splitlines()]
    [run] = json.loads(again.stdout)["runs"]
    assert run["calls"] == run["right"] == len(lines) == sum(run["calls"] for run in found["runs"])
    assert all(line["wall_s"] > 0 and line["cpu_s"] > 0 and line["outcome"] == "ok" for line in lines)
    assert run["seconds"] == pytest.approx(max(line["at_s"] for line in lines))


def test_the_client_is_measured_as_our_own_api_is(url: str) -> None:
    """Through the client that joins calls, all are answered and tell their usage."""
    found, [sent] = measure(Options(url, "client", "print", SECOND))

    assert found.runs[0].right == len(sent) == 20
    assert found.runs[0].added_p50_s is not None


def test_programs_of_ones_own_may_do_what_they_do(url: str, tmp_path: Path) -> None:
    """Of a program of which nothing is known, any verdict is right."""
    file = tmp_path / "calls.jsonl"
    file.write_text('{"code": "1 / 0"}\n{"code": "print(2)"}\n{"code": "raise SystemExit(3)"}\n')

    found, [sent] = measure(Options(url, workload=str(file), arrivals=SECOND))

    assert Counter(call.outcome for call in sent) == {"ok": 7, "error": 13}
    assert (found.runs[0].right, found.runs[0].wrong, found.workload) == (20, 0, "calls.jsonl")


def test_a_stack_of_our_own_tells_what_each_part_used() -> None:
    """Without a URL the service is started, and its CPU is told by part."""
    policy = os.sched_getscheduler(0)

    found, _ = measure(Options(workload="print", arrivals=SECOND))

    assert os.sched_getscheduler(0) == policy  # going first ends with the measurement
    used = found.runs[0].cpu_s_per_call
    assert used is not None
    assert used.keys() == {"gateway", "worker", "redis", "jail"}
    assert used["jail"] > 0 < used["gateway"]


def test_another_service_is_measured_in_its_own_words() -> None:
    """A service that is not ours is asked by its API, its answers are checked, and it answers by its target's name."""
    with fusion() as url:
        found, [sent] = measure(Options(url, "sandbox-fusion", "print", SECOND))

    assert (found.answered_by, found.runs[0].right) == ("sandbox-fusion", 20)
    assert {call.wall_s for call in sent} == {0.001}


def test_a_stand_in_is_called_that_and_wrong_answers_fail_the_command() -> None:
    """What a stand-in answers is told apart from a jail's; it is not what the programs print, so the code is 1."""
    with standin_stack("--hold", "0.01") as stack:
        ended = bench("--url", stack.url, "--arrivals", "burst", "--burst", "8", "--seconds", "1", "--json")

    found = json.loads(ended.stdout)
    assert found["answered_by"] == "stand-in"
    assert found["runs"][0]["wrong"] == found["runs"][0]["calls"] == 8
    assert ended.returncode == 1


def test_a_table_is_for_people(url: str) -> None:
    """Without --json the same is a table that says what was measured, of whom, and in which unit."""
    ended = bench(
        "--url", url, "--workload", "print", "--arrivals", "constant", "--rate", "5", "--seconds", "1"
    )

    assert ended.returncode in {0, 3}
    for words in ("constant 5/s", "5 ok", "print → v1", "measured, answered by: jail", "offered 5.0/s"):
        assert words in ended.stdout


def test_no_service_is_one_line() -> None:
    """Where nobody listens the command says so and ends."""
    ended = bench("--url", f"http://127.0.0.1:{unused_port()}")

    assert ended.returncode == 1
    assert ended.stderr.startswith("sandbox: ")
    assert "connect" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--target", "v2"), "sandbox-fusion"),
        (("--arrivals", "often"), "poisson"),
        (("--target", "code-judge"), "--url"),
        (("--workload", "no such"), "mixed"),
        (("--burst", "3"), "--rate"),
        (("--html", "no such folder/page.html"), "there is no such folder"),
        (("--calls", "."), "it is a folder"),
        (("--url", "http://127.0.0.1:1", "sockets"), "--url"),
        (("--json", "inflight"), "before its name"),
    ],
)
def test_a_mistake_is_answered_with_the_remedy(arguments: tuple[str, ...], complaint: str) -> None:
    """What cannot be measured is refused before anything is started, with what could be."""
    ended = CliRunner().invoke(bench_app, arguments)

    assert ended.exit_code in {1, 2}
    assert complaint in (ended.stderr or str(ended.exception))
    assert ended.stdout == ""


def test_a_call_that_a_target_cannot_take_is_refused_at_once(tmp_path: Path) -> None:
    """Nothing is sent to a service that has no words for one of the calls."""
    file = tmp_path / "calls.jsonl"
    file.write_text('{"code": "1", "files": {"a": "b"}}\n')

    with pytest.raises(ConfigError, match="code-judge has no files"):
        measure(Options("http://127.0.0.1:1", "code-judge", str(file), SECOND))
    file.write_text('{"code": 1}\n')
    with pytest.raises(InvalidCall):
        measure(Options("http://127.0.0.1:1", "v1", str(file), SECOND))
