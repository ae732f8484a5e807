"""The worker on a real queue. Programs are played by a pool of the test's own, so that they end when it says.

Time is not waited for: a lease is ended by a stranger's connection, and the queue tells when it was used.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.errors import JailError, Unavailable
from sandbox.keys import GROUP, Keys
from sandbox.queue import CallQueue, QueuedCall
from sandbox.settings import WorkerSettings
from worker.metrics import WorkerMetrics
from worker.worker import MOST_DELIVERIES, RETRY_S, Worker, first_of

GATEWAY = "gateway"
TOOL = Keys("test").calls("tool")
HOUR_MS = 3_600_000
LEASE_S = 0.6  # nearly the shortest: a heartbeat every fifth of a second


class Watch:
    """Lets a test wait until something is so. Whoever changes anything calls `changed`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def changed(self) -> None:
        """Have everybody look again."""
        self._event.set()
        self._event = asyncio.Event()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Return when it is so; the test's time limit is the only one."""
        while not is_so():
            await self._event.wait()


class Pool(Watch):
    """Plays programs: `hold` runs until it is let go, `break` breaks its jail, `bug` fails; others print themselves."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.host = SimpleNamespace(slots=slots, level="namespaces")
        self.began: list[str] = []  # the code of each call that was started
        self.killed: list[str] = []
        self.most = 0
        self._holds = True
        self._running: dict[str, asyncio.Event] = {}

    @property
    def running(self) -> int:
        """Programs that run now."""
        return len(self._running)

    def let_go(self, count: int | None = None) -> None:
        """End the programs that hold, the oldest first."""
        for event in list(self._running.values())[:count]:
            event.set()

    def hold_nobody(self) -> None:
        """End them all, and those to come."""
        self._holds = False
        self.let_go()

    async def run(self, call: ToolCall) -> ToolResult:
        """As `JailPool.run`."""
        self.began.append(call.code)
        self._running[call.id] = end = asyncio.Event()
        self.most = max(self.most, self.running)
        self.changed()
        try:
            await self._play(call.code, end)
        except asyncio.CancelledError:
            self.killed.append(call.code)
            raise
        finally:
            del self._running[call.id]
            self.changed()
        return ToolResult(id=call.id, status=CallStatus.OK, exit_code=0, stdout=call.code)

    async def _play(self, code: str, end: asyncio.Event) -> None:
        if code == "break":
            raise JailError("the jail broke while the call ran")
        if code == "bug":
            raise ZeroDivisionError
        if code == "hold" and self._holds:
            await end.wait()


class SeenQueue(CallQueue, Watch):
    """The real queue, which counts what is tried and what succeeds."""

    def __init__(self, redis) -> None:
        CallQueue.__init__(self, redis.settings)
        Watch.__init__(self)
        self.tried: Counter[str] = Counter()
        self.did: Counter[str] = Counter()
        self.is_full = False
        self.before_reclaim: Callable[[], None] = lambda: None

    async def _count(self, name, use):
        self.tried[name] += 1
        self.changed()
        answer = await use
        self.did[name] += 1
        self.changed()
        return answer

    async def take(self, consumer, count, block_s=0.1):
        """With a short wait, for a drain waits for it."""
        return await super().take(consumer, count, block_s)

    async def open(self):
        """Counted."""
        await self._count("open", super().open())

    async def ping(self):
        """Counted."""
        await self._count("ping", super().ping())

    async def settle(self, done):
        """Counted; refused while it plays a full Redis."""
        if self.is_full:
            raise Unavailable("OOM command not allowed")
        await self._count("settle", super().settle(done))

    async def forget(self, deliveries):
        """Counted."""
        await self._count("forget", super().forget(deliveries))

    async def trim(self):
        """Counted."""
        await self._count("trim", super().trim())

    async def renew(self, consumer, deliveries):
        """Counted."""
        await self._count("renew", super().renew(consumer, deliveries))

    async def reclaim(self, consumer, idle_s, count):
        """Counted, with what it brought."""
        self.before_reclaim()
        brought = await super().reclaim(consumer, idle_s, count)
        self.did["reclaim"] += len(brought)
        self.changed()
        return brought


class Running:
    """A worker that serves, and its parts."""

    def __init__(self, redis, slots: int, grace_s: float, lease_s: float) -> None:
        self.pool = Pool(slots)
        self.queue = SeenQueue(redis)
        self.metrics = WorkerMetrics()
        settings = WorkerSettings(lease_s=lease_s, grace_s=grace_s)
        self.worker = Worker(settings, self.queue, self.pool, self.metrics)
        self.task = asyncio.create_task(self.worker.run())

    def count(self, name: str, **labels: str) -> float | None:
        """The value of one of its metrics."""
        return self.metrics.registry.get_sample_value(f"sandbox_worker_{name}", labels)

    async def end(self) -> None:
        """Stop it and wait until it has drained."""
        self.worker.stop()
        await self.task


@asynccontextmanager
async def serving(
    redis, slots: int = 2, grace_s: float = 30.0, lease_s: float = LEASE_S
) -> AsyncIterator[Running]:
    """A worker of its own; whatever holds at the end is let go, and then it drains."""
    running = Running(redis, slots, grace_s, lease_s)
    try:
        yield running
    finally:
        running.worker.stop()
        running.pool.hold_nobody()
        async with asyncio.timeout(10):
            await running.task
        await running.queue.close()


@pytest.fixture
async def queue(any_redis) -> AsyncIterator[CallQueue]:
    """The queue as a gateway has it."""
    queue = CallQueue(any_redis.settings)
    await queue.open()
    yield queue
    await queue.close()


async def put(queue: CallQueue, *codes: str, priority: str = "tool", due_in_ms: int = 60_000) -> list[str]:
    """Queue a call for each code; their ids."""
    now_ms = queue.now_ms()
    calls = [ToolCall(code=code, priority=priority) for code in codes]
    await queue.put([QueuedCall(call, GATEWAY, now_ms, now_ms + due_in_ms) for call in calls])
    return [call.id for call in calls]


async def answers(queue: CallQueue, count: int) -> list[ToolResult]:
    """The next results, in the order in which they were settled."""
    results: list[ToolResult] = []
    while len(results) < count:
        results += [ToolResult.model_validate_json(raw) for _, raw in await queue.replies(GATEWAY)]
    return results


def end_leases(redis, consumer: str, times_delivered: int = 1) -> None:
    """Make whatever is held look as if `consumer` held it and had been silent for an hour."""
    with redis.client() as stranger:
        for held in stranger.xpending_range(TOOL, GROUP, "-", "+", 10):
            stranger.xclaim(
                TOOL, GROUP, consumer, 0, [held["message_id"]],
                idle=HOUR_MS, retrycount=times_delivered, justid=True,
            )  # fmt: skip


def silence_ms(redis) -> int:
    """For how long the one call that is held was not renewed."""
    with redis.client() as stranger:
        [held] = stranger.xpending_range(TOOL, GROUP, "-", "+", 10)
    return held["time_since_delivered"]


# ---- taking ----


async def test_takes_no_more_calls_than_it_has_free_slots(any_redis, queue) -> None:
    """What nobody can run yet stays in the stream, and each slot that becomes free takes one call."""
    await put(queue, *["hold"] * 10)
    async with serving(any_redis, slots=3) as running:
        await running.pool.until(lambda: running.pool.running == 3)
        assert (await queue.backlog()).waiting == 7
        running.pool.let_go(1)
        await running.pool.until(lambda: len(running.pool.began) == 4)
        assert (await queue.backlog()).waiting == 6
        running.pool.hold_nobody()
        assert {result.status for result in await answers(queue, 10)} == {CallStatus.OK}
        assert running.pool.most == 3
        await running.end()
        assert running.count("calls_total", status="ok") == 10


async def test_a_model_goes_before_a_judge(any_redis, queue) -> None:
    """With one slot, tool calls run before judge calls that were queued earlier."""
    await put(queue, "hold")
    async with serving(any_redis, slots=1) as running:
        await running.pool.until(lambda: running.pool.running == 1)
        await put(queue, "j1", "j2", "j3", priority="judge")
        await put(queue, "t1", "t2", "t3")
        running.pool.let_go()
        await answers(queue, 7)
        assert running.pool.began == ["hold", "t1", "t2", "t3", "j1", "j2", "j3"]


# ---- faults ----


async def test_a_call_past_its_deadline_is_answered_unstarted(any_redis, queue) -> None:
    """Its program never runs; the answer is `queue_timeout` and says how long the call has waited."""
    await put(queue, "late", due_in_ms=-1)
    async with serving(any_redis) as running:
        [result] = await answers(queue, 1)
        assert (result.status, result.exit_code) == (CallStatus.QUEUE_TIMEOUT, None)
        assert result.reason is not None
        assert "past its deadline" in result.reason
        assert running.pool.began == []


async def test_a_third_worker_does_not_run_a_call(any_redis, queue) -> None:
    """A call whose two workers fell silent is answered `internal_error` and never started again."""
    await put(queue, "poison")
    await queue.take("dead-1", 1)
    end_leases(any_redis, "dead-2", times_delivered=2)
    async with serving(any_redis) as running:
        [result] = await answers(queue, 1)
        assert (result.status, running.pool.began) == (CallStatus.INTERNAL_ERROR, [])
        assert result.reason is not None
        assert "delivered too often" in result.reason


async def test_a_broken_jail_is_a_fault_with_its_reason(any_redis, queue) -> None:
    """When no jail could run a call, the answer is `internal_error` with the jail's words."""
    await put(queue, "break")
    async with serving(any_redis) as running:
        [result] = await answers(queue, 1)
        assert (result.status, result.reason) == (
            CallStatus.INTERNAL_ERROR,
            "the jail broke while the call ran",
        )
        assert running.count("jail_failures_total") == 1


async def test_a_failure_nobody_foresaw_is_a_fault_too(any_redis, queue) -> None:
    """A bug of ours costs the call that meets it, which is answered, and not the worker."""
    await put(queue, "bug", "next")
    async with serving(any_redis) as running:
        results = {result.status: result for result in await answers(queue, 2)}
        assert results[CallStatus.OK].stdout == "next"
        assert results[CallStatus.INTERNAL_ERROR].reason == "the worker failed: ZeroDivisionError"
        await running.end()
        assert (await queue.backlog()).running == 0


# ---- Redis away ----


async def test_results_wait_for_redis(any_redis, queue) -> None:
    """A program that ends while Redis is away is answered when Redis is back, and the worker goes on."""
    async with serving(any_redis) as running:
        await put(queue, "hold")
        await running.pool.until(lambda: running.pool.running == 1)
        any_redis.kill()
        tried = running.queue.tried["settle"]
        running.pool.let_go()
        await running.queue.until(lambda: running.queue.tried["settle"] > tried + 1)
        await any_redis.start()
        assert [result.stdout for result in await answers(queue, 1)] == ["hold"]
        await put(queue, "next")
        assert [result.stdout for result in await answers(queue, 1)] == ["next"]


async def test_results_that_redis_does_not_take_are_bounded(any_redis, queue) -> None:
    """While a full Redis refuses results but hands out calls, the worker stops taking; later all are answered."""
    await put(queue, "hold", "hold", *map(str, range(198)))
    with any_redis.client() as stranger:
        async with serving(any_redis) as running:
            await running.pool.until(lambda: running.pool.running == 2)
            stranger.config_set("maxmemory", 1)
            running.pool.hold_nobody()
            await running.queue.until(lambda: running.queue.tried["settle"] > 2)
            assert len(running.pool.began) < 50
            stranger.config_set("maxmemory", 0)
            assert len({result.id for result in await answers(queue, 200)}) == 200


async def test_a_worker_waits_for_a_redis_that_comes_late(any_redis) -> None:
    """Started before Redis, it serves as soon as there is one."""
    any_redis.kill()
    async with serving(any_redis) as running:
        await running.queue.until(lambda: running.queue.tried["open"] > 1)
        await any_redis.start()
        queue = CallQueue(any_redis.settings)
        await queue.open()
        await put(queue, "first")
        assert [result.stdout for result in await answers(queue, 1)] == ["first"]
        await queue.close()


# ---- leases ----


async def test_calls_of_a_silent_worker_are_taken_over(any_redis, queue) -> None:
    """What a dead worker held runs here once its lease has ended, and is counted."""
    await put(queue, "a", "b")
    await queue.take("dead", 2)
    end_leases(any_redis, "dead")
    async with serving(any_redis) as running:
        assert sorted(result.stdout for result in await answers(queue, 2)) == ["a", "b"]
        assert running.count("reclaimed_total") == 2


async def test_a_call_that_runs_long_stays_with_its_worker(any_redis, queue) -> None:
    """The heartbeat begins the lease of a running call anew."""
    await put(queue, "hold")
    async with serving(any_redis, slots=1) as running:  # no slot is free, so it reclaims nothing meanwhile
        await running.pool.until(lambda: running.pool.running == 1)
        end_leases(any_redis, running.worker.id)
        renewed = running.queue.did["renew"]
        await running.queue.until(lambda: running.queue.did["renew"] > renewed + 1)
        assert silence_ms(any_redis) < HOUR_MS


async def test_a_worker_does_not_take_over_its_own_calls(any_redis, queue) -> None:
    """After a silence it finds its own running calls idle, and does not start them a second time."""
    await put(queue, "hold")
    async with serving(any_redis) as running:
        await running.pool.until(lambda: running.pool.running == 1)
        running.queue.before_reclaim = lambda: end_leases(any_redis, running.worker.id)
        await running.queue.until(lambda: running.queue.did["reclaim"] > 0)
        await put(queue, "next")
        await answers(queue, 1)
        assert running.pool.began == ["hold", "next"]
        assert running.count("reclaimed_total") == 0


async def test_two_workers_are_never_one(any_redis) -> None:
    """Workers whose host and process number are equal, as in containers, still have different names."""
    async with serving(any_redis) as one, serving(any_redis) as other:
        assert one.worker.id != other.worker.id


# ---- the end ----


async def test_a_drain_finishes_what_runs_and_leaves_the_registry(any_redis, queue) -> None:
    """After `stop` running calls end and are answered, further calls stay queued, and the worker is off the list."""
    await put(queue, "hold", "hold")
    async with serving(any_redis) as running:
        await running.pool.until(lambda: running.pool.running == 2)
        await running.queue.until(lambda: running.queue.did["ping"] > 1)
        assert [info.draining for info in await queue.workers()] == [False]
        running.worker.stop()
        await put(queue, "later")
        pinged = running.queue.did["ping"]
        await running.queue.until(lambda: running.queue.did["ping"] > pinged + 1)
        assert [info.draining for info in await queue.workers()] == [True]
        running.pool.let_go()
        await running.task
        assert [result.stdout for result in await answers(queue, 2)] == ["hold", "hold"]
        assert await queue.workers() == []
        backlog = await queue.backlog()
        assert (backlog.waiting, backlog.running) == (1, 0)


async def test_a_drain_is_announced_at_once(any_redis, queue) -> None:
    """Gateways learn of it when it begins, and not at the next heartbeat, which may be many seconds away."""
    await put(queue, "hold")
    async with serving(any_redis, lease_s=3600) as running:
        await running.pool.until(lambda: running.pool.running == 1)
        assert [info.draining for info in await queue.workers()] == [False]
        running.worker.stop()
        await running.queue.until(lambda: running.queue.did["ping"] > 0)
        assert [info.draining for info in await queue.workers()] == [True]


async def test_what_outruns_the_grace_is_left_to_others(any_redis, queue) -> None:
    """Programs that still run after the grace are killed, and run again elsewhere, however many workers leave so."""
    await put(queue, "hold")
    for _ in range(MOST_DELIVERIES + 1):
        async with serving(any_redis, grace_s=0) as running:
            await running.pool.until(lambda: running.pool.running == 1)
            await running.end()
            assert running.pool.killed == ["hold"]
            assert (await queue.backlog()).running == 1
    async with serving(any_redis) as last:
        await last.pool.until(lambda: last.pool.running == 1)
        last.pool.let_go()
        [result] = await answers(queue, 1)
        assert (result.status, result.worker) == (CallStatus.OK, last.worker.id)
    with any_redis.client() as stranger:
        assert stranger.xinfo_consumers(TOOL, GROUP)[0]["pending"] == 0


async def test_a_drain_without_redis_ends_and_does_not_spin(any_redis, queue) -> None:
    """Without Redis the last results are tried for a lease, with pauses, and then left to its end."""
    await put(queue, "hold")
    async with serving(any_redis) as running:
        await running.pool.until(lambda: running.pool.running == 1)
        any_redis.kill()
        running.worker.stop()
        running.pool.let_go()
        await running.task
        assert running.queue.tried["settle"] <= 2 + 2 * LEASE_S / RETRY_S


async def test_a_worker_that_waits_for_redis_can_be_stopped(any_redis) -> None:
    """It need not have served to end in good order."""
    any_redis.kill()
    async with serving(any_redis) as running:
        await running.queue.until(lambda: running.queue.tried["open"] > 0)
        await running.end()


async def test_all_calls_of_a_dead_worker_come_back_at_once(any_redis, queue: CallQueue) -> None:
    """A worker with one slot takes them over one after the other, without a pause between them."""
    ids = await put(queue, *[str(number) for number in range(6)])
    await queue.take("dead", 6)
    end_leases(any_redis, "dead")
    async with serving(any_redis, slots=1) as running:
        results = await answers(queue, 6)
        assert sorted(result.id for result in results) == sorted(ids)
        assert running.queue.did["reclaim"] == 6
        assert running.queue.tried["trim"] <= 8


async def test_results_that_nobody_waits_for_are_given_up(any_redis, queue: CallQueue) -> None:
    """A Redis that is full refuses them; once their gateway has answered for itself, their leases end."""
    await put(queue, "1", due_in_ms=-HOUR_MS)
    async with serving(any_redis) as running:
        running.queue.is_full = True
        await running.queue.until(lambda: running.queue.did["forget"] == 1)
        assert (await queue.backlog()).running == 0
        running.queue.is_full = False


def test_a_transaction_holds_a_bounded_amount_of_output() -> None:
    """As many results as hold so much together, and one that is larger alone."""
    results = [ToolResult(id=str(size), status=CallStatus.OK, stdout="x" * size) for size in (5, 4, 3, 20, 1)]
    done = [(None, result) for result in results]
    assert [len(first_of(done[start:], 10)) for start in range(5)] == [2, 2, 1, 1, 1]
