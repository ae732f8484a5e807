"""The open loop: what is sent when, and what counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from loadtest.clock import KernelClock
from loadtest.openloop import NO_ANSWER, WRONG_OUTPUT, Planned, Reply, run_open_loop
from loadtest.workloads import KINDS, Kind, own_kind
from sandbox import ToolCall

PRINT = KINDS["print"]


class FakeClock:
    """Time that passes only where somebody sleeps, and for everybody."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.time_s = 100.0
        self.oversleep_s = oversleep_s  # what a loop that something blocks does

    def now(self) -> float:
        return self.time_s

    async def sleep_until(self, when_s: float) -> None:
        if when_s > self.time_s:
            for _ in range(5):  # what is due before that goes first
                await asyncio.sleep(0)
            self.time_s = when_s + self.oversleep_s


@dataclass
class Service:
    """Answers by a rule, and remembers when it was asked."""

    clock: FakeClock
    reply: Reply = field(default_factory=lambda: Reply("ok", "1\n"))
    asked_at: list[float] = field(default_factory=list)

    async def ask(self, call: ToolCall) -> Reply:
        self.asked_at.append(self.clock.now())
        return self.reply


class Stalled(Service):
    """Answers nobody before it has been asked three times."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(clock)
        self.goes_on = asyncio.Event()

    async def ask(self, call: ToolCall) -> Reply:
        await super().ask(call)
        if len(self.asked_at) == 3:
            self.goes_on.set()
        await self.goes_on.wait()
        return self.reply


async def test_a_stall_is_sent_what_was_planned_and_counts_for_all_of_it() -> None:
    """A service that answers nobody gets each call at its time, and each latency counts from that time."""
    clock = FakeClock()
    service = Stalled(clock)

    sent = await run_open_loop(service, [Planned(at_s, PRINT) for at_s in (0.0, 1.0, 2.0)], clock=clock)

    assert service.asked_at == [100.0, 101.0, 102.0]
    assert [call.latency_s for call in sent] == [2.0, 1.0, 0.0]
    assert [call.late_s for call in sent] == [0.0, 0.0, 0.0]


async def test_a_generator_that_is_late_says_so_and_its_calls_waited_as_long() -> None:
    """What a blocked generator sends late has its lateness beside it, and inside of its latency."""
    clock = FakeClock(oversleep_s=0.5)

    sent = await run_open_loop(Service(clock), [Planned(1.0, PRINT)], clock=clock)

    assert [(call.late_s, call.latency_s) for call in sent] == [(0.5, 0.5)]


async def test_calls_of_one_moment_count_what_goes_before_them() -> None:
    """In a burst, the later calls are late by the time that sending the first ones takes."""
    clock = FakeClock()

    class Slow(Service):
        async def ask(self, call: ToolCall) -> Reply:
            self.clock.time_s += 0.25  # of the generator's own CPU
            return self.reply

    sent = await run_open_loop(Slow(clock), [Planned(0.0, PRINT)] * 3, clock=clock)

    assert [call.late_s for call in sent] == [0.0, 0.25, 0.5]


async def test_what_was_sent_is_in_the_order_of_the_plan() -> None:
    """Whatever order the plan is given in, calls go and come back by their times."""
    clock = FakeClock()
    service = Service(clock)

    sent = await run_open_loop(service, [Planned(at_s, PRINT) for at_s in (2.0, 0.5, 1.0)], clock=clock)

    assert [call.at_s for call in sent] == [0.5, 1.0, 2.0]
    assert service.asked_at == [100.5, 101.0, 102.0]


async def test_a_call_that_is_never_answered_ends() -> None:
    """After the generator's patience a silent service's calls have the outcome `no_answer`."""

    class Silent:
        async def ask(self, call: ToolCall) -> Reply:
            return await asyncio.get_running_loop().create_future()

    sent = await run_open_loop(Silent(), [Planned(0.0, PRINT)] * 2, patience_s=0.01)

    assert [(call.outcome, call.is_right) for call in sent] == [(NO_ANSWER, False)] * 2


@pytest.mark.parametrize(
    ("kind", "reply", "outcome", "is_right"),
    [
        (PRINT, Reply("ok", "1\n"), "ok", True),
        (PRINT, Reply("ok", "2\n"), WRONG_OUTPUT, False),
        (PRINT, Reply("ok", None), WRONG_OUTPUT, False),
        (PRINT, Reply("error", "1\n"), "error", False),
        (PRINT, Reply("refused"), "refused", False),
        (KINDS["runaway"], Reply("timeout", ""), "timeout", True),
        (KINDS["runaway"], Reply("ok", ""), "ok", False),
        (own_kind("own", ToolCall(code="?")), Reply("memory_limit", "any"), "memory_limit", True),
        (own_kind("own", ToolCall(code="?")), Reply("internal_error"), "internal_error", False),
    ],
)
async def test_a_reply_is_held_against_what_had_to_come(
    kind: Kind, reply: Reply, outcome: str, is_right: bool
) -> None:
    """A known program has one right answer; of an unknown one any verdict is right, and a fault is not."""
    clock = FakeClock()

    [sent] = await run_open_loop(Service(clock, reply), [Planned(0.0, kind)], clock=clock)

    assert (sent.outcome, sent.is_right) == (outcome, is_right)


async def test_every_call_has_an_id_of_its_own() -> None:
    """A service that knows calls by their ids runs each of them."""
    ids: list[str] = []

    class Counting:
        async def ask(self, call: ToolCall) -> Reply:
            ids.append(call.id)
            return Reply("ok", "1\n")

    twice = own_kind("own", ToolCall(id="same", code="print(1)", stdin="x"))
    await run_open_loop(Counting(), [Planned(0.0, twice), Planned(0.0, twice)])

    assert len(set(ids)) == 2


async def test_the_kernels_clock_wakes_nobody_early() -> None:
    """A sleeper wakes at its time or later, and at once where that has passed, also after a sleep that was cut."""
    with KernelClock() as clock:
        cut = asyncio.create_task(clock.sleep_until(clock.now() + 3600))
        await asyncio.sleep(0)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        when_s = clock.now() + 0.01
        await clock.sleep_until(when_s)
        assert clock.now() >= when_s
        await clock.sleep_until(when_s)
