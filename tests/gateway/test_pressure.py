"""The estimate of a call's wait, and what is refused by it, on a clock and a service of the test's own."""

from __future__ import annotations

import heapq
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.metrics import Metrics
from gateway.pressure import FORGET_S, LONGEST_RETRY_S, SILENCE_S, Pressure
from sandbox.errors import Overloaded
from sandbox.queue import Pulse, StreamPulse

STEP_S = 0.5
NONE = StreamPulse(0, 0, 0)


class Service:
    """Slots that take calls from the stream `tool`, each for the same time, and a Pressure that watches."""

    def __init__(self, slots: int = 8, call_s: float = 0.1, max_backlog: int = 1_000_000) -> None:
        self.clock_s = 0.0
        self.metrics = Metrics()
        self.pressure = Pressure(max_backlog, self.metrics, lambda: self.clock_s)
        self.slots = slots
        self.call_s = call_s
        self.waiting = 0
        self.taken = 0
        self.run_id = "first"
        self._ends: list[float] = []

    def pulse(self, **changed: int) -> None:
        tool = StreamPulse(self.waiting, len(self._ends), self.taken)
        memory = {"used_bytes": 1, "max_bytes": 0} | changed
        pulse = Pulse(self.run_id, **memory, streams={"tool": tool, "judge": NONE})
        self.pressure.note(pulse, self.slots)

    def run(self, seconds: float, *, pulses: bool = True) -> None:
        """Let the clock go on, with a pulse at each step."""
        for _ in range(round(seconds / STEP_S)):
            now_s, self.clock_s = self.clock_s, self.clock_s + STEP_S
            while True:
                while len(self._ends) < self.slots and self.waiting:
                    heapq.heappush(self._ends, now_s + self.call_s)
                    self.waiting -= 1
                    self.taken += 1
                if not self._ends or self._ends[0] > self.clock_s:
                    break
                now_s = heapq.heappop(self._ends)
            if pulses:
                self.pulse()

    def stick(self) -> None:
        """Let no running call ever end."""
        self._ends = [math.inf] * len(self._ends)

    def wait_s(self) -> float:
        wait_s = self.pressure.wait_s("tool")
        assert wait_s is not None
        return wait_s

    def refusal(self, deadline_s: float, ahead: int = 0) -> Overloaded | None:
        try:
            self.pressure.check("tool", deadline_s, ahead)
        except Overloaded as exc:
            return exc
        return None

    def shed(self, reason: str) -> float:
        return (
            self.metrics.registry.get_sample_value("sandbox_gateway_shed_calls_total", {"reason": reason})
            or 0.0
        )


def busy(slots: int = 8, call_s: float = 0.1, waiting: int = 10_000, seconds: float = 10.0) -> Service:
    """A service that has been at work on a backlog for a while."""
    service = Service(slots, call_s)
    service.pulse()
    service.waiting = waiting + math.ceil(seconds / call_s + 1) * slots
    service.run(seconds)
    return service


@settings(max_examples=200, deadline=None, derandomize=True)
@given(slots=st.integers(1, 64), call_s=st.floats(0.02, 20))
def test_the_estimate_is_near_the_truth(slots: int, call_s: float) -> None:
    """Once calls have ended four times over, it is within a factor of two, however long they take."""
    service = busy(slots, call_s, waiting=100_000, seconds=10 + 4 * call_s)
    for _ in range(20):
        service.run(STEP_S)
        truth_s = service.waiting / slots * call_s
        assert truth_s / 2 < service.wait_s() < truth_s * 2


@settings(max_examples=200, deadline=None, derandomize=True)
@given(slots=st.integers(1, 64), call_s=st.floats(0.02, 60), seconds=st.floats(0, 30))
def test_it_comes_to_the_truth_from_below(slots: int, call_s: float, seconds: float) -> None:
    """While little is known, nobody is told of a wait that is more than twice the true one."""
    service = busy(slots, call_s, waiting=1000, seconds=seconds)
    wait_s = service.pressure.wait_s("tool")
    assert wait_s is None or wait_s < 2 * service.waiting / slots * call_s


def test_it_comes_there_soon() -> None:
    """When every slot has ended two calls, the estimate is within a factor of two."""
    service = busy(slots=8, call_s=2, waiting=1000, seconds=4)
    assert service.wait_s() > service.waiting / 8 * 2 / 2


def test_nobody_is_refused_for_want_of_knowledge() -> None:
    """A backlog of which it is not known how fast it goes keeps nobody out."""
    service = Service()
    service.waiting = 100_000
    service.pulse()
    assert service.pressure.wait_s("tool") is None
    assert service.refusal(0.001) is None
    estimated = service.metrics.registry.get_sample_value(
        "sandbox_gateway_estimated_wait_seconds", {"priority": "tool"}
    )
    assert estimated is not None
    assert math.isnan(estimated)


def test_a_call_that_would_be_late_is_refused() -> None:
    """80 calls a second and 8,000 of them: a deadline of 50 s is refused, one of 200 s is not."""
    service = busy(waiting=8000)
    refusal = service.refusal(50)
    assert refusal is not None
    assert re.fullmatch(r"it would wait about \d+ s, and is due in 50 s", refusal.message)
    assert refusal.retry_after_s == pytest.approx(50, rel=0.1)
    assert service.refusal(200) is None
    assert service.shed("late") == 1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    waiting=st.integers(0, 20_000),
    deadline_s=st.floats(0.01, 100),
    ahead=st.integers(0, 5000),
    call_s=st.floats(0.02, 2),
)
def test_who_comes_back_when_told_is_taken(
    waiting: int, deadline_s: float, ahead: int, call_s: float
) -> None:
    """`retry_after_s` is between a second and a minute, in whole seconds, and no longer than need be or too short."""
    service = busy(call_s=call_s, waiting=waiting)
    wait_s = service.pressure.wait_s("tool", ahead)
    refusal = service.refusal(deadline_s, ahead)
    assert (refusal is None) == (wait_s is None or wait_s < deadline_s or not service.waiting + ahead)
    if refusal is not None:
        assert wait_s is not None
        assert refusal.retry_after_s in range(1, int(LONGEST_RETRY_S) + 1)
        if 1 < refusal.retry_after_s < LONGEST_RETRY_S:
            assert 0 <= refusal.retry_after_s - (wait_s - deadline_s) < 1


def test_slots_that_are_all_stuck_are_found_out() -> None:
    """When nothing is taken any more the wait grows at every pulse, beyond any deadline."""
    service = busy(waiting=1000)
    assert service.refusal(60) is None
    service.stick()
    before_s = service.wait_s()
    for _ in range(60):
        service.run(STEP_S)
        assert service.wait_s() > before_s
        before_s = service.wait_s()
    assert service.refusal(60) is not None


def test_a_service_whose_slots_were_stuck_from_the_start_is_found_out_too() -> None:
    """Of calls of which none has ended we expect that they take as long again, and then no longer."""
    service = Service(slots=8, call_s=math.inf)
    service.waiting = 1000
    service.pulse()
    service.run(10)
    assert service.refusal(60) is not None


def test_workers_that_take_a_moment() -> None:
    """Where calls wait for idle workers that have not taken them yet, nobody is sent away for that; for long they are."""
    service = Service(slots=8)
    service.waiting = 50
    for _ in range(2):
        service.pulse()
        service.clock_s += STEP_S
    assert service.refusal(10) is None
    for _ in range(20):
        service.pulse()
        service.clock_s += STEP_S
    assert service.refusal(10) is not None


def test_workers_that_take_nothing_at_all() -> None:
    """Where calls wait, none runs and none is taken, the wait has no end."""
    service = Service(slots=0)
    service.waiting = 1
    service.pulse()
    service.run(1)
    refusal = service.refusal(1e9)
    assert refusal is not None
    assert refusal.retry_after_s == LONGEST_RETRY_S
    assert "without end" in refusal.message


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.0, 0.5, 3.0]), max_size=20))
def test_an_empty_stream_lets_everybody_in(steps: list[float]) -> None:
    """Whatever was before, a call that nobody is ahead of is taken."""
    service = busy()
    service.stick()
    for seconds in steps:
        service.run(seconds)
    service.waiting = 0
    service.pulse()
    assert service.wait_s() == 0
    assert service.refusal(0.01) is None


def test_our_own_puts_count_at_once() -> None:
    """What was put since the last pulse is waited for, and what has been taken since then is not."""
    service = busy(waiting=0)
    service.pressure.note_put("tool", 800)
    assert service.wait_s() == pytest.approx(10, rel=0.2)
    service.clock_s += 4
    assert service.wait_s() == pytest.approx(6, rel=0.3)
    service.pulse()
    assert service.wait_s() == 0


def test_a_silence_of_redis_is_no_slow_service() -> None:
    """What nobody could take while Redis was away says nothing of the pace."""
    service = busy(waiting=8000)
    before_s = service.wait_s()
    service.clock_s += SILENCE_S + 1
    service.pulse()
    assert service.wait_s() == before_s


def test_another_server_is_learned_anew() -> None:
    """After a restart or failover counts begin again, and nothing is made of the difference."""
    service = busy(waiting=8000)
    service.run_id, service.taken = "second", 0
    service.pulse()
    assert service.pressure.wait_s("tool") is None
    service.run(1)
    assert service.pressure.wait_s("tool") is not None


def test_a_count_that_redis_does_not_know_teaches_nothing() -> None:
    """When somebody has deleted entries, what is known stays."""
    service = busy(waiting=8000)
    before_s = service.wait_s()
    tool = StreamPulse(service.waiting, 8, None)
    service.clock_s += STEP_S
    service.pressure.note(Pulse("first", 1, 0, {"tool": tool, "judge": NONE}), 8)
    assert service.wait_s() == before_s


def test_an_old_pace_is_forgotten() -> None:
    """What was seen a minute ago of another number of workers refuses nobody."""
    service = busy(waiting=1000)
    service.waiting = 0
    service.run(FORGET_S + 1)
    service.waiting = 100_000
    service.pulse()
    assert service.pressure.wait_s("tool") is None


def test_more_workers_show_without_a_backlog() -> None:
    """A pace that is surpassed is corrected also while the stream runs empty between two pulses."""
    service = busy(waiting=0)
    service.slots = 80
    for _ in range(40):
        service.waiting = 300
        service.run(STEP_S)
        assert service.waiting == 0
    service.pressure.note_put("tool", 4000)
    assert service.wait_s() < 10


def test_the_backlog_has_a_bound_for_each_priority() -> None:
    """As many calls as may wait: one more is refused, whatever its deadline; the other priority is not."""
    service = Service(max_backlog=100)
    service.waiting = 99
    service.pulse()
    assert service.refusal(1) is None
    service.pressure.note_put("tool", 1)
    refusal = service.refusal(3600)
    assert refusal is not None
    assert (refusal.message, refusal.retry_after_s) == ("100 calls wait, and no more may", 1)
    assert service.shed("backlog") == 1
    service.pressure.check("judge", 1)


def test_a_redis_that_is_nearly_full_is_full_until_there_is_room() -> None:
    """From 85 % of the bound on, and then until below 80 %; without a bound never."""
    service = Service()
    seen = []
    for used in (84, 85, 81, 80, 79, 84, 100):
        service.pulse(used_bytes=used, max_bytes=100)
        seen.append(service.pressure.is_full)
    assert seen == [False, True, True, True, False, False, True]
    service.pulse(used_bytes=100, max_bytes=0)
    assert not service.pressure.is_full
