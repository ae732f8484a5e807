"""`python -m worker` as a process of its own: how it starts, and how signals end it at every moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox.jail.cgroups import FOLDER, find_place
from sandbox.keys import Keys


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
