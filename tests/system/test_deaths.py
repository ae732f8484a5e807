"""Parts of a stack die under load. Callers lose nothing but time, or are told; what died is there again.

All tests share one stack and begin when all of it serves. Two workers have more slots than calls that end at
once, so that each of them holds calls at every moment of a load.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sandbox.jail import PRELOADS

from .load import Load, all_right, right_or_fault
from .processes import Process, alive, family, until
from .stack import Stack, gone, stack

WORKERS = 2
#: Long enough that a heartbeat on a busy machine is no silence.
LEASE_S = 3


@pytest.fixture(scope="module")
def the_stack() -> Iterator[Stack]:
    """Two workers, one gateway, and a Redis of its own."""
    options = ("--workers", str(WORKERS), "--slots", "8")
    with stack(*options, SANDBOX_WORKER__LEASE_S=str(LEASE_S)) as running:
        yield running


@pytest.fixture
def whole(the_stack: Stack) -> Stack:
    """The stack, when all of it serves."""
    until(lambda: the_stack.is_ready() and len(the_stack.worker_ids()) == WORKERS, "the whole stack")
    the_stack.processes()  # so that it knows what may have to be gone
    return the_stack


def jails_of(worker: int) -> list[list[Process]]:
    """The jails of a worker that have a forkserver: nsjail, forkserver, and what that runs now."""
    now = alive()
    nsjails = [process for process in now if process.parent == worker and "nsjail" in process.command]
    jails = [[nsjail, *family(nsjail.pid, now)] for nsjail in nsjails]
    return [jail for jail in jails if len(jail) > 1]


def has_all_jails(worker: int) -> None:
    """Wait until a worker has a jail for each preload."""
    until(lambda: len(jails_of(worker)) == len(PRELOADS), "all jails")


def test_a_worker_that_is_asked_to_end_loses_no_call(whole: Stack) -> None:
    """SIGTERM under load: every call is answered once and right, the worker exits 0, another takes its place."""
    mark = len(whole.log)
    victim = whole.workers[0]
    before = whole.worker_ids()
    load = Load(whole.url, "term", 400)
    load.wait_answers(40)
    os.kill(victim, signal.SIGTERM)
    all_right(load)
    assert whole.wait_log(mark, "drained")["unsettled"] == 0
    assert whole.wait_log(mark, "child ended")["exit_code"] == 0
    until(lambda: len(whole.worker_ids()) == WORKERS, "the new worker")
    assert victim not in whole.workers
    assert len(whole.worker_ids() - before) == 1


def test_a_worker_that_is_killed_loses_no_call(whole: Stack) -> None:
    """SIGKILL under load: what it ran is run by the other one, and its jails and programs die with it."""
    mark = len(whole.log)
    victim = whole.workers[0]
    its_own = set(family(victim))
    load = Load(whole.url, "kill", 400)
    load.wait_answers(40)
    os.kill(victim, signal.SIGKILL)
    all_right(load)
    assert whole.wait_log(mark, "child ended")["exit_code"] == -signal.SIGKILL
    assert whole.wait_log(mark, "took over calls of a silent worker")["calls"] >= 1
    gone(its_own)
    until(lambda: len(whole.worker_ids()) == WORKERS, "the new worker")


def test_a_forkserver_that_is_killed_is_replaced(whole: Stack) -> None:
    """SIGKILL on the forkservers that run programs: calls are run again or answered as a fault."""
    kill_in_use(whole, "fork", below=1)


def test_an_nsjail_that_is_killed_is_replaced(whole: Stack) -> None:
    """SIGKILL on the nsjails whose forkservers run programs: the same."""
    kill_in_use(whole, "nsjail", below=0)


def kill_in_use(whole: Stack, name: str, below: int) -> None:
    """Kill the jail that runs programs in each worker, at its nsjail or `below` that; then all must be well."""
    workers = whole.workers
    for worker in workers:
        has_all_jails(worker)
    load = Load(whole.url, name, 400, seconds=0.1)
    load.wait_answers(40)
    broken: set[Process] = set()
    for worker in workers:
        in_use = max(jails_of(worker), key=len)
        os.kill(in_use[below].pid, signal.SIGKILL)
        broken.update(in_use)
    assert right_or_fault(load) >= 300
    gone(broken)
    assert whole.workers == workers
    for worker in workers:
        has_all_jails(worker)
    all_right(Load(whole.url, f"{name}-after", 40))


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_redis_is_silent_for_a_while(whole: Stack) -> None:
    """A Redis that hangs: new calls get 503 soon, then at once; afterwards all goes on in the same processes."""
    before = (whole.gateways, whole.workers)
    load = Load(whole.url, "freeze", 400, deadline_s=6, limits={"wall_s": 6})
    load.wait_answers(40)
    with frozen(whole.redis):
        frozen_at = time.monotonic()
        refused_within(whole, 5)
        until(lambda: not whole.is_ready(), "news of the silence")
        refused_within(whole, 2)
        until(lambda: time.monotonic() > frozen_at + 3, "three seconds")
    recovered(whole)
    right_or_fault(load)
    assert (whole.gateways, whole.workers) == before


def test_redis_is_killed(whole: Stack) -> None:
    """A Redis that comes back empty: what it held is answered as a fault, and all goes on in the same processes."""
    before = (whole.gateways, whole.workers)
    pid = whole.redis
    [redis] = [process for process in alive() if process.pid == pid]
    load = Load(whole.url, "redis", 400, deadline_s=3, limits={"wall_s": 1})
    load.wait_answers(40)
    with frozen(whole.pid):  # so that there is none until we have looked
        os.kill(redis.pid, signal.SIGKILL)
        gone({redis})
        refused_within(whole, 2)
        until(lambda: not whole.is_ready(), "news of the death")
    recovered(whole)
    assert whole.redis != redis.pid
    assert right_or_fault(load) >= 1
    assert (whole.gateways, whole.workers) == before


def refused_within(whole: Stack, seconds: float) -> None:
    """The next call gets 503, in this time."""
    began = time.monotonic()
    answer = whole.run("print(1)", deadline_s=2)
    assert (answer.status_code, answer.json()["error"]["name"]) == (503, "Unavailable")
    assert time.monotonic() - began < seconds


def recovered(whole: Stack) -> None:
    """Wait until the gateway takes calls again, and see that they are served as ever."""
    until(whole.is_ready, "recovery")
    all_right(Load(whole.url, "again", 20))
    assert whole.run("print(2)").json()["stdout"] == "2\n"
