"""One gateway process: its parts, and how they start and end.

Who is there. Each request is a task of the HTTP server. Beside them run three loops: the batcher puts calls
into the queue, the reply router reads results, and readiness looks after Redis and the workers. A request
takes a permit (admission), lays its calls on the batcher's list, and waits for the futures that the reply
router resolves. All of them share one `CallQueue` and one event loop, so no step between two awaits needs a
lock.

Who may die. A caller: its request's task goes on to the result and answers nobody. Redis: readiness refuses
new calls, puts fail with their calls, the reader tries again; when it is back, all three go on. A loop that
ends by an exception nobody foresaw is a bug: then all three end, open calls are answered, and the process
shall end too, because a gateway without one of them only looks alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol
from uuid import uuid4

from gateway.admission import Admission
from gateway.batcher import Batcher, Outbox
from gateway.metrics import Metrics
from gateway.pressure import Pressure
from gateway.readiness import ASK_AGAIN_S, Heartbeat, Obstacle, Readiness
from gateway.replies import Answer, Inbox, ReplyRouter
from gateway.tenants import KeyRing
from sandbox.calls import ToolCall
from sandbox.errors import Unavailable
from sandbox.process import told_within
from sandbox.queue import Backlog, QueuedCall
from sandbox.settings import Settings

log = logging.getLogger(__name__)

_DRAINING = Obstacle("draining", "this gateway is shutting down")


class Queue(Outbox, Inbox, Heartbeat, Protocol):
    """What a gateway needs of the queue."""

    async def open(self) -> None:
        """Raises Unavailable, and ConfigError for a Redis that will never do."""

    async def close(self) -> None:
        """After the last use."""

    async def backlog(self) -> Backlog:
        """How full it is. Raises Unavailable."""


class Gateway:
    """The parts that a call passes, in that order, and the loops that serve them."""

    def __init__(self, settings: Settings, queue: Queue) -> None:
        self.id = uuid4().hex
        self.settings = settings
        self.queue = queue
        self.metrics = Metrics()
        self.pressure = Pressure(settings.gateway.max_backlog, self.metrics)
        self.readiness = Readiness(queue, self.pressure, self._put_late_call)
        self.keys = KeyRing(settings.gateway.keys_file, self.metrics)
        self.admission = Admission(settings.gateway, self.readiness, self.metrics)
        self.replies = ReplyRouter(queue, self.id, settings.worker.recovery_s, self.metrics)
        self.batcher = Batcher(queue, self.replies.answer, self.metrics)
        #: Set when a loop has ended by itself, and what ended it.
        self.crashed = asyncio.Event()
        self.crash: Exception | None = None
        #: Set when the end has begun: not ready any more, though calls may still be taken for a moment.
        self.draining = False
        self._stop = asyncio.Event()

    def obstacle(self) -> Obstacle | None:
        """Why nobody shall send further calls here; None when they would be served."""
        return _DRAINING if self.draining else self.readiness.obstacle()

    def submit(self, call: ToolCall) -> asyncio.Future[Answer]:
        """Send a call on its way. The future is shared and must not be cancelled. Raises InvalidCall."""
        answer, is_new = self.replies.expect(call)
        if is_new:
            now_ms = self.queue.now_ms()
            deadline_ms = now_ms + round(call.deadline_s * 1000)
            self.batcher.add(QueuedCall(call, self.id, now_ms, deadline_ms))
        return answer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve inside of the block. Starts also without a Redis, and waits for it."""
        loops = asyncio.create_task(self._run_loops())
        try:
            yield
        finally:
            await self._end(loops)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls and let the open ones finish; what is left after `grace_s` is answered 503."""
        self.draining = True
        self.readiness.refusing = _DRAINING
        log.info("refusing calls", extra={"calls": self.admission.held})
        try:
            async with asyncio.timeout(grace_s):
                await self.admission.emptied()
        except TimeoutError:
            left = self.replies.abandon("this gateway is shutting down and the call was not done in time")
            log.warning("calls left behind", extra={"calls": left, "grace_s": grace_s})

    async def _put_late_call(self) -> None:
        """Put a call that its worker drops unrun, because its deadline has passed."""
        late_ms = self.queue.now_ms() - 1
        call = ToolCall(code="")
        await self.queue.put([QueuedCall(call, self.id, late_ms, late_ms)])

    async def _end(self, loops: asyncio.Task[None]) -> None:
        """The end, in the order of dependence: what puts, what reads, then the queue below both."""
        self._stop.set()
        self.batcher.stop()
        await loops
        self.replies.abandon("this gateway is shutting down")
        await self.queue.close()
        log.info("queue closed")

    async def _run_loops(self) -> None:
        try:
            if await self._open():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.readiness.run(self._stop))
                    group.create_task(self.keys.watch(self._stop))
                    group.create_task(self.batcher.run())
                    group.create_task(self.replies.run(self._stop))
        except Exception as exc:  # noqa: BLE001 - whatever ends a loop ends the process; `crash` carries it there
            self.readiness.refusing = Obstacle("crashed", "this gateway failed and is about to restart")
            self.replies.abandon("this gateway failed; the call may have run")
            self.crash = exc
            self.crashed.set()

    async def _open(self) -> bool:
        """Open the queue as soon as there is one; False when told to stop before that."""
        first = True
        while not self._stop.is_set():
            try:
                await self.queue.open()
            except Unavailable as exc:
                if first:
                    log.warning("waiting for Redis", extra={"reason": exc.message})
                first = False
                await told_within(self._stop, ASK_AGAIN_S)
            else:
                return True
        return False
