"""What a gateway sends to the queue, many calls to one round trip: new calls, and those that nobody wants any more.

`add` lays a call into the line and `cancel` on a list, and both wake the one task that empties them. While that task
waits for Redis they grow, and its next round trip takes what has gathered, up to a bound. So a call that comes alone
leaves at once, and under load the round trips fill by themselves; no timer is involved. Both are bounded by
admission: every call in them holds a permit, or held one a moment ago.

One task for both, so that a call which is cancelled and then sent again arrives in this order.

A round trip that fails answers its calls, and all that wait behind it: a Redis that does not answer one does not
answer the next, and no caller shall wait for more than a second to learn that. Whether Redis had taken those of a put
is unknown, so they are cancelled when it is back, and a caller who sends one again gets what there is. What this
gateway already waits for and puts again, because the server is a new one, is kept for the next attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from gateway.line import Line
from gateway.metrics import Metrics
from gateway.replies import ReplyRouter
from gateway.tenants import Tenant
from sandbox.calls import ToolCall
from sandbox.errors import Unavailable
from sandbox.queue import CallQueue, Found, Put, QueuedCall

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Against 64 this saves a tenth of the CPU of a call, here and at the workers, and packing so many holds up the
#: loop for some 3 ms; beyond it little is left to save.
FLUSH_CALLS = 256
#: Characters of programs, input and files. Redis must have read a round trip's calls within the time that a command
#: may take, over a slow line too.
FLUSH_SIZE = 4 * 1024 * 1024
#: Between attempts for what must not be given up, while Redis is away.
RETRY_S = 0.25


class Batcher:
    """Two lists, one task, one round trip at a time."""

    def __init__(
        self,
        queue: CallQueue,
        gateway: str,
        metrics: Metrics,
        was_put: Callable[[QueuedCall, Put | Unavailable], None],
        was_found: Callable[[str, Found | Unavailable], None],
        replies: ReplyRouter,
        line: Line[QueuedCall],
    ) -> None:
        """`was_put` hears what came of each call, `was_found` of each cancellation, by its record."""
        self._queue = queue
        self._gateway = gateway
        self._metrics = metrics
        self._was_put = was_put
        self._was_found = was_found
        self._replies = replies
        self._line = line
        self._again: deque[QueuedCall] = deque()
        self._cancelled: deque[str] = deque()
        self._wake = asyncio.Event()
        self._stopping = False

    def add(self, queued: QueuedCall, tenant: Tenant) -> None:
        """Put a call at the end of its tenant's line."""
        self._line.push(queued, tenant)
        self._wake.set()

    def over(self, queued: QueuedCall) -> None:
        """It has its answer, or needs none any more."""
        if self._line.answered(queued):
            self._wake.set()

    def add_again(self, calls: Iterable[QueuedCall]) -> None:
        """Put calls once more that were put before, because the server may not know them."""
        self._again.extend(calls)
        self._wake.set()

    def cancel(self, record: str) -> None:
        """Wait no longer for a call that was put."""
        self._cancelled.append(record)
        self._wake.set()

    def stop(self) -> None:
        """Let `run` end once the lists are empty, or Redis is away."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Send whatever is there and may leave."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                while await self._flush():
                    pass
            except Unavailable as exc:
                self._refuse(self._line.clear(), exc)
                loop.call_later(RETRY_S, self._wake.set)
            if self._stopping:
                return
            await self._wake.wait()
            self._wake.clear()

    async def _flush(self) -> bool:
        """Whether there is more."""
        if self._cancelled:
            await self._cancel()
        if self._again:
            await self._put_again()
        calls = _load(iter(self._line.pop, None))
        if calls:
            await self._put(calls)
        return bool(calls or self._cancelled or self._again)

    async def _cancel(self) -> None:
        records = [
            record
            for record in islice(_taken(self._cancelled), FLUSH_CALLS)
            if not self._replies.is_wanted(record)
        ]
        if not records:
            return
        try:
            found = await self._queue.cancel(self._gateway, records)
        except Unavailable as exc:
            self._cancelled.extend(records)
            for record in records:
                self._was_found(record, exc)
            raise
        for record, what in zip(records, found, strict=True):
            self._was_found(record, what)

    async def _put_again(self) -> None:
        calls = _load(
            queued for queued in _taken(self._again) if queued.is_job or self._replies.wants(queued)
        )
        try:
            outcomes = await self._queue.put(self._gateway, calls)
        except Unavailable:
            self._again.extend(calls)
            raise
        for queued, outcome in zip(calls, outcomes, strict=True):
            self._was_put(queued, outcome)

    async def _put(self, calls: list[QueuedCall]) -> None:
        self._metrics.flush_calls.observe(len(calls))
        for queued in calls:
            self._replies.leaves(queued)
        try:
            with self._metrics.put_seconds.time():
                outcomes = await self._queue.put(self._gateway, calls)
        except Unavailable as exc:
            log.warning("calls could not be queued", extra={"calls": len(calls), "reason": exc.message})
            self._cancelled.extend(queued.record for queued in calls)
            self._refuse(calls, exc)
            raise
        for queued, outcome in zip(calls, outcomes, strict=True):
            self._was_put(queued, outcome)

    def _refuse(self, calls: Iterable[QueuedCall], why: Unavailable) -> None:
        for queued in calls:
            self._was_put(queued, why)


def _load(calls: Iterator[QueuedCall]) -> list[QueuedCall]:
    """As many as one round trip takes."""
    loaded: list[QueuedCall] = []
    size = 0
    while len(loaded) < FLUSH_CALLS and size < FLUSH_SIZE and (queued := next(calls, None)):
        size += _size(queued.call)
        loaded.append(queued)
    return loaded


def _taken(waiting: deque[T]) -> Iterator[T]:
    while waiting:
        yield waiting.popleft()


def _size(call: ToolCall) -> int:
    files = (file if isinstance(file, str) else file.base64 for file in call.files.values())
    return len(call.code) + len(call.stdin) + sum(map(len, files))
