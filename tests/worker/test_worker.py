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

from sandbox.calls import CallStatus, Limits, ToolCall, ToolResult, Usage
from sandbox.errors import JailError, Unavailable
from sandbox.keys import GROUP, Keys
from sandbox.queue import CallQueue, Delivery, Outcome, QueuedCall
from sandbox.settings import WorkerSettings
from worker import worker as worker_module
from worker.metrics import WorkerMetrics
from worker.worker import MOST_DELIVERIES, RETRY_S, Worker, cut_short, first_of

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
    """Plays programs: `hold` runs until it is let go, `endless` until its limit, `break` breaks its jail, `bug` fails.

    For `heavy` there is no jail until `is_warm` is set.

    Others print themselves.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.host = SimpleNamespace(slots=slots, level="namespaces", python_version="3.13.1")
        self.began: list[str] = []  # the code of each call that was started
        self.given_s: list[float] = []  # and its limit
        self.killed: list[str] = []
        self.most = 0
        self.awaited: list[str] = []
        self.is_warm = asyncio.Event()
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

    async def jail_for(self, call: ToolCall) -> None:
        """As `JailPool.jail_for`."""
        if call.code == "heavy":
            self.awaited.append(call.code)
            self.changed()
            await self.is_warm.wait()

    async def run(self, call: ToolCall, jail: None) -> ToolResult:
        """As `JailPool.run`."""
        self.began.append(call.code)
        self.given_s.append(call.limits.wall_s)
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
        if call.code == "endless":
            usage = Usage(wall_s=call.limits.wall_s, cpu_s=0.5)
            return ToolResult(id=call.id, status=CallStatus.TIMEOUT, signal=9, usage=usage)
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
        self.refuses_results = False
        self.before_reclaim: Callable[[], None] = lambda: None
        self.may_bring = asyncio.Event()  # while it is clear, what was taken stays on its way
        self.may_bring.set()
        self.may_settle = asyncio.Event()  # while it is clear, results stay on their way
        self.may_settle.set()
        self.loses_answers = False  # as if the connection broke before what was taken came

    async def _count(self, name, use):
        self.tried[name] += 1
        self.changed()
        answer = await use
        self.did[name] += 1
        self.changed()
        return answer

    async def take(self, consumer, count, block_s=0.1):
        """With a short wait, for a drain waits for it. What it took is counted before it is brought."""
        self.tried["take"] += 1
        taken = await super().take(consumer, count, min(block_s, 0.1))
        self.did["take"] += len(taken)
        self.changed()
        await self.may_bring.wait()
        if taken and self.loses_answers:
            raise Unavailable("the connection broke")
        return taken

    async def resume(self, consumer, held, count):
        """Counted."""
        return await self._count("resume", super().resume(consumer, held, count))

    async def orders(self, consumer, block_s=1.0):
        """Counted, with what it brought."""
        self.tried["orders"] += 1
        self.changed()
        brought = await super().orders(consumer, block_s)
        self.did["orders"] += len(brought)
        self.changed()
        return brought

    async def open(self):
        """Counted."""
        await self._count("open", super().open())

    async def ping(self):
        """Counted."""
        await self._count("ping", super().ping())

    async def settle(self, done):
        """Counted, and refused while a test wants that."""
        if self.refuses_results:
            self.tried["settle"] += 1
            self.changed()
            raise Unavailable("refused")
        return await self._count("settle", self._settle(done))

    async def _settle(self, done):
        await self.may_settle.wait()
        return await super().settle(done)

    async def trim(self):
        """Counted."""
        await self._count("trim", super().trim())

    async def renew(self, consumer, deliveries):
        """Counted."""
        return await self._count("renew", super().renew(consumer, deliveries))

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


async def put(
    queue: CallQueue,
    *codes: str,
    priority: str = "tool",
    waited_ms: int = 0,
    due_in_ms: int = 60_000,
    wall_s: float = 10.0,
) -> list[str]:
    """Queue a call for each code; their records."""
    now_ms = queue.now_ms()
    queued = []
    for code in codes:
        call = ToolCall(code=code, priority=priority, limits=Limits(wall_s=wall_s))
        record = queue.record("", call.id)
        queued.append(QueuedCall(call, record, now_ms - waited_ms, now_ms + due_in_ms))
    await queue.put(GATEWAY, queued)
    return [each.record for each in queued]


def ok(delivery: Delivery) -> Outcome:
    """What another worker makes of a call."""
    result = ToolResult(id=delivery.call.id, status=CallStatus.OK, exit_code=0, worker="other")
    return Outcome(delivery, result)


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


async def test_one_read_brings_a_call_for_each_free_slot(any_redis, queue) -> None:
    """As many as are free at that moment: all at first, then one at once when one is, and all that are free together."""
    await put(queue, *["hold"] * 9)
    async with serving(any_redis, slots=4) as running:
        await running.pool.until(lambda: running.pool.running == 4)
        assert running.queue.tried["take"] == 1
        running.queue.may_bring.clear()
        running.pool.let_go(1)
        await running.queue.until(lambda: running.queue.tried["take"] == 2)
        running.pool.let_go()  # while that read is on its way
        await running.pool.until(lambda: running.pool.running == 0)
        running.queue.may_bring.set()
        await running.pool.until(lambda: len(running.pool.began) == 8)
        assert (running.queue.tried["take"], running.queue.did["take"]) == (3, 8)


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


@pytest.mark.parametrize("had", ["nobody", "a dead worker"])
async def test_a_call_past_its_deadline_is_answered_unstarted(any_redis, queue, had: str) -> None:
    """Its program does not run, or not again; the answer is `queue_timeout` and says how long the call has waited."""
    await put(queue, "late", waited_ms=1_000_000, due_in_ms=-1)
    if had == "a dead worker":
        await queue.take("dead", 1)
        end_leases(any_redis, "dead")
    async with serving(any_redis) as running:
        [result] = await answers(queue, 1)
        assert (result.status, result.exit_code) == (CallStatus.QUEUE_TIMEOUT, None)
        assert result.reason is not None
        assert result.reason.startswith("waited 100")
        assert "past its deadline" in result.reason
        assert running.pool.began == []


async def test_a_program_gets_what_is_left_of_its_deadline(any_redis, queue) -> None:
    """Its limit ends with the deadline, and is its own where there is time enough."""
    await put(queue, "short", due_in_ms=9000)
    await put(queue, "long")
    async with serving(any_redis, slots=1) as running:
        await answers(queue, 2)
        short_s, long_s = running.pool.given_s
        assert 0 < short_s <= 9
        assert long_s == 10


async def test_a_deadline_that_cuts_a_program_is_no_verdict_if_it_had_waited(any_redis, queue) -> None:
    """The time that it waited was missing, which the fault says, with what the program used."""
    await put(queue, "endless", waited_ms=20_000, due_in_ms=9000)
    async with serving(any_redis):
        [result] = await answers(queue, 1)
        assert (result.status, result.signal, result.usage.cpu_s) == (CallStatus.QUEUE_TIMEOUT, None, 0.5)
        assert result.reason is not None
        assert "of the 10 s that it may run; it had waited 2" in result.reason


async def test_a_deadline_that_cuts_a_program_is_a_verdict_if_it_had_most_of_it(any_redis, queue) -> None:
    """A program that was given less time than it may run at most, and no wait took that away, is too slow."""
    await put(queue, "endless", due_in_ms=30_000, wall_s=60)
    async with serving(any_redis):
        [result] = await answers(queue, 1)
        assert (result.status, result.reason) == (CallStatus.TIMEOUT, None)


async def test_a_jail_that_is_not_done_at_the_deadline_is_a_fault(any_redis, queue, monkeypatch) -> None:
    """The program's own limit ends with the deadline; if nothing comes of that either, it is our failure."""
    monkeypatch.setattr(worker_module, "LATE_S", 0.1)
    await put(queue, "hold", due_in_ms=1000)
    async with serving(any_redis) as running:
        [result] = await answers(queue, 1)
        assert (result.status, running.pool.killed) == (CallStatus.INTERNAL_ERROR, ["hold"])
        assert result.reason == "no jail was done with it at its deadline"
        assert running.count("jail_failures_total") == 1


async def test_waiting_for_a_jail_is_waiting(any_redis, queue) -> None:
    """A call whose jail still warms up has then what is left of its deadline, and the wait is in its `queue_s`."""
    await put(queue, "heavy", due_in_ms=9000)
    async with serving(any_redis) as running:
        await running.pool.until(lambda: running.pool.awaited == ["heavy"])
        warm_at = queue.now_ms() + 200
        while queue.now_ms() < warm_at:  # noqa: ASYNC110 - time is what must pass
            await asyncio.sleep(0)
        running.pool.is_warm.set()
        [result] = await answers(queue, 1)
        assert result.status is CallStatus.OK
        assert result.usage.queue_s >= 0.2
        assert running.pool.given_s[0] <= 8.8


async def test_a_jail_that_is_warm_too_late(any_redis, queue) -> None:
    """A call whose deadline came while it waited for its jail is not started: it may be sent again."""
    await put(queue, "heavy", due_in_ms=1000)
    async with serving(any_redis) as running:
        await running.pool.until(lambda: running.pool.awaited == ["heavy"])
        due_at = queue.now_ms() + 1000
        while queue.now_ms() <= due_at:  # noqa: ASYNC110 - time is what must pass
            await asyncio.sleep(0)
        running.pool.is_warm.set()
        [result] = await answers(queue, 1)
        assert (result.status, running.pool.began) == (CallStatus.QUEUE_TIMEOUT, [])
        assert result.reason is not None
        assert "past its deadline" in result.reason


@pytest.mark.parametrize(
    ("status", "wall_s", "deadline_s", "given_s", "used_s", "cpu_s", "is_fault"),
    [
        pytest.param("timeout", 10, 60, 10, 10, 1, False, id="all that it may have"),
        pytest.param("timeout", 10, 60, 10, 9.9, 1, False, id="the fork took a while"),
        pytest.param("timeout", 10, 60, 9, 9, 1, True, id="nine of ten seconds, but of a minute"),
        pytest.param("timeout", 10, 10, 9, 9, 1, False, id="nine tenths of the deadline"),
        pytest.param("timeout", 10, 10, 8.9, 8.9, 1, True, id="a little less"),
        pytest.param("timeout", 10, 10, 8.9, 9.5, 1, True, id="what the kill took does not count"),
        pytest.param("timeout", 10, 10, 9.5, 8.5, 1, True, id="nor what the start took"),
        pytest.param("timeout", 60, 2, 1.9, 1.9, 1, False, id="a short deadline of its own choice"),
        pytest.param("timeout", 10, 10, 1, 0.8, 5, False, id="its CPU time was up"),
        pytest.param("ok", 10, 10, 1, 1, 1, False, id="in time"),
        pytest.param("memory_limit", 10, 10, 1, 1, 1, False, id="another limit"),
    ],
)
def test_who_is_to_blame_for_a_timeout(
    status: str, wall_s: float, deadline_s: float, given_s: float, used_s: float, cpu_s: float, is_fault: bool
) -> None:
    """The program, if it had the time that it may have, or most of its deadline; else the wait."""
    call = ToolCall(code="", limits=Limits(wall_s=wall_s, cpu_s=5))
    delivery = Delivery("1-0", TOOL, "record", call, 1000, 1000 + int(deadline_s * 1000), 1)
    result = ToolResult(id=call.id, status=CallStatus(status), usage=Usage(wall_s=used_s, cpu_s=cpu_s))
    reason = cut_short(delivery, given_s, result)
    assert bool(reason) == is_fault
    if is_fault:
        had_s = min(given_s, used_s)
        assert reason == (
            f"its deadline came after {had_s:.1f} s of the {wall_s} s that it may run; "
            f"it had waited {deadline_s - given_s:.1f} s"
        )


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
        [(_, letter)] = await queue.dead_letters(10)
        assert (letter.call.code, letter.reason, letter.times_delivered) == ("poison", result.reason, 3)


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


async def test_what_ends_while_results_are_on_their_way_goes_together(any_redis, queue) -> None:
    """The first result is sent at once, though others run; those that end meanwhile share the next round trip."""
    await put(queue, *["hold"] * 5)
    async with serving(any_redis, slots=5) as running:
        await running.pool.until(lambda: running.pool.running == 5)
        running.queue.may_settle.clear()
        running.pool.let_go(1)
        await running.queue.until(lambda: running.queue.tried["settle"] == 1)
        assert running.pool.running == 4
        running.pool.let_go()
        await running.pool.until(lambda: running.pool.running == 0)
        running.queue.may_settle.set()
        await answers(queue, 5)
        assert running.queue.tried["settle"] == 2


async def test_results_wait_for_redis(any_redis, queue) -> None:
    """A program that ends while Redis does not answer is answered when it does, and the worker goes on."""
    async with serving(any_redis) as running:
        await put(queue, "hold")
        await running.pool.until(lambda: running.pool.running == 1)
        any_redis.freeze()
        running.pool.let_go()
        await running.queue.until(lambda: running.queue.tried["settle"] > 1)
        any_redis.thaw()
        assert [result.stdout for result in await answers(queue, 1)] == ["hold"]
        await put(queue, "next")
        assert [result.stdout for result in await answers(queue, 1)] == ["next"]


async def test_a_redis_that_comes_back_empty(any_redis, queue) -> None:
    """It knows nothing of what runs here, which is killed; what is put then runs."""
    async with serving(any_redis) as running:
        await put(queue, "hold")
        await running.pool.until(lambda: running.pool.running == 1)
        any_redis.kill()
        await running.queue.until(lambda: running.queue.tried["renew"] > running.queue.did["renew"])
        await any_redis.start()
        await running.pool.until(lambda: running.pool.killed == ["hold"])
        await put(queue, "next")
        assert [result.stdout for result in await answers(queue, 1)] == ["next"]


async def test_a_full_redis_takes_results(any_redis, queue) -> None:
    """No memory is left for new calls, but what is there already is run and answered."""
    await put(queue, "hold", *map(str, range(20)))
    with any_redis.client() as stranger:
        async with serving(any_redis) as running:
            await running.pool.until(lambda: running.pool.running == 1)
            stranger.config_set("maxmemory", 1)
            with pytest.raises(Unavailable):
                await put(queue, "one more")
            running.pool.hold_nobody()
            assert len({result.id for result in await answers(queue, 21)}) == 21


async def test_a_frozen_redis_gives_calls_to_nobody_in_the_end(any_redis, queue) -> None:
    """It still does what it was asked by a connection that was given up; what it handed out there runs at once."""
    async with serving(any_redis, slots=1, lease_s=3600) as running:
        await put(queue, "hold", "next")
        await running.pool.until(lambda: running.pool.running == 1)
        any_redis.freeze()
        tried = running.queue.tried["take"]
        running.pool.let_go()
        await running.queue.until(lambda: running.queue.tried["resume"] > 0)
        assert running.queue.tried["take"] == tried + 1
        any_redis.thaw()
        assert [result.stdout for result in await answers(queue, 2)] == ["hold", "next"]


async def test_what_was_taken_by_an_answer_that_never_came_runs_at_once(any_redis, queue) -> None:
    """It need not lie until a lease ends, however often that happens, and does not count as a worker that died."""
    async with serving(any_redis, lease_s=3600) as running:
        running.queue.loses_answers = True
        for number in range(MOST_DELIVERIES + 1):
            await put(queue, f"{number}", priority="judge" if number % 2 else "tool")
            assert [result.stdout for result in await answers(queue, 1)] == [f"{number}"]
        await put(queue, "hold")
        await running.pool.until(lambda: running.pool.running == 1)
        with any_redis.client() as stranger:
            [held] = stranger.xpending_range(TOOL, GROUP, "-", "+", 10)
        assert held["times_delivered"] == 1
        await put(queue, "beside")
        assert [result.stdout for result in await answers(queue, 1)] == ["beside"]
        assert running.pool.began == ["0", "1", "2", "hold", "beside"]


async def test_results_that_redis_does_not_take_are_bounded(any_redis, queue) -> None:
    """While results are refused and calls are handed out, the worker stops taking; later all are answered."""
    await put(queue, *map(str, range(200)))
    async with serving(any_redis) as running:
        running.queue.refuses_results = True
        await running.queue.until(lambda: running.queue.tried["settle"] > 2)
        assert len(running.pool.began) < 50
        running.queue.refuses_results = False
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


async def test_what_another_worker_has_taken_over_is_killed(any_redis, queue) -> None:
    """A worker that was silent for too long hears of it: it ends the program, takes nothing back and settles nothing."""
    await put(queue, "hold")
    async with serving(any_redis, slots=1, lease_s=3) as running:
        await running.pool.until(lambda: running.pool.running == 1)
        [theirs] = await queue.reclaim("other", 0, 1)
        await running.pool.until(lambda: running.pool.killed == ["hold"])
        assert await queue.settle([ok(theirs)]) == [True]
        assert [result.worker for result in await answers(queue, 1)] == ["other"]
        await running.end()
        assert running.count("lost_calls_total") == 1
        assert running.count("calls_total", status="ok") == 0
        assert running.queue.did["settle"] == 0


async def test_a_result_that_comes_second_is_dropped(any_redis, queue) -> None:
    """It is not counted as a call that was settled, and nobody hears of it."""
    await put(queue, "hold")
    async with serving(any_redis, slots=1, lease_s=3600) as running:  # so it does not notice
        await running.pool.until(lambda: running.pool.running == 1)
        [theirs] = await queue.reclaim("other", 0, 1)
        assert await queue.settle([ok(theirs)]) == [True]
        running.pool.let_go()
        await running.end()
        assert running.count("second_replies_total") == 1
        assert running.count("calls_total", status="ok") == 0
        assert [result.worker for result in await answers(queue, 1)] == ["other"]
        assert await queue.replies(GATEWAY, block_s=0) == []


async def test_two_workers_are_never_one(any_redis) -> None:
    """Workers whose host and process number are equal, as in containers, still have different names."""
    async with serving(any_redis) as one, serving(any_redis) as other:
        assert one.worker.id != other.worker.id


# ---- orders ----


async def test_a_call_that_nobody_waits_for_is_killed(any_redis, queue) -> None:
    """Its program ends, its slot serves the next call, and its lease is given up."""
    async with serving(any_redis, slots=1, lease_s=3600) as running:  # no heartbeat tells it
        [record] = await put(queue, "hold")
        await running.pool.until(lambda: running.pool.running == 1)
        [found] = await queue.cancel(GATEWAY, [record])
        assert (found.state, found.detail.decode()) == ("running", running.worker.id)
        await running.pool.until(lambda: running.pool.killed == ["hold"])
        await put(queue, "next")
        assert [result.stdout for result in await answers(queue, 1)] == ["next"]
        await running.end()
        assert running.count("cancelled_calls_total") == 1
        assert (await queue.backlog()).running == 0


async def test_an_order_may_come_before_its_call(any_redis, queue) -> None:
    """It comes by another connection, and the call never starts."""
    async with serving(any_redis, slots=1, lease_s=3600) as running:
        running.queue.may_bring.clear()
        [record] = await put(queue, "never")
        await running.queue.until(lambda: running.queue.did["take"] == 1)
        await queue.cancel(GATEWAY, [record])
        await running.queue.until(lambda: running.queue.did["orders"] == 1)
        running.queue.may_bring.set()
        await put(queue, "next")
        assert [result.stdout for result in await answers(queue, 1)] == ["next"]
        await running.end()
        assert running.pool.began == ["next"]
        assert (await queue.backlog()).running == 0


async def test_an_order_for_what_has_ended_is_ignored(any_redis, queue) -> None:
    """A program that ended before somebody gave it up is settled as it ended."""
    async with serving(any_redis, slots=1, lease_s=3600) as running:
        running.queue.refuses_results = True
        [record] = await put(queue, "done")
        await running.queue.until(lambda: running.queue.tried["settle"] > 0)
        await queue.cancel(GATEWAY, [record])
        await running.queue.until(lambda: running.queue.did["orders"] == 1)
        running.queue.refuses_results = False
        await running.end()
        assert running.count("calls_total", status="ok") == 1
        assert running.count("cancelled_calls_total") == 0


async def test_orders_come_after_a_failure_too(any_redis, queue) -> None:
    """What is sent while the connections to Redis are broken is read when they are there again."""
    async with serving(any_redis, lease_s=3600) as running:
        [record] = await put(queue, "hold")
        await running.pool.until(lambda: running.pool.running == 1)
        tried = running.queue.tried["orders"]
        with any_redis.client() as stranger:
            stranger.client_kill_filter(_type="normal", skipme=True)
        again = CallQueue(any_redis.settings)
        await again.open()
        await again.cancel(GATEWAY, [record])
        await again.close()
        await running.pool.until(lambda: running.pool.killed == ["hold"])
        assert running.queue.tried["orders"] > tried


async def test_a_heartbeat_makes_up_for_an_order_that_was_lost(any_redis, queue) -> None:
    """Whoever renews a call learns that nobody wants it."""
    async with serving(any_redis) as running:
        [record] = await put(queue, "hold")
        await running.pool.until(lambda: running.pool.running == 1)
        with any_redis.client() as stranger:
            stranger.hset(record, "cancelled", 1)
        await running.pool.until(lambda: running.pool.killed == ["hold"])
        assert running.queue.did["orders"] == 0


# ---- the end ----


async def test_a_drain_finishes_what_runs_and_leaves_the_registry(any_redis, queue) -> None:
    """After `stop` running calls end and are answered, further calls stay queued, and the worker is off the list."""
    await put(queue, "hold", "hold")
    async with serving(any_redis) as running:
        await running.pool.until(lambda: running.pool.running == 2)
        await running.queue.until(lambda: running.queue.did["ping"] > 1)
        [info] = await queue.workers()
        assert (info.draining, info.python) == (False, "3.13.1")
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


async def test_what_outruns_the_grace_is_taken_over_soon(any_redis, queue) -> None:
    """Nobody waits for the end of a lease: a worker with a free slot looks every second."""
    loop = asyncio.get_running_loop()
    await put(queue, "hold")
    async with serving(any_redis, grace_s=0, lease_s=3600) as leaving:
        await leaving.pool.until(lambda: leaving.pool.running == 1)
        async with serving(any_redis, lease_s=3600) as staying:
            await staying.queue.until(lambda: staying.queue.tried["trim"] > 0)
            await leaving.end()
            left_at = loop.time()
            await staying.pool.until(lambda: staying.pool.running == 1)
            assert loop.time() - left_at < 4


async def test_a_drain_hands_back_what_it_never_heard_of(any_redis, queue) -> None:
    """What was taken for a worker by its last answer, which never came, does not wait for a lease."""
    async with serving(any_redis, lease_s=3600) as running:
        running.queue.may_bring.clear()
        running.queue.loses_answers = True
        [record] = await put(queue, "lost")
        await running.queue.until(lambda: running.queue.did["take"] == 1)
        running.worker.stop()
        running.queue.may_bring.set()
        await running.task
        assert running.pool.began == []
    assert (await queue.look(record)).state == "waiting"
    assert [theirs.times_delivered for theirs in await queue.reclaim("other", LEASE_S, 1)] == [1]


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
    await put(queue, *[str(number) for number in range(6)])
    await queue.take("dead", 6)
    end_leases(any_redis, "dead")
    async with serving(any_redis, slots=1) as running:
        results = await answers(queue, 6)
        assert sorted(result.stdout for result in results) == list("012345")
        assert running.queue.did["reclaim"] == 6
        assert running.queue.tried["trim"] <= 8


def test_a_round_trip_holds_a_bounded_amount_of_output() -> None:
    """As many results as hold so much together, and one that is larger alone."""
    results = [ToolResult(id=str(size), status=CallStatus.OK, stdout="x" * size) for size in (5, 4, 3, 20, 1)]
    delivery = Delivery("1-0", TOOL, "record", ToolCall(code=""), 0, 0, 1)
    done = [Outcome(delivery, result) for result in results]
    assert [len(first_of(done[start:], 10)) for start in range(5)] == [2, 2, 1, 1, 1]
