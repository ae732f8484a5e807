"""The end of a stack: asked for once, asked for twice, and without being asked."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from sandbox.jail.cgroups import FOLDER, find_place

from .callers import Load, all_right
from .processes import until
from .stack import Stack, gone, stack


def groups_of(workers: list[int]) -> list[Path]:
    """The folders of these workers among the control groups."""
    parents = find_place().parents.values()
    return [folder for parent in parents for pid in workers for folder in parent.glob(f"{FOLDER}-w{pid}-*")]


def listens(running: Stack) -> bool:
    """Whether anybody takes connections at its port."""
    address = urlsplit(running.url)
    with socket.socket() as probe:
        return probe.connect_ex((address.hostname, address.port)) == 0


def left_on_disk(running: Stack) -> list[Path]:
    return list(running.directory.rglob("*"))


@pytest.mark.parametrize("asked", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]], ids=["term", "hup"])
def test_a_stack_that_is_asked_to_end_answers_all_that_it_took(asked: list[signal.Signals]) -> None:
    """Under load: every call is answered right, the exit code is 0, and nothing of it is left anywhere.

    A closed terminal asks like SIGTERM, and twice: its shell and the kernel both tell of it.
    """
    with stack("--workers", "2", "--slots", "4") as running:
        load = Load(running.url, "end", 200)
        load.wait_answers(20)
        processes, workers = running.processes(), running.workers
        assert len(processes) > 4
        assert left_on_disk(running)
        assert len(groups_of(workers)) == 2 * len(find_place().parents)
        for number in asked:
            running.send(number)
            running.wait_log(0, "draining", program="gateway")
        all_right(load)
        assert running.wait() == 0
        assert running.processes() == set()
        assert left_on_disk(running) == []
        assert groups_of(workers) == []
        assert not listens(running)
        stages = [line["stage"] for line in running.log if line["event"] == "stopping"]
        assert stages == ["gateways", "workers", "redis"]


def test_nohup_keeps_a_stack() -> None:
    """Where SIGHUP is ignored, the end of a terminal is none of the stack's business."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = Stack("--slots", "4")
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        running.send(signal.SIGHUP)
        all_right(Load(running.url, "nohup", 20))
    finally:
        running.close()


def test_a_second_signal_ends_a_stack_at_once() -> None:
    """No program and no grace is waited for; callers see their connections break, and no process stays."""
    with stack("--slots", "4") as running:
        load = Load(running.url, "second", 5, seconds=0)
        all_right(load)
        long = Load(running.url, "long", 4, seconds=50, limits={"wall_s": 60})
        until(lambda: running.http.get("/v1/status").json()["backlog"]["running"] == 4, "four running calls")
        processes = running.processes()
        running.send(signal.SIGTERM)
        running.wait_log(0, "draining", program="gateway")
        asked = time.monotonic()
        running.send(signal.SIGTERM)
        running.wait()
        gone(processes)
        assert time.monotonic() - asked < 30
        assert long.broke_off()
        assert left_on_disk(running) == []
        assert not listens(running)


def test_nothing_outlives_a_killed_supervisor() -> None:
    """SIGKILL on the supervisor: gateway, worker, Redis and jails are gone in seconds, the control groups too."""
    with stack("--slots", "4") as running:
        all_right(Load(running.url, "before", 20))
        processes, workers = running.processes(), running.workers
        killed = time.monotonic()
        os.kill(running.pid, signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        gone(processes)
        assert time.monotonic() - killed < 25
        assert groups_of(workers) == []
        assert not listens(running)
