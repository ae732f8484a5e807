"""Calls on their way into the queue, many to one round trip.

`add` lays a call on a list and wakes the one task that empties it. While that task waits for Redis the list
grows, and its next pipeline takes what has gathered, up to a bound. So a call that comes alone leaves
at once, and under load the pipelines fill by themselves; no timer is involved. The list is bounded by
admission: every call on it holds a permit.

A put that fails answers exactly the calls of that pipeline. Whether Redis had taken them is unknown; their
ids make a second sending harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.admission import UNAVAILABLE_RETRY_S
from gateway.metrics import Metrics
from sandbox.calls import ToolCall
from sandbox.errors import Unavailable
from sandbox.queue import QueuedCall

log = logging.getLogger(__name__)

#: Against 64 this saves a tenth of the CPU of a call, here and at the workers, and packing so many holds up the
#: loop for some 3 ms; beyond it little is left to save.
FLUSH_CALLS = 256
#: Characters of programs, input and files. Redis must have read a pipeline within the time that a command may
#: take, over a slow line too.
FLUSH_SIZE = 4 * 1024 * 1024
#: Behind a put that fails slowly (Redis frozen, packets lost) calls wait at most about this long; without it
#: the last of thousands would wait for one time-out after another.
PATIENCE_MS = 2_000


class Outbox(Protocol):
    """What this file needs of the queue."""

    def now_ms(self) -> int:
        """Redis's clock."""

    async def put(self, calls: Sequence[QueuedCall]) -> None:
        """One pipeline. Raises Unavailable."""


class Batcher:
    """One list, one task, one pipeline at a time."""

    def __init__(self, outbox: Outbox, refuse: Callable[[str, Unavailable], None], metrics: Metrics) -> None:
        """`refuse` is told the id of each call that could not be put, and why."""
        self._outbox = outbox
        self._refuse = refuse
        self._metrics = metrics
        self._waiting: deque[QueuedCall] = deque()
        self._wake = asyncio.Event()
        self._stopping = False

    def add(self, queued: QueuedCall) -> None:
        """Lay a call on the list."""
        self._waiting.append(queued)
        self._wake.set()

    def stop(self) -> None:
        """Let `run` end once the list is empty."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Empty the list whenever something is on it."""
        while True:
            while self._waiting:
                await self._flush()
            if self._stopping:
                return
            await self._wake.wait()
            self._wake.clear()

    async def _flush(self) -> None:
        calls = self._next()
        self._metrics.flush_calls.observe(len(calls))
        try:
            with self._metrics.put_seconds.time():
                await self._outbox.put(calls)
        except Unavailable as exc:
            log.warning("calls could not be queued", extra={"calls": len(calls), "reason": exc.message})
            self._refuse_all(calls, f"the call could not be queued: {exc.message}")
            self._refuse_all(self._overdue(), f"the call was not sent: {exc.message}")

    def _next(self) -> list[QueuedCall]:
        calls = [self._waiting.popleft()]
        size = _size(calls[0].call)
        while self._waiting and len(calls) < FLUSH_CALLS:
            size += _size(self._waiting[0].call)
            if size > FLUSH_SIZE:
                break
            calls.append(self._waiting.popleft())
        return calls

    def _overdue(self) -> list[QueuedCall]:
        oldest_ms = self._outbox.now_ms() - PATIENCE_MS
        overdue = []
        while self._waiting and self._waiting[0].accepted_ms < oldest_ms:
            overdue.append(self._waiting.popleft())
        return overdue

    def _refuse_all(self, calls: Sequence[QueuedCall], why: str) -> None:
        for queued in calls:
            self._refuse(queued.call.id, Unavailable(why, retry_after_s=UNAVAILABLE_RETRY_S))


def _size(call: ToolCall) -> int:
    files = (file if isinstance(file, str) else file.base64 for file in call.files.values())
    return len(call.code) + len(call.stdin) + sum(map(len, files))
