"""Parts of a stack die under load. Callers lose nothing but time, or are told; what died is there again.

All tests share one stack and begin when all of it serves. Two workers have more slots than calls that end at
once, so that each of them holds calls at every moment of a load.
"""

from __future__ import annotations

import os
import signal

from sandbox.jail import PRELOADS

from .callers import Load, all_right, right_or_fault
from .conftest import WORKERS
from .processes import Process, alive, family, until
from .stack import Stack, gone


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
