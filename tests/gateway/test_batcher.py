"""The batcher alone, with an outbox whose puts end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batcher import FLUSH_CALLS, FLUSH_SIZE, PATIENCE_MS, Batcher
from gateway.metrics import Metrics
from sandbox.calls import ToolCall
from sandbox.errors import Unavailable
from sandbox.queue import QueuedCall


class Outbox:
    """Holds every put until it is told how it ends."""

    def __init__(self) -> None:
        self.clock_ms = 0
        self.taken: list[list[str]] = []
        self.open: asyncio.Future[None] | None = None

    def now_ms(self) -> int:
        return self.clock_ms

    async def put(self, calls: Sequence[QueuedCall]) -> None:
        assert self.open is None, "one pipeline at a time"
        self.open = asyncio.get_running_loop().create_future()
        try:
            await self.open
        finally:
            self.open = None
        self.taken.append([queued.call.id for queued in calls])

    def end(self, *, well: bool) -> None:
        assert self.open is not None
        if well:
            self.open.set_result(None)
        else:
            self.open.set_exception(Unavailable("Redis is away"))


class Bench:
    """A running batcher and what became of its calls."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.refused: list[str] = []
        self.batcher = Batcher(self.outbox, self._refuse, Metrics())
        self._numbers = count()

    def _refuse(self, call_id: str, why: Unavailable) -> None:
        assert why.retry_after_s
        self.refused.append(call_id)

    def add(self, calls: int, code: str = "") -> list[str]:
        ids = [str(next(self._numbers)) for _ in range(calls)]
        for name in ids:
            self.batcher.add(QueuedCall(ToolCall(id=name, code=code), "gateway", self.outbox.clock_ms, 0))
        return ids

    @property
    def taken(self) -> list[str]:
        return [name for flush in self.outbox.taken for name in flush]


async def turn() -> None:
    """Let everything run that can run without us."""
    for _ in range(10):
        await asyncio.sleep(0)


def on_bench(scenario: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Play a scenario; then end every put well, stop, and return what is left."""

    async def play() -> Bench:
        bench = Bench()
        run = asyncio.create_task(bench.batcher.run())
        await scenario(bench)
        bench.batcher.stop()
        while not run.done():
            await turn()
            if bench.outbox.open is not None:
                bench.outbox.end(well=True)
        await run
        return bench

    return asyncio.run(play())


STEPS = st.lists(
    st.one_of(
        st.integers(min_value=1, max_value=3 * FLUSH_CALLS),  # so many calls arrive
        st.sampled_from(["well", "badly"]),  # the put at hand ends
        st.just("later"),  # time passes, more than calls are patient
        st.just("turn"),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS)
def test_no_call_is_lost_or_doubled(steps: list[int | str]) -> None:
    """Under any pattern of arrivals and failures every call is either put once or refused once, in order."""
    added: list[str] = []

    async def scenario(bench: Bench) -> None:
        for step in steps:
            match step:
                case int():
                    added.extend(bench.add(step))
                case "later":
                    bench.outbox.clock_ms += PATIENCE_MS + 1
                case "turn":
                    await turn()
                case _ if bench.outbox.open is not None:
                    bench.outbox.end(well=step == "well")
                    await turn()

    bench = on_bench(scenario)
    assert sorted(bench.taken + bench.refused, key=int) == added
    assert bench.taken == sorted(bench.taken, key=int)
    assert all(len(flush) <= FLUSH_CALLS for flush in bench.outbox.taken)


def test_a_call_that_comes_alone_leaves_at_once() -> None:
    """Nothing waits for company when no put is open."""

    async def scenario(bench: Bench) -> None:
        bench.add(1)
        await turn()
        assert bench.outbox.open is not None

    assert on_bench(scenario).outbox.taken == [["0"]]


def test_calls_gather_while_a_put_is_open() -> None:
    """What comes during a round trip leaves with the next one, together."""

    async def scenario(bench: Bench) -> None:
        for _ in range(5):
            bench.add(1)
            await turn()

    assert on_bench(scenario).outbox.taken == [["0"], ["1", "2", "3", "4"]]


def test_large_calls_leave_in_small_company() -> None:
    """A pipeline holds no more than its size, but a call that is larger goes alone."""

    async def scenario(bench: Bench) -> None:
        bench.add(3, code="x" * (FLUSH_SIZE // 2))
        bench.add(2, code="x" * (FLUSH_SIZE + 1))
        bench.add(2)

    assert on_bench(scenario).outbox.taken == [["0", "1"], ["2"], ["3"], ["4"], ["5", "6"]]


def test_a_put_that_fails_refuses_its_own_calls_only() -> None:
    """Calls behind a failing put are tried themselves."""

    async def scenario(bench: Bench) -> None:
        bench.add(2)
        await turn()
        bench.add(3)
        bench.outbox.end(well=False)
        await turn()

    bench = on_bench(scenario)
    assert bench.refused == ["0", "1"]
    assert bench.taken == ["2", "3", "4"]


def test_calls_behind_slow_failures_do_not_wait_for_each() -> None:
    """When a put fails after long, calls that have waited as long are refused with it; newer ones are tried."""

    async def scenario(bench: Bench) -> None:
        bench.add(1)
        await turn()
        bench.add(FLUSH_CALLS * 3)
        bench.outbox.clock_ms += PATIENCE_MS + 1
        bench.add(1)
        bench.outbox.end(well=False)
        await turn()

    bench = on_bench(scenario)
    assert len(bench.refused) == 1 + FLUSH_CALLS * 3
    assert bench.taken == [str(1 + FLUSH_CALLS * 3)]


async def test_what_nobody_foresaw_ends_the_loop() -> None:
    """Another exception than Unavailable is a bug and rises."""
    bench = Bench()

    async def broken(calls: Sequence[QueuedCall]) -> None:
        raise ZeroDivisionError

    bench.outbox.put = broken  # type: ignore[method-assign]
    bench.add(1)
    with pytest.raises(ZeroDivisionError):
        await bench.batcher.run()
