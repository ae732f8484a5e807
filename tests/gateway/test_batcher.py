"""The batcher alone, with an outbox whose round trips end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.batcher import FLUSH_CALLS, FLUSH_SIZE, Batcher
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.tenants import ANONYMOUS
from sandbox.calls import ToolCall
from sandbox.errors import Unavailable
from sandbox.queue import Found, Put, QueuedCall

from .conftest import until


class Outbox:
    """Holds every round trip until it is told how that ends."""

    def __init__(self) -> None:
        self.taken: list[list[str]] = []
        self.cancelled: list[list[str]] = []
        self.open: asyncio.Future[None] | None = None

    async def put(self, gateway: str, calls: Sequence[QueuedCall]) -> list[Put]:
        if calls:
            await self._trip()
            self.taken.append([queued.record for queued in calls])
        return [Put("queued") for _ in calls]

    async def cancel(self, gateway: str, records: Sequence[str]) -> list[Found]:
        await self._trip()
        self.cancelled.append(list(records))
        return [Found("waiting") for _ in records]

    def end(self, *, well: bool) -> None:
        assert self.open is not None
        if well:
            self.open.set_result(None)
        else:
            self.open.set_exception(Unavailable("Redis is away"))

    async def _trip(self) -> None:
        assert self.open is None, "one round trip at a time"
        self.open = asyncio.get_running_loop().create_future()
        try:
            await self.open
        finally:
            self.open = None


class Bench:
    """A running batcher and what became of its calls."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.put: list[str] = []
        self.refused: list[str] = []
        self.found: dict[str, Found | Unavailable] = {}
        self.wanted: set[str] = set()
        self.made: dict[str, QueuedCall] = {}
        self.batcher = Batcher(
            self.outbox,  # type: ignore[arg-type]
            "gateway",
            Metrics(),
            self._was_put,
            self.found.__setitem__,
            self,  # type: ignore[arg-type]
            Line(Metrics()),
        )
        self._numbers = count()

    def is_wanted(self, record: str) -> bool:
        return record in self.wanted

    def wants(self, queued: QueuedCall) -> bool:
        return queued.record in self.wanted

    def leaves(self, queued: QueuedCall) -> None:
        assert queued.record in self.wanted

    def _was_put(self, queued: QueuedCall, outcome: Put | Unavailable) -> None:
        if isinstance(outcome, Unavailable):
            self.wanted.discard(queued.record)
            self.refused.append(queued.record)
        else:
            self.put.append(queued.record)

    def make(self, calls: int, code: str = "") -> list[QueuedCall]:
        names = [str(next(self._numbers)) for _ in range(calls)]
        self.wanted |= set(names)
        made = [QueuedCall(ToolCall(id=name, code=code), name, 0, 0) for name in names]
        self.made |= zip(names, made, strict=True)
        return made

    def add(self, calls: int, code: str = "") -> list[str]:
        made = self.make(calls, code)
        for queued in made:
            self.batcher.add(queued, ANONYMOUS)
        return [queued.record for queued in made]

    def leave(self, record: str) -> None:
        """What a gateway does when the last caller has gone."""
        self.wanted.discard(record)
        if record in self.made:
            self.batcher.over(self.made[record])
        self.batcher.cancel(record)

    async def end(self, *, well: bool) -> None:
        """End the round trip at hand, and let what follows from it happen."""
        self.outbox.end(well=well)
        await turn()


async def turn() -> None:
    """Let everything run that can run without us."""
    for _ in range(10):
        await asyncio.sleep(0)


def on_bench(scenario: Callable[[Bench], Awaitable[None]]) -> Bench:
    """Play a scenario; then end every round trip well, stop, and return what is left."""

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
        st.sampled_from(["well", "badly"]),  # the round trip at hand ends
        st.sampled_from(["first", "last"]),  # the caller of this call goes away
        st.just("turn"),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STEPS)
def test_no_call_is_lost_or_doubled(steps: list[int | str]) -> None:
    """Under any pattern of arrivals, failures and callers that go, every call that is wanted is put or refused once.

    What was put and is not wanted any more is cancelled, and so is what may have been put when Redis failed.
    """
    added: list[str] = []
    left: set[str] = set()

    async def scenario(bench: Bench) -> None:
        for step in steps:
            match step:
                case int():
                    added.extend(bench.add(step))
                case "first" | "last":
                    still = [record for record in added if record in bench.wanted]
                    if still:
                        left.add(still[0 if step == "first" else -1])
                        bench.leave(still[0 if step == "first" else -1])
                case "turn":
                    await turn()
                case _ if bench.outbox.open is not None:
                    await bench.end(well=step == "well")

    bench = on_bench(scenario)
    ended = sorted(bench.put + bench.refused, key=int)
    assert [record for record in ended if record not in left] == [
        record for record in added if record not in left
    ]
    assert len(set(ended)) == len(ended)
    assert bench.put == sorted(bench.put, key=int)
    assert left & set(bench.put) <= {record for records in bench.outbox.cancelled for record in records}
    assert all(len(trip) <= FLUSH_CALLS for trip in (*bench.outbox.taken, *bench.outbox.cancelled))


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
    """A round trip takes no more once it has its size, so it is over that by one call at most."""

    async def scenario(bench: Bench) -> None:
        bench.add(3, code="x" * (FLUSH_SIZE // 2))
        bench.add(2, code="x" * (FLUSH_SIZE + 1))
        bench.add(2)

    assert on_bench(scenario).outbox.taken == [["0", "1"], ["2", "3"], ["4"], ["5", "6"]]


def test_a_put_that_fails_refuses_all_that_wait_and_is_cancelled() -> None:
    """Nobody waits for a second failure; what may be in Redis is cancelled when that is back, and nothing else."""

    async def scenario(bench: Bench) -> None:
        bench.add(2)
        await turn()
        bench.add(FLUSH_CALLS * 2)
        await bench.end(well=False)
        assert len(bench.refused) == 2 + FLUSH_CALLS * 2
        await until(lambda: bench.outbox.open is not None)

    bench = on_bench(scenario)
    assert bench.put == []
    assert bench.outbox.cancelled == [["0", "1"]]


def test_a_cancellation_that_fails_refuses_all_that_wait() -> None:
    """While there is something to cancel and Redis is away, a new call learns that as soon as when there is nothing."""

    async def scenario(bench: Bench) -> None:
        bench.leave("gone")
        await turn()
        bench.add(1)
        await bench.end(well=False)
        assert bench.refused == ["0"]
        bench.add(1)
        await turn()
        await bench.end(well=False)
        assert bench.refused == ["0", "1"]
        assert isinstance(bench.found["gone"], Unavailable)
        await until(lambda: bench.outbox.open is not None)

    bench = on_bench(scenario)
    assert bench.outbox.cancelled == [["gone"]]
    assert bench.found["gone"] == Found("waiting")


def test_a_call_whose_caller_has_gone_is_not_put() -> None:
    """What nobody wants before its turn comes never leaves."""

    async def scenario(bench: Bench) -> None:
        bench.add(1)
        await turn()
        bench.leave(bench.add(1)[0])
        bench.add(1)

    assert on_bench(scenario).put == ["0", "2"]


def test_a_call_that_is_wanted_again_is_not_cancelled() -> None:
    """A caller that comes back before its cancellation has left finds its call as it was."""

    async def scenario(bench: Bench) -> None:
        bench.add(1)
        await turn()
        bench.leave("0")
        bench.wanted.add("0")

    assert on_bench(scenario).outbox.cancelled == []


def test_a_call_is_cancelled_after_it_was_put() -> None:
    """A caller that goes while its call is on the way takes nothing back that Redis has not seen."""

    async def scenario(bench: Bench) -> None:
        bench.add(1)
        await turn()
        bench.leave("0")
        await turn()
        assert bench.outbox.cancelled == []
        await bench.end(well=True)

    bench = on_bench(scenario)
    assert (bench.outbox.taken, bench.outbox.cancelled) == ([["0"]], [["0"]])


def test_what_is_put_again_is_never_refused() -> None:
    """Calls that wait since before a restart of Redis are tried until it takes them, unless their callers go."""

    async def scenario(bench: Bench) -> None:
        bench.batcher.add_again(bench.make(3))
        await turn()
        await bench.end(well=False)
        await until(lambda: bench.outbox.open is not None)
        bench.wanted.discard("1")
        await bench.end(well=False)
        assert bench.refused == []
        await until(lambda: bench.outbox.open is not None)

    assert on_bench(scenario).put == ["0", "2"]


def test_large_calls_are_put_again_in_small_company() -> None:
    """Else a Redis that has started anew would not read them in time, and be sent them again and again."""

    async def scenario(bench: Bench) -> None:
        bench.batcher.add_again(bench.make(5, code="x" * (FLUSH_SIZE // 2)))

    assert on_bench(scenario).outbox.taken == [["0", "1"], ["2", "3"], ["4"]]


async def test_what_nobody_foresaw_ends_the_loop() -> None:
    """Another exception than Unavailable is a bug and rises."""
    bench = Bench()

    async def broken(gateway: str, calls: Sequence[QueuedCall]) -> list[Put]:
        raise ZeroDivisionError

    bench.outbox.put = broken  # type: ignore[method-assign]
    bench.add(1)
    with pytest.raises(ZeroDivisionError):
        await bench.batcher.run()
