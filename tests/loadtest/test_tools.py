"""The tools as people start them, against the real service."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.samples import load_samples
from loadtest.stack import own_stack

pytestmark = pytest.mark.usefixtures("_jail_runtime")


@pytest.fixture(scope="module")
def url(_jail_runtime: None) -> Iterator[str]:
    """A whole service for the tools that take one."""
    with own_stack() as running:
        yield running.url


def start(tool: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a tool with its output in a pipe."""
    command = [sys.executable, "-m", f"loadtest.{tool}", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def port_in(output: str) -> int:
    """The port of the gateway that a tool said it had started."""
    found = re.search(r"http://127\.0\.0\.1:(\d+)", output)
    assert found is not None, output
    return int(found[1])


def is_open(port: int) -> bool:
    """Whether anybody listens there."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_every_example_gives_its_outcome(tmp_path: Path) -> None:
    """The demonstration sends every example through the whole service, all end as they must, and nothing stays."""
    corpus = tmp_path / "small.jsonl"
    corpus.write_text('{"id": "a", "code": "print(1)", "stdout": "1"}\n')
    with start("demo", "--corpus", str(corpus)) as demo:
        output, _ = demo.communicate(timeout=55)
    assert demo.returncode == 0, output
    assert f"All {len(load_samples())} example calls gave the expected outcome." in output
    assert "\x1b" not in output
    assert not is_open(port_in(output))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demonstration_and_its_stack(number: signal.Signals) -> None:
    """Ctrl-C, and SIGTERM, in the middle of the calls stop all that was started."""
    with start("demo") as demo:
        assert demo.stdout is not None
        port = next(port_in(line) for line in demo.stdout if "The first result" in line)
        assert is_open(port)
        demo.send_signal(number)
        demo.communicate(timeout=30)
    assert demo.returncode == 128 + number
    assert not is_open(port)


def test_a_start_that_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the stack does not start, the tool ends with what the stack said last."""
    monkeypatch.setenv("SANDBOX_WORKER__SLOTZ", "1")
    with start("callers") as callers:
        output, _ = callers.communicate(timeout=30)
    assert callers.returncode == 1
    assert "SANDBOX_WORKER__SLOTZ is no setting of ours. The nearest is worker.slots" in output


def test_agreement_lists_what_differs(url: str, tmp_path: Path) -> None:
    """Equal outputs are counted, a number written differently apart, and every other output is shown."""
    corpus = tmp_path / "small.jsonl"
    programs = [("same", "print(18)", "18"), ("number", "print(18.0)", "18"), ("other", "print('no')", "yes")]
    corpus.write_text("".join(f"{json.dumps({'id': i, 'code': c, 'stdout': s})}\n" for i, c, s in programs))
    with start("agreement", str(corpus), "--url", url) as agreement:
        output, _ = agreement.communicate(timeout=30)
    assert agreement.returncode == 0, output
    assert "agreement: same output 1, same numbers 1, other output 1" in output
    assert "other: ok\n    recorded 'yes'\n    here     'no\\n'" in output
    assert "same: " not in output


def test_a_program_without_end_must_time_out(url: str, tmp_path: Path) -> None:
    """A program that was recorded as endless and ends here makes the comparison fail."""
    corpus = tmp_path / "small.jsonl"
    corpus.write_text('{"id": "a", "code": "print(1)", "stdout": "TimeoutError: Timed Out"}\n')
    with start("agreement", str(corpus), "--url", url) as agreement:
        output, _ = agreement.communicate(timeout=30)
    assert agreement.returncode == 1
    assert "a has no end: ok after" in output


def test_callers_measures_each_kind(url: str) -> None:
    """The closed loop gives one row for each kind and number of callers, and every answer is right."""
    arguments = ["--url", url, "--seconds", "0.5", "--callers", "2", "--json"]
    command = [sys.executable, "-m", "loadtest.callers", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)
    assert [(cell["kind"], cell["callers"], cell["errors"]) for cell in cells] == [
        ("print", 2, {}),
        ("numpy", 2, {}),
        ("sympy", 2, {}),
    ]
    assert all(cell["answered"] > 0 and cell["p50_ms"] <= cell["p99_ms"] for cell in cells)
