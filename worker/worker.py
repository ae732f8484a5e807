"""Queue in, queue out: takes as many calls as it has free slots, runs each in a jail, settles.

Theory of operation. These tasks, all owned by `Worker.run`:

    take       reads the stream, COUNT = free slots, so that what nobody can run yet stays in the stream, where it is
               counted and where any other worker can take it; starts one `serve` task for each call. Every second
               it also takes over calls whose worker has gone silent, and trims the streams
    serve      one call: expired or delivered too often → answered unstarted; else run in a jail
    settle     sends what has ended, all of it in one pipeline; while that is on its way the next ones gather
    heartbeat  renews the leases of what we hold, and says that we live, or that we are leaving

Who may die. A jail: the pool replaces it. This worker: its leases end, and another one reclaims its calls. A result
that was sent but not acknowledged is sent twice; the gateway drops the second by its id. Redis: `take` and the
others wait and try again; what has run meanwhile is settled when it is back.

Shutdown is `drain`, a checklist at the end of this file.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from importlib import metadata
from uuid import uuid4

from sandbox.calls import CallStatus, ToolResult, Usage
from sandbox.errors import JailError, Unavailable
from sandbox.process import told_within
from sandbox.queue import CallQueue, Delivery, WorkerInfo
from sandbox.settings import SLOTS_PER_CORE, WorkerSettings
from worker.metrics import WorkerMetrics
from worker.pool import JailPool

log = logging.getLogger("worker")

MOST_DELIVERIES = 2  # a call that two workers did not survive is not given to a third
# Of output in one transaction, which must be through before the queue's time limit.
SETTLE_CHARACTERS = 1 << 20
RETRY_S = 0.5  # between attempts while Redis is away
RECLAIM_S = 1.0  # how often we look for calls of silent workers
# Results for each slot that may wait for Redis. When it is full it refuses results, and still hands out calls.
MOST_UNSETTLED = 8


def default_slots() -> int:
    """For all cores that this process may use."""
    return SLOTS_PER_CORE * len(os.sched_getaffinity(0))


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
        self._held: dict[str, Delivery] = {}  # taken and not settled, by entry
        self._serving: set[asyncio.Task[None]] = set()
        self._done: list[tuple[Delivery, ToolResult]] = []
        self._has_done = asyncio.Event()
        self._has_room = asyncio.Event()
        self._stopping = asyncio.Event()
        self._finished = asyncio.Event()  # nothing runs any more, and nothing will
        self._beat = asyncio.Event()  # the heartbeat has something to say now
        self._started_at = time.time()
        metrics.slots.set(self._slots)

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
        take = asyncio.create_task(self._take_forever())
        try:
            done, _ = await asyncio.wait([settle, take, heartbeat], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # only `take` ends, and only when we stop
        finally:
            await self._drain(take, settle, heartbeat)

    # ---- in ----

    async def _found_redis(self) -> bool:
        """Wait for it, and say that we are there; False when told to stop before that."""
        said = False
        while not self._stopping.is_set():
            try:
                await self._queue.open()
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
                if loop.time() >= reclaim_at:
                    deliveries = await self._reclaim(free)
                    if not deliveries:  # else there may be more, and they have waited longest
                        reclaim_at = loop.time() + RECLAIM_S
                else:
                    deliveries = await self._queue.take(self.id, free)
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
            self._held[delivery.entry_id] = delivery
            task = asyncio.create_task(self._serve(delivery))
            self._serving.add(task)
            task.add_done_callback(self._served)
        self._metrics.busy.set(len(self._serving))

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        self._metrics.busy.set(len(self._serving))
        self._has_room.set()

    # ---- a call ----

    async def _serve(self, delivery: Delivery) -> None:
        call = delivery.call
        now_ms = self._queue.now_ms()
        queue_s = max(0, now_ms - delivery.accepted_ms) / 1000
        if delivery.times_delivered > MOST_DELIVERIES:
            result = fault(
                delivery, CallStatus.INTERNAL_ERROR, "delivered too often: two workers did not survive it"
            )
        elif now_ms > delivery.deadline_ms:
            result = fault(delivery, CallStatus.QUEUE_TIMEOUT, f"waited {queue_s:.1f} s, past its deadline")
        else:
            try:
                result = await self._pool.run(call)
            except JailError as exc:
                self._metrics.jail_failures.inc()
                result = fault(delivery, CallStatus.INTERNAL_ERROR, exc.message)
            except Exception as exc:
                # Unanswered it would be ours for ever, since the heartbeat renews what we hold.
                log.exception("a call's task failed", extra={"call": call.id})
                reason = f"the worker failed: {type(exc).__name__}"
                result = fault(delivery, CallStatus.INTERNAL_ERROR, reason)
        usage = result.usage.model_copy(update={"queue_s": queue_s})
        result = result.model_copy(update={"usage": usage, "worker": self.id})
        self._done.append((delivery, result))
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
            await self._queue.settle(done)
        except Unavailable:
            self._has_done.set()
            await self._forget_late()
            await asyncio.sleep(RETRY_S)
            return
        del self._done[: len(done)]
        if self._done:
            self._has_done.set()
        self._has_room.set()
        for delivery, result in done:
            self._held.pop(delivery.entry_id, None)
            self._metrics.settled(result)
            log.debug("call finished", extra={"call": result.id, "status": result.status.value})

    async def _forget_late(self) -> None:
        """Give up results that nobody waits for any more, so that a full Redis gets room again."""
        now_ms = self._queue.now_ms()
        late = [pair for pair in self._done if now_ms > answered_by_ms(pair[0], self._settings)]
        if not late:
            return
        try:
            await self._queue.forget([delivery for delivery, _ in late])
        except Unavailable:
            return  # it is away, and not just full: the next attempt will tell
        log.warning("gave up results that came too late", extra={"calls": len(late)})
        for pair in late:
            self._done.remove(pair)
            self._held.pop(pair[0].entry_id, None)
        self._has_room.set()

    # ---- leases ----

    async def _heartbeat(self) -> None:
        """The only one that announces, so that an older word never comes after a newer one."""
        while True:
            await told_within(self._beat, self._settings.lease_s / 3)
            self._beat.clear()
            if self._finished.is_set():
                return
            try:
                if self._held:
                    await self._queue.renew(self.id, list(self._held.values()))
                await self._announce()
                await self._queue.ping()  # sets the clock anew
            except Unavailable as exc:
                log.warning("no heartbeat", extra={"error": exc.message})

    async def _announce(self) -> None:
        info = WorkerInfo(
            id=self.id,
            slots=self._slots,
            busy=len(self._serving),
            level=self._pool.host.level,
            draining=self._stopping.is_set(),
            started_at=self._started_at,
            version=metadata.version("roc-sandbox"),
        )
        await self._queue.announce(info, ttl_s=self._settings.lease_s)

    async def _reclaim(self, count: int) -> list[Delivery]:
        await self._queue.trim()
        reclaimed = await self._queue.reclaim(self.id, self._settings.lease_s, count)
        # Our own after a long silence, when our heartbeat could not reach Redis: they still run here.
        fresh = [delivery for delivery in reclaimed if delivery.entry_id not in self._held]
        if fresh:
            log.warning("took over calls of a silent worker", extra={"calls": len(fresh)})
            self._metrics.reclaimed.inc(len(fresh))
        return fresh

    # ---- the end ----

    async def _drain(
        self, take: asyncio.Task[None], settle: asyncio.Task[None], heartbeat: asyncio.Task[None]
    ) -> None:
        """The loops are told to end and not cancelled, so that no command of theirs is cut off half way."""
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
        await asyncio.wait([settle, heartbeat])
        await self._leave()
        log.info("drained", extra={"unsettled": len(self._held)})

    async def _leave(self) -> None:
        try:
            await self._queue.hand_back(list(self._held.values()))
            await self._queue.retire(self.id)
        except Unavailable as exc:
            log.warning("Redis was away at the end; our leases will end", extra={"error": exc.message})


def first_of(done: list[tuple[Delivery, ToolResult]], characters: int) -> list[tuple[Delivery, ToolResult]]:
    """The first results, as many as hold so much output together, and at least one."""
    chosen: list[tuple[Delivery, ToolResult]] = []
    for pair in done:
        characters -= len(pair[1].stdout) + len(pair[1].stderr)
        if chosen and characters < 0:
            break
        chosen.append(pair)
    return chosen


def answered_by_ms(delivery: Delivery, settings: WorkerSettings) -> float:
    """When the call's gateway answers for itself if no reply came, on Redis's clock."""
    return delivery.deadline_ms + (delivery.call.limits.wall_s + settings.recovery_s) * 1000


def fault(delivery: Delivery, status: CallStatus, reason: str) -> ToolResult:
    """A result that says nothing about the program."""
    return ToolResult(id=delivery.call.id, status=status, reason=reason, usage=Usage())
