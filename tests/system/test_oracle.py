"""The oracle sees what is wrong: each lie of a fake service, and whatever a service leaves behind.

A proof that nothing was lost is worth as much as the proof that a loss would have been seen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from sandbox import CallStatus
from sandbox.jail.cgroups import FOLDER, find_place
from sandbox.keys import GROUP, Keys
from tests.conftest import RunningRedis

from .callers import Callers, Way
from .chaos import Done, by_fault, send_signal
from .leftovers import in_redis, mounts_of_ours, on_machine
from .lying import Lie, Result, service
from .oracle import Call, Counts, Oracle
from .plan import FAULTS, faults, requests
from .processes import Process, alive

#: Where the machine is no excuse.
PROMPT_S = 0.5
CALL = Call("c-1", fields={"deadline_s": 0.2})

#: A number that no process has: jails of other tests in this process have groups under its own.
NO_WORKER = 4_194_305


def truth(call: Call, token: str = "0" * 16) -> Result:
    """What an honest service would answer."""
    printed = f"{call.value()} {token}\n"
    code = call.exit_code()
    told = {"status": call.end.value, "exit_code": code, "signal": None if code is not None else 9}
    return {"id": call.id, "stdout": printed, "stderr": "", "reason": None, **told}


def fault(call: Call) -> Result:
    return truth(call) | {"status": "internal_error", "stdout": "", "exit_code": None, "reason": "it broke"}


def counted(
    lie: Lie,
    *calls: Call,
    way: Way = "run",
    patience_s: float = 0.0,
    times: int = 1,
    forgets: bool = False,
    leave_after_s: float | None = None,
) -> Counts:
    """What the oracle says of calls that were sent to a service with this lie."""
    oracle = Oracle(allowance_s=PROMPT_S)

    def heard(call: Call, n: int) -> list[Result] | None:
        with oracle.forgetting() if forgets else nullcontext():
            return lie(call, n)

    async def send(url: str) -> None:
        callers = Callers(url, oracle, curiosity_s=0.2)
        for _ in range(times):
            await callers.send(calls, way=way, patience_s=patience_s, leave_after_s=leave_after_s)
        await callers.close()

    with service(heard, {call.id: call for call in calls}) as url:
        asyncio.run(send(url))
    return oracle.count()


ENDS = [
    Call(f"e-{end}", end)
    for end in (CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT, CallStatus.MEMORY_LIMIT)
]


@pytest.mark.parametrize("way", get_args(Way))
@pytest.mark.parametrize("call", ENDS, ids=[call.end for call in ENDS])
def test_the_truth_is_no_complaint(call: Call, way: Way) -> None:
    """An honest service is found to be one, whatever the end of a program."""
    counts = counted(lambda call, _: [truth(call)], call, way=way)
    assert (counts.accepted, counts.answered, counts.executed, counts.complaints) == (1, 1, 1, [])


@pytest.mark.parametrize("call", ENDS, ids=[call.end for call in ENDS])
def test_the_program_says_what_the_oracle_expects(call: Call) -> None:
    """What the oracle calls the truth is what a run of the program gives."""
    code = call.body()["code"].replace("time.sleep(1000)", "pass").replace("200 * 2**20", "1")
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert call.exit_code() in {None, ran.returncode}
    assert call.is_true(truth(call) | {"stdout": ran.stdout})


WRONG: dict[str, Callable[[Call], Result]] = {
    "another value": lambda call: truth(call) | {"stdout": f"{'0' * 64} {'0' * 16}\n"},
    "the value of another call": lambda call: truth(Call("c-2")),
    "no value": lambda call: truth(call) | {"stdout": ""},
    "more than the value": lambda call: truth(call) | {"stdout": truth(call)["stdout"] * 2},
    "another exit code": lambda call: truth(call) | {"exit_code": 1},
    "a signal": lambda call: truth(call) | {"status": "signaled", "exit_code": None, "signal": 9},
    "a timeout": lambda call: truth(call) | {"status": "timeout", "exit_code": None, "signal": 9},
    "a memory limit": lambda call: truth(call) | {"status": "memory_limit", "exit_code": None},
    "a status that does not exist": lambda call: truth(call) | {"status": "fine"},
    "something that is no result": lambda call: {"http": 500, "detail": "Internal Server Error"},
    "a fault without a reason": lambda call: fault(call) | {"reason": None},
    "an error of the caller": lambda call: {"http": 422, "error": {"name": "InvalidCall", "message": "no"}},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_seen(name: str) -> None:
    """A verdict that is not what the program does, and an error that is no fault of ours, are wrong."""
    counts = counted(lambda call, _: [WRONG[name](call)], CALL)
    assert (counts.wrong, counts.lost, counts.duplicates) == (1, 0, 0)
    assert not counts.is_clean


def test_a_fault_is_counted_by_its_kind() -> None:
    """A fault that says what failed keeps the promise, and is counted."""
    counts = counted(lambda call, _: [fault(call)], CALL)
    assert (counts.answered, counts.faults, counts.executed) == (1, {"internal_error": 1}, 0)
    assert counts.is_clean


def test_a_refused_call_was_not_taken() -> None:
    """503 before anything else is no loss and no answer."""
    error = {"http": 503, "error": {"name": "Unavailable", "message": "no worker is alive"}}
    counts = counted(lambda call, _: [error], CALL, patience_s=5)
    assert (counts.accepted, counts.refused, counts.sent_again) == (0, 1, 0)
    assert 0 < counts.worst_refusal_s < PROMPT_S
    assert counts.is_clean


@pytest.mark.parametrize("way", get_args(Way))
def test_a_lost_call_is_seen(way: Way) -> None:
    """A call without an answer is lost when its deadline, a second and the allowance are over."""
    counts = counted(lambda call, _: [], CALL, way=way)
    assert (counts.accepted, counts.answered, counts.lost) == (1, 0, 1)
    assert not counts.is_clean


def test_who_leaves_loses_nothing() -> None:
    """A caller that was to go gets no answer and misses none, whichever end of the connection went first."""
    for lie in ([], None):
        counts = counted(lambda call, _, lie=lie: lie, CALL, leave_after_s=0.2)
        assert (counts.accepted, counts.left, counts.sent_again) == (0, 1, 0)


@pytest.mark.parametrize("way", get_args(Way))
def test_a_broken_connection_is_sent_again(way: Way) -> None:
    """The second attempt has the answer; without one in the caller's patience the call is lost."""
    calls = [Call(f"b-{number}") for number in range(3 if way == "batch" else 1)]
    honest = counted(lambda call, n: [truth(call)] if n > 1 else None, *calls, way=way, patience_s=5)
    assert (honest.answered, honest.is_clean) == (len(calls), True)
    assert honest.sent_again >= len(calls)
    mute = counted(lambda call, _: None, *calls, way=way, patience_s=0.5)
    assert (mute.answered, mute.lost) == (0, len(calls))


def test_a_job_that_nobody_knows_any_more_is_lost() -> None:
    """404 for what was taken is a loss; when Redis has lost everything, the caller sends it again."""
    unknown = {"http": 404, "error": {"name": "NotFound", "message": "no such job"}}
    counts = counted(lambda call, n: [truth(call)] if n > 1 else [unknown], CALL, way="job", patience_s=5)
    assert (counts.answered, counts.lost, counts.sent_again) == (0, 1, 0)
    counts = counted(
        lambda call, n: [truth(call)] if n > 1 else [unknown], CALL, way="job", patience_s=5, forgets=True
    )
    assert (counts.answered, counts.lost, counts.sent_again) == (1, 0, 1)


def test_what_was_answered_is_not_sent_again() -> None:
    """Of a batch that broke in the middle only the rest is sent again."""
    calls = [Call(f"b-{number}") for number in range(3)]
    counts = counted(
        lambda call, n: [truth(call)] if n > 1 or call.id == "b-0" else None,
        *calls,
        way="batch",
        patience_s=5,
    )
    assert (counts.answered, counts.sent_again, counts.is_clean) == (3, 2, True)


def test_a_late_answer_is_lost() -> None:
    """It is told how late it was; while a gateway stood still nobody could have been in time."""
    now = [0.0]
    oracle = Oracle(clock=lambda: now[0])
    for name, at in (("in-time", 6.0), ("late", 7.5), ("lost", 9.0)):
        now[0] = 0.0
        attempt = oracle.attempt(Call(name, fields={"deadline_s": 5}), 1)
        now[0] = at
        oracle.answer(attempt, truth(Call(name)))
    counts = oracle.count()
    assert (counts.accepted, counts.answered, counts.late, counts.lost) == (3, 2, 1, 1)
    assert counts.worst_over_deadline_s == 4.0
    oracle.stood_still(1.0, 2.0)
    oracle.stood_still(1.5, 3.0)
    assert (oracle.count().lost, oracle.count().worst_over_deadline_s) == (0, 2.0)


def test_a_second_answer_is_seen() -> None:
    """Two lines for one call of a batch are a duplicate, also when they say the same."""
    counts = counted(lambda call, _: [truth(call), truth(call)], CALL, way="batch")
    assert (counts.answered, counts.duplicates, counts.wrong) == (1, 1, 0)
    assert not counts.is_clean


def test_a_second_run_is_seen() -> None:
    """A call that is sent again after its answer gets that answer; another run of it is a duplicate."""
    kept = counted(lambda call, _: [truth(call)], CALL, times=2)
    assert (kept.answered, kept.duplicates) == (1, 0)
    ran = counted(lambda call, n: [truth(call, f"{n:016x}")], CALL, times=2)
    assert (ran.answered, ran.duplicates, ran.wrong) == (1, 1, 0)


def test_redis_may_forget_an_answer() -> None:
    """Two values of one call are excused when Redis lost everything between them, and only then."""
    now = [0.0]
    oracle = Oracle(clock=lambda: now[0])
    for at, token in ((1.0, "1" * 16), (3.0, "2" * 16)):
        now[0] = at
        oracle.answer(oracle.attempt(CALL, 1), truth(CALL, token))
    assert oracle.count().duplicates == 1
    now[0] = 4.0
    with oracle.forgetting():
        assert oracle.count().duplicates == 1
        assert oracle.has_forgotten(since=100.0), "it may still lose what comes later"
    assert not oracle.has_forgotten(since=100.0)
    now[0] = 2.0
    with oracle.forgetting():
        pass
    assert (oracle.count().duplicates, oracle.count().ran_again) == (0, 1)


def test_a_stray_line_is_seen() -> None:
    """A line that belongs to no call of the batch is wrong."""
    counts = counted(lambda call, _: [truth(call), {"index": 7} | truth(call)], CALL, way="batch")
    assert (counts.answered, counts.wrong) == (1, 1)


async def test_what_is_left_in_redis_is_seen(any_redis: RunningRedis) -> None:
    """A call that nobody took, one that nobody settled, and a key that never expires."""
    keys = Keys("sandbox")
    with any_redis.client() as client:
        assert in_redis(client) == []
        client.xgroup_create(keys.calls("tool"), GROUP, "0", mkstream=True)
        assert in_redis(client) == []
        entry = client.xadd(keys.calls("tool"), {"call": "{}"})
        assert in_redis(client) == [f"{keys.calls('tool')}: lag 1, pending 0"]
        client.xreadgroup(GROUP, "w", {keys.calls("tool"): ">"})
        assert in_redis(client) == [f"{keys.calls('tool')}: lag 0, pending 1"]
        client.xack(keys.calls("tool"), GROUP, entry)
        client.set("{sandbox}:something", "1")
        assert in_redis(client) == ["{sandbox}:something never expires"]
        client.expire("{sandbox}:something", 60)
        assert in_redis(client) == []


def test_what_is_left_on_the_machine_is_seen(tmp_path: Path) -> None:
    """A process, a file, a control group of a worker, and a mount; each for as long as it is there."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount and make control groups")
    [own] = [process for process in alive() if process.pid == os.getpid()]
    folder = tmp_path / "stack-of-a-test"
    folder.mkdir()
    mounts = mounts_of_ours()

    def left(*processes: Process) -> list[str]:
        gone = SimpleNamespace(directory=folder, processes=lambda: set(processes))
        return [each.split()[0] for each in on_machine(gone, [NO_WORKER], mounts)]

    assert left() == []
    assert left(own) == ["process"]
    (folder / "redis.sock").touch()
    assert left() == ["file"]
    (folder / "redis.sock").unlink()
    for parent in find_place().parents.values():
        group = parent / f"{FOLDER}-w{NO_WORKER}-test"
        group.mkdir()
        assert left() == ["group"]
        group.rmdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(folder)], check=True)
    try:
        assert left() == ["mount"]
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert left() == []


def test_a_plan_follows_from_its_seed() -> None:
    """The same seed gives the same faults and requests, another one gives others."""
    assert (faults(7, 90), requests(7, 90)) == (faults(7, 90), requests(7, 90))
    assert faults(7, 90) != faults(8, 90)
    assert requests(7, 90) != requests(8, 90)


def test_a_plan_has_everything_in_it() -> None:
    """In a minute and a half each fault comes, each end of a program, both ways to send, and callers that go."""
    steps, sent = faults(7, 90), requests(7, 90)
    assert {step.fault for step in steps} == set(FAULTS)
    calls = [call for request in sent for call in request.calls]
    assert {call.end for call in calls} == {call.end for call in ENDS}
    assert len({call.id for call in calls}) == len(calls)
    assert {request.way for request in sent} == set(get_args(Way))
    assert {call.header_s is None for call in calls} == {True, False}
    assert any(request.leave_after_s is not None for request in sent)
    assert any(request.asks_again for request in sent)
    assert 15 < len(calls) / 90 < 45


def test_faults_are_told_by_the_kind_that_they_came_with() -> None:
    """A call that was open while something died counts for it; others do not."""
    now = [0.0]
    oracle = Oracle(clock=lambda: now[0])
    for number, at in enumerate((0.0, 10.0)):
        now[0] = at
        attempt = oracle.attempt(Call(f"f-{number}"), 1)
        now[0] = at + 3
        oracle.answer(attempt, fault(Call(f"f-{number}")))
    told = by_fault(oracle, [Done("worker-kill", 1.0, 2.0), Done("redis-kill", 5.0, 6.0)])
    assert told["worker-kill"] == {"times": 1, "worst_latency_s": 3.0, "faults": {"internal_error": 1}}
    assert told["redis-kill"] == {"times": 1, "worst_latency_s": 0.0, "faults": {}}


def test_no_signal_for_another_life() -> None:
    """A number that was given out again is not signalled."""
    [own] = [process for process in alive() if process.pid == os.getpid()]
    assert not send_signal(replace(own, started=own.started - 1), signal.SIGKILL)
