"""Queue in, queue out: takes as many calls as it has free slots, runs each in a jail, settles.

Theory of operation. These tasks, all owned by `Worker.run`:

    take       reads the stream, COUNT = free slots, so that what nobody can run yet stays in the stream, where it is
               counted and where any other worker can take it; starts one `serve` task for each call. Every second
               it also takes over calls whose worker has gone silent, and trims the streams. After a failure it first
               asks for what the answer that never came was to bring
    serve      one call: expired or delivered too often → answered unstarted; else run in a jail, for no longer than
               there is until its deadline
    settle     sends what has ended, all of it in one round trip; while that is on its way the next ones gather
    obey       waits for orders: a call that nobody waits for any more is killed and settled without a result
    heartbeat  renews the leases of what we hold, and says that we live, or that we are leaving

What we hold is ours to run and to settle until we settle it, or until a heartbeat tells that it is ours no more:
then we were silent for longer than a lease, and another worker has it. Its program is killed, and we forget it. To end
a call early is to cancel its `serve` task, which kills the program and ends when nothing is left of it; the slot is
taken until then.

Who may die. A jail: the pool replaces it. This worker: its leases end, and another one reclaims its calls. One that
was only frozen may bring a result as well; whoever settles first wins. Redis: `take` and the others wait and try again;
what has run meanwhile is settled when it is back. Orders that Redis lost with its memory, the heartbeat makes up for.

Shutdown is `drain`, a checklist at the end of this file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from uuid import uuid4

from sandbox.calls import CallStatus, ToolResult, Usage
from sandbox.errors import JailError, Unavailable
from sandbox.jail import Jail
from sandbox.process import told_within
from sandbox.queue import CallQueue, Delivery, Outcome, Place, WorkerInfo
from sandbox.settings import SLOTS_PER_CORE, WorkerSettings
from worker.metrics import WorkerMetrics
from worker.pool import JailPool

log = logging.getLogger("worker")

MOST_DELIVERIES = 2  # a call that two workers did not survive is not given to a third
# Of output in one round trip, which must be through before the queue's time limit.
SETTLE_CHARACTERS = 1 << 20
RETRY_S = 0.5  # between attempts while Redis is away
RECLAIM_S = 1.0  # how often we look for calls of silent workers
# Results for each slot that may wait for a Redis which hands out calls and takes no results.
MOST_UNSETTLED = 8
# A program that had so much of its deadline has itself to blame when that cuts it.
FAIR_SHARE = 0.9
# After its deadline, for what is no program's fault: no jail starts, a second one breaks, a kill takes long.
LATE_S = 5.0


def default_slots() -> int:
    """For all cores that this process may use."""
    return SLOTS_PER_CORE * len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class _Held:
    """A call that is ours: it runs, or its result waits to be settled."""

    delivery: Delivery
    task: asyncio.Task[None]


class Worker:
    """One worker process; `run` returns after a drain."""

    def __init__(
        self, settings: WorkerSettings, queue: CallQueue, pool: JailPool, metrics: WorkerMetrics
    ) -> None:
        # In containers that share a host name, all of us may be process 1.
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:6]}"
        self._settings = settings
        self._queue = queue
        self._pool = pool
        self._metrics = metrics
        self._slots = pool.host.slots
        self._held: dict[Place, _Held] = {}
        self._serving: set[asyncio.Task[None]] = set()  # one a slot, until nothing is left of the call
        self._done: list[Outcome] = []
        self._early_orders: set[Place] = set()  # they overtook the answer to `take` that brings their calls
        self._has_done = asyncio.Event()
        self._has_room = asyncio.Event()
        self._stopping = asyncio.Event()
        self._finished = asyncio.Event()  # nothing runs any more, and nothing will
        self._beat = asyncio.Event()  # the heartbeat has something to say now
        self._started_at = time.time()
        metrics.slots.set(self._slots)
        metrics.busy.set_function(lambda: len(self._serving))

    def stop(self) -> None:
        """Take no further calls, and say so at once; `run` then drains and returns."""
        self._stopping.set()
        self._has_room.set()
        self._beat.set()

    async def run(self) -> None:
        """Serve until `stop`. Opens the queue, as soon as there is a Redis; raises ConfigError for one too old."""
        if not await self._found_redis():
            return
        settle = asyncio.create_task(self._settle_forever())
        heartbeat = asyncio.create_task(self._heartbeat())
        obey = asyncio.create_task(self._obey_forever())
        take = asyncio.create_task(self._take_forever())
        try:
            done, _ = await asyncio.wait([settle, take, heartbeat, obey], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # only `take` ends, and only when we stop
        finally:
            await self._drain(take, settle, heartbeat, obey)

    # ---- in ----

    async def _found_redis(self) -> bool:
        """Wait for it, and say that we are there; False when told to stop before that."""
        said = False
        while not self._stopping.is_set():
            try:
                await self._queue.open()
                await self._queue.forget_consumers()
                await self._announce()
            except Unavailable as exc:
                if not said:
                    log.warning("waiting for Redis", extra={"error": exc.message})
                said = True
                await told_within(self._stopping, RETRY_S)
            else:
                log.info(
                    "serving",
                    extra={"worker": self.id, "slots": self._slots, "isolation": self._pool.host.level},
                )
                return True
        return False

    async def _take_forever(self) -> None:
        is_away = False
        loop = asyncio.get_running_loop()
        reclaim_at = loop.time() + RECLAIM_S
        while not self._stopping.is_set():
            self._has_room.clear()
            free = self._slots - len(self._serving)
            if free <= 0 or len(self._done) >= MOST_UNSETTLED * self._slots:
                await self._has_room.wait()
                continue
            try:
                if is_away:
                    deliveries = await self._queue.resume(self.id, self._held, free)
                elif loop.time() >= reclaim_at:
                    deliveries = await self._reclaim(free)
                    if not deliveries:  # else there may be more, and they have waited longest
                        reclaim_at = loop.time() + RECLAIM_S
                else:
                    deliveries = await self._queue.take(self.id, free, reclaim_at - loop.time())
            except Unavailable as exc:
                if not is_away:
                    log.warning("Redis is away", extra={"error": exc.message})
                is_away = True
                await told_within(self._stopping, RETRY_S)
                continue
            if is_away:
                log.info("Redis is back")
                is_away = False
            self._start(deliveries)

    def _start(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            task = asyncio.create_task(self._serve(delivery))
            self._held[delivery.place] = _Held(delivery, task)
            self._serving.add(task)
            task.add_done_callback(self._served)
        early, self._early_orders = self._early_orders, set()
        self._obey(early & self._held.keys())

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._has_room.set()

    # ---- a call ----

    async def _serve(self, delivery: Delivery) -> None:
        is_poison = delivery.times_delivered > MOST_DELIVERIES
        if is_poison:
            queue_s, result = (
                self._waited_s(delivery),
                fault(
                    delivery, CallStatus.INTERNAL_ERROR, "delivered too often: two workers did not survive it"
                ),
            )
        else:
            queue_s, result = await self._run(delivery)
        usage = result.usage.model_copy(update={"queue_s": queue_s})
        result = result.model_copy(update={"usage": usage, "worker": self.id})
        self._done.append(Outcome(delivery, result, is_poison))
        self._has_done.set()

    def _waited_s(self, delivery: Delivery) -> float:
        return max(0, self._queue.now_ms() - delivery.accepted_ms) / 1000

    async def _run(self, delivery: Delivery) -> tuple[float, ToolResult]:
        """How long a call waited, for us and then for a jail that holds what it imports, and what came of it."""
        queue_s, left_s = self._waited_s(delivery), self._left_s(delivery)
        if left_s <= 0:
            return queue_s, too_late(delivery, queue_s)
        try:
            async with asyncio.timeout(left_s + LATE_S):
                jail = await self._pool.jail_for(delivery.call)
                queue_s, left_s = self._waited_s(delivery), self._left_s(delivery)
                if left_s <= 0:
                    return queue_s, too_late(delivery, queue_s)
                return queue_s, await self._verdict(delivery, jail, left_s)
        except JailError as exc:
            self._metrics.jail_failures.inc()
            return queue_s, fault(delivery, CallStatus.INTERNAL_ERROR, exc.message)
        except TimeoutError:
            self._metrics.jail_failures.inc()
            return queue_s, fault(
                delivery, CallStatus.INTERNAL_ERROR, "no jail was done with it at its deadline"
            )
        except Exception as exc:
            # Unanswered it would be ours for ever, since the heartbeat renews what we hold.
            log.exception("a call's task failed", extra={"call": delivery.call.id})
            return queue_s, fault(
                delivery, CallStatus.INTERNAL_ERROR, f"the worker failed: {type(exc).__name__}"
            )

    async def _verdict(self, delivery: Delivery, jail: Jail, left_s: float) -> ToolResult:
        call = delivery.call
        given_s = min(call.limits.wall_s, left_s)
        if given_s < call.limits.wall_s:
            call = call.model_copy(update={"limits": call.limits.model_copy(update={"wall_s": given_s})})
        result = await self._pool.run(call, jail)
        if reason := cut_short(delivery, given_s, result):
            return fault(delivery, CallStatus.QUEUE_TIMEOUT, reason, result.usage)
        return result

    def _left_s(self, delivery: Delivery) -> float:
        return (delivery.deadline_ms - self._queue.now_ms()) / 1000

    # ---- orders ----

    async def _obey_forever(self) -> None:
        """Until cancelled, which loses nothing: an order stays in its stream until the read after it."""
        while True:
            try:
                self._obey(await self._queue.orders(self.id))
            except Unavailable:
                await asyncio.sleep(RETRY_S)

    def _obey(self, places: Iterable[Place]) -> None:
        """Kill calls that nobody waits for any more. What has ended is before them in the line, and settled so."""
        for place in places:
            held = self._held.get(place)
            if held is None:
                self._early_orders.add(place)
            else:
                held.task.cancel()
                self._done.append(Outcome(held.delivery, None))
                self._has_done.set()

    # ---- out ----

    async def _settle_forever(self) -> None:
        while not self._finished.is_set():
            await self._has_done.wait()
            self._has_done.clear()
            await self._settle()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.lease_s  # then others run these calls again anyway
        while self._done and loop.time() < give_up_at:
            await self._settle()

    async def _settle(self) -> None:
        """Settle what has ended. It is kept until Redis has it, however often that takes; twice is harmless."""
        done = first_of(self._done, SETTLE_CHARACTERS)
        if not done:
            return
        try:
            settled = await self._queue.settle(done)
        except Unavailable:
            self._has_done.set()
            await asyncio.sleep(RETRY_S)
            return
        del self._done[: len(done)]
        if self._done:
            self._has_done.set()
        self._has_room.set()
        for (delivery, result, _), was_ours in zip(done, settled, strict=True):
            self._held.pop(delivery.place, None)
            self._metrics.settled(result, was_ours)
            status = "cancelled" if result is None else result.status.value
            log.debug("call finished", extra={"call": delivery.call.id, "status": status, "ours": was_ours})

    # ---- leases ----

    async def _heartbeat(self) -> None:
        """The only one that announces, so that an older word never comes after a newer one."""
        while True:
            await told_within(self._beat, self._settings.lease_s / 3)
            self._beat.clear()
            if self._finished.is_set():
                return
            try:
                await self._renew()
                await self._announce()
                await self._queue.ping()  # sets the clock anew
            except Unavailable as exc:
                log.warning("no heartbeat", extra={"error": exc.message})

    async def _renew(self) -> None:
        lost = await self._queue.renew(self.id, [held.delivery for held in self._held.values()])
        for delivery in lost:
            # None: settled while we asked. Cancelling: an order was quicker.
            held = self._held.pop(delivery.place, None)
            if held is not None and not held.task.done() and not held.task.cancelling():
                held.task.cancel()
                self._metrics.lost.inc()
                log.warning("a call is not ours any more", extra={"call": delivery.call.id})

    async def _announce(self) -> None:
        info = WorkerInfo(
            id=self.id,
            slots=self._slots,
            busy=len(self._serving),
            level=self._pool.host.level,
            draining=self._stopping.is_set(),
            started_at=self._started_at,
            version=metadata.version("roc-sandbox"),
            python=self._pool.host.python_version,
        )
        await self._queue.announce(info, ttl_s=self._settings.lease_s)

    async def _reclaim(self, count: int) -> list[Delivery]:
        await self._queue.trim()
        reclaimed = await self._queue.reclaim(self.id, self._settings.lease_s, count)
        # Our own after a long silence, when our heartbeat could not reach Redis: they still run here.
        fresh = [delivery for delivery in reclaimed if delivery.place not in self._held]
        if fresh:
            log.warning("took over calls of a silent worker", extra={"calls": len(fresh)})
            self._metrics.reclaimed.inc(len(fresh))
        return fresh

    # ---- the end ----

    async def _drain(
        self,
        take: asyncio.Task[None],
        settle: asyncio.Task[None],
        heartbeat: asyncio.Task[None],
        obey: asyncio.Task[None],
    ) -> None:
        """The loops are told to end and not cancelled, so that no command of theirs is cut off half way.

        But for `obey`, which only reads.
        """
        self.stop()
        log.info("draining", extra={"running": len(self._serving)})
        await asyncio.wait([take])  # its read brings what it took, or nothing, within a second
        if self._serving:
            await asyncio.wait(self._serving, timeout=self._settings.grace_s)
        for task in self._serving:  # over the grace: kill them, and leave them to others
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        self._finished.set()
        self._has_done.set()
        self._beat.set()
        obey.cancel()
        await asyncio.wait([settle, heartbeat, obey])
        await self._leave()
        log.info("drained", extra={"unsettled": len(self._held)})

    async def _leave(self) -> None:
        try:
            missed = await self._queue.resume(self.id, self._held, self._slots)
            await self._queue.hand_back(self.id, [*(held.delivery for held in self._held.values()), *missed])
            await self._queue.retire(self.id)
        except Unavailable as exc:
            log.warning("Redis was away at the end; our leases will end", extra={"error": exc.message})


def first_of(done: list[Outcome], characters: int) -> list[Outcome]:
    """The first results, as many as hold so much output together, and at least one."""
    chosen: list[Outcome] = []
    for outcome in done:
        if outcome.result is not None:
            characters -= characters_of(outcome.result)
        if chosen and characters < 0:
            break
        chosen.append(outcome)
    return chosen


def characters_of(result: ToolResult) -> int:
    """How much output a result holds."""
    return sum(map(len, (result.stdout, result.stdout_tail, result.stderr, result.stderr_tail)))


def cut_short(delivery: Delivery, given_s: float, result: ToolResult) -> str:
    """Why a `timeout` says nothing about the program; empty where it does.

    A program whose limit was what was left of the deadline, `given_s`, is judged by that only if it had most of the
    deadline for itself. Else the time that it waited was missing.
    """
    limits = delivery.call.limits
    is_cut = given_s < limits.wall_s and result.usage.cpu_s < limits.cpu_s
    had_s = min(given_s, result.usage.wall_s)
    deadline_s = (delivery.deadline_ms - delivery.accepted_ms) / 1000
    is_fair = had_s >= min(limits.wall_s, FAIR_SHARE * deadline_s)
    if result.status is not CallStatus.TIMEOUT or not is_cut or is_fair:
        return ""
    return (
        f"its deadline came after {had_s:.1f} s of the {limits.wall_s:g} s that it may run; "
        f"it had waited {deadline_s - given_s:.1f} s"
    )


def too_late(delivery: Delivery, queue_s: float) -> ToolResult:
    """What a call gets that could not be started before its deadline."""
    return fault(delivery, CallStatus.QUEUE_TIMEOUT, f"waited {queue_s:.1f} s, past its deadline")


def fault(delivery: Delivery, status: CallStatus, reason: str, usage: Usage | None = None) -> ToolResult:
    """A result that says nothing about the program, but what it used, if it ran."""
    return ToolResult(id=delivery.call.id, status=status, reason=reason, usage=usage or Usage())
