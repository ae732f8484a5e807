"""`python -m worker` as a process of its own: how it starts, how signals end it, and whom it outlives or obeys."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from sandbox.calls import CallStatus, Limits, ToolCall, ToolResult
from sandbox.jail.cgroups import FOLDER, find_place
from sandbox.keys import Keys
from sandbox.queue import CallQueue, Outcome, QueuedCall
from tests.system.processes import Process, alive, until

GATEWAY = "gateway"


@contextmanager
def worker(url: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process, which is killed if it is still there at the end."""
    variables = {
        "REDIS_URL": url,
        "SANDBOX_REDIS__NAMESPACE": "test",
        "SANDBOX_WORKER__SLOTS": "1",
        **more,
    }
    environ = os.environ | variables  # noqa: TID251 - what a worker is started with
    process = subprocess.Popen(
        [sys.executable, "-m", "worker"], env=environ, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def groups_of(pid: int) -> list[Path]:
    """What it has made among the control groups."""
    return [f for parent in find_place().parents.values() for f in parent.glob(f"{FOLDER}-w{pid}-*")]


def lives(pid: int) -> bool:
    """Whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def children(pid: int) -> list[int]:
    """The processes that it has started; none when it is gone."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except FileNotFoundError:
        return []


def wait_line(process: subprocess.Popen[str], event: str) -> None:
    """Read its log up to an event."""
    assert process.stderr is not None
    for line in process.stderr:
        if f'"event": "{event}"' in line:
            return
    pytest.fail(f"it ended without {event!r}")


async def put(queue: CallQueue, code: str) -> str:
    """Queue one call; its record."""
    now_ms = queue.now_ms()
    call = ToolCall(code=code, limits=Limits(wall_s=60))
    queued = QueuedCall(call, queue.record("", call.id), now_ms, now_ms + 120_000)
    await queue.put(GATEWAY, [queued])
    return queued.record


def sleeper(mark: str, seconds: int) -> str:
    """A program that the whole machine knows by a mark."""
    inner = f"import time; time.sleep({seconds})"
    return f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {inner!r}, {mark!r}])"


def programs(mark: str) -> list[Process]:
    """Those that run."""
    return [process for process in alive() if mark in process.command]


async def test_a_signal_during_the_start_leaves_nothing(any_redis) -> None:
    """Asked to end while its first jail starts, a worker exits 0 and takes jails and control groups with it."""
    with worker(any_redis.settings.url) as process:
        while not (jails := children(process.pid)):
            assert process.poll() is None
        assert len(groups_of(process.pid)) == len(find_place().parents)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
        assert (process.returncode, '"event": "serving"' in log) == (0, False)
    assert not any(map(lives, jails))
    assert groups_of(process.pid) == []


async def test_a_signal_ends_a_worker_that_serves(any_redis) -> None:
    """Asked to end while nothing runs, it exits 0 at once and leaves the registry."""
    with worker(any_redis.settings.url) as process:
        wait_line(process, "serving")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 0
    assert groups_of(process.pid) == []
    with any_redis.client() as stranger:
        assert stranger.zrange(Keys("test").workers, 0, -1) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SANDBOX_WORKER__SLOTZ", "1", "SANDBOX_WORKER__SLOTS"),
        ("SANDBOX_JAIL__RUNTIME", "/nowhere", "sandbox runtime build"),
        ("REDIS_URL", "http://nowhere", "REDIS_URL"),
    ],
)
def test_a_refused_start_is_one_sentence(name: str, value: str, words: str) -> None:
    """What makes a start impossible is told in one line that names the remedy, and the exit code is 2."""
    with worker("unix:///nowhere", **{name: value}) as process:
        _, log = process.communicate(timeout=30)
        assert process.returncode == 2
    said = log.strip().splitlines()[-1]
    assert said.startswith("worker: ")
    assert words in said
    assert "Traceback" not in log


async def test_a_call_that_nobody_waits_for_ends_at_once(any_redis, queue) -> None:
    """From the caller's going to the death of its program takes a tenth of a second, and no heartbeat."""
    mark = uuid4().hex
    with worker(any_redis.settings.url, SANDBOX_WORKER__LEASE_S="3600") as process:
        wait_line(process, "serving")
        record = await put(queue, sleeper(mark, 60))
        until(lambda: programs(mark), "the program")
        gone_at = time.monotonic()
        await queue.cancel(GATEWAY, [record])
        until(lambda: not programs(mark), "its end")
        assert time.monotonic() - gone_at < 1
        await put(queue, "print('next')")
        [(_, result)] = await replies(queue)
        assert ToolResult.model_validate_json(result).stdout == "next\n"


@pytest.mark.parametrize("seconds", [60, 2], ids=["runs on", "ends meanwhile"])
async def test_a_worker_that_was_frozen_takes_nothing_back(any_redis, queue, seconds: int) -> None:
    """What another worker has answered meanwhile is killed, or its result dropped, and the worker goes on."""
    mark = uuid4().hex
    with worker(any_redis.settings.url, SANDBOX_WORKER__LEASE_S="1") as process:
        wait_line(process, "serving")
        await put(queue, sleeper(mark, seconds))
        until(lambda: programs(mark), "the program")
        process.send_signal(signal.SIGSTOP)
        if seconds == 2:
            until(lambda: not programs(mark), "its end")
        theirs = []
        while not theirs:
            theirs = await queue.reclaim("other", 1, 1)
        result = ToolResult(id=theirs[0].call.id, status=CallStatus.OK, exit_code=0, worker="other")
        assert await queue.settle([Outcome(theirs[0], result)]) == [True]
        process.send_signal(signal.SIGCONT)
        until(lambda: not programs(mark), "its end")
        [(_, first)] = await replies(queue)
        assert ToolResult.model_validate_json(first) == result
        record = await put(queue, "print('next')")
        assert [name for name, _ in await replies(queue)] == [record]


async def replies(queue: CallQueue) -> list[tuple[str, bytes]]:
    """The next ones."""
    while True:
        if found := await queue.replies(GATEWAY):
            return found
