"""`sandbox bench sockets` and `sandbox bench inflight`, small, with all their processes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.held import descendants
from loadtest.together import Together

GOOD = Together(
    calls=6,
    connections=2,
    gateways=1,
    clients=1,
    hold_s=0.3,
    in_flight_peak=6,
    waiting_at_gate=6,
    connections_at_gate=2,
    answered=6,
    errors=0,
    unanswered=0,
    duplicates=0,
    foreign=0,
    wrong=0,
    errors_by_name={},
    mean_s=0.5,
    p50_s=0.5,
    p99_s=0.6,
    queued_s=0.1,
    counted_s=0.1,
    answered_s=0.3,
    rss_bytes=2,
    rss_idle_bytes=1,
    client_rss_bytes=1,
    cpu_s_per_call={},
    note="",
)


def bench(*arguments: str, files: int = 20_000) -> subprocess.Popen[str]:
    """Start a command of `sandbox bench` whose processes may open so many files each."""
    command = ("sh", "-c", f'ulimit -n {files} && exec "$@"', "sh", sys.executable, "-m", "loadtest", "bench")
    return subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )


def run(*arguments: str, files: int = 20_000) -> tuple[dict[str, Any], str]:
    """Its one object, and what it said beside it."""
    with bench(*arguments, "--json", files=files) as running:
        output, said = running.communicate(timeout=55)
    assert running.returncode == 0, output + said
    return json.loads(output), said


def is_whole(told: dict[str, Any], calls: int) -> bool:
    """Whether all were in flight at once, by each count, and each was answered once."""
    counts = ("calls", "in_flight_peak", "waiting_at_gate", "answered")
    faults = ("errors", "unanswered", "duplicates", "foreign", "wrong")
    return {told[name] for name in counts} == {calls} and not any(told[name] for name in faults)


def test_single_requests_are_all_open_at_once() -> None:
    """300 requests over two gateways from two clients: client, queue and kernel count all of them, all are answered."""
    told, said = run("sockets", "--calls", "300", "--gateways", "2", files=500)
    assert is_whole(told, 300)
    assert (told["connections"], told["connections_at_gate"]) == (300, 300)
    assert (told["gateways"], told["clients"], told["note"]) == (2, 2, "")
    assert 0.3 <= told["p50_s"] <= told["p99_s"]
    assert told["answered_s"] >= told["hold_s"] == 0.3
    assert told["rss_bytes"] > told["rss_idle_bytes"] > 0
    assert told["client_rss_bytes"] > 0
    assert told["cpu_s_per_call"].keys() == {"gateway", "redis", "stand-in", "clients"}
    assert (told["how"], told["answered_by"]) == ("measured", "stand-in")
    assert "all 300 wait in the queue, and none has been taken" in said


def test_more_gateways_than_asked_for_are_not_silent() -> None:
    """Where one gateway may not open so many files there are two, and both outputs say so."""
    told, said = run("sockets", "--calls", "300", "--gateways", "1", files=500)
    assert is_whole(told, 300)
    assert told["gateways"] == 2
    assert "a process may open 500 files (ulimit -Hn): 2 gateways instead" in told["note"]
    assert told["note"] in said


def test_batches_are_in_flight_at_once() -> None:
    """8 batches of 16 have 128 calls in flight on 8 connections, each answered once."""
    told, _ = run("inflight", "--batches", "8", "--size", "16", "--hold", "0.1")
    assert is_whole(told, 128)
    assert (told["connections"], told["connections_at_gate"]) == (8, 8)
    assert told["answered_s"] >= 0.1


def test_a_person_reads_the_same() -> None:
    """Without --json there is a table that says what answered and that it was measured."""
    with bench("inflight", "--batches", "2", "--size", "4") as running:
        output, said = running.communicate(timeout=55)
    assert running.returncode == 0, said
    assert "2 batches of 4 in flight at once (measured, answered by a stand-in)" in output
    assert re.search(r"waiting then, none taken: the queue's count +8 ", output)
    assert re.search(r"answered, right and once +8 ", output)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"in_flight_peak": 5},
        {"waiting_at_gate": 5},
        {"connections_at_gate": 1},
        {"answered": 5, "unanswered": 1, "errors": 1},
        {"foreign": 1, "errors": 1},
    ],
    ids=lambda spoilt: next(iter(spoilt)),
)
def test_what_is_not_proved_is_not_taken_for_it(spoilt: dict[str, int]) -> None:
    """A peak below the number of calls, by whichever count, or one answer that is not right, is a failure."""
    assert GOOD.is_proved
    assert not replace(GOOD, **spoilt).is_proved  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process_behind(number: signal.Signals) -> None:
    """Ctrl-C, and SIGTERM, while calls are held end clients, gateways, stand-in and Redis."""
    with bench("inflight", "--batches", "4", "--size", "8", "--hold", "600", "--json") as running:
        assert running.stderr is not None
        assert any("none has been taken" in line for line in running.stderr)
        below = descendants(running.pid)
        commands = " ".join(Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") for pid in below)
        assert all(
            part in commands for part in ("loadtest.crowd", "gateway", "loadtest.standin", "redis.sock")
        )
        running.send_signal(number)
        output, said = running.communicate(timeout=55)
    assert running.returncode == 128 + number
    assert output == ""
    assert not re.search("Task|Traceback", said)  # each ended in order, and the service at once
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
