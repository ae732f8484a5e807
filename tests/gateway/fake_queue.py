"""`CallQueue` without Redis, as far as gateways and the echo worker use it. The same suite runs over both."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from sandbox.calls import ToolResult
from sandbox.errors import Unavailable
from sandbox.queue import Backlog, Delivery, Pulse, QueuedCall, StreamPulse, WorkerInfo


class FakeQueue:
    """One shared memory in the place of Redis. `away` makes every method fail as if it were gone."""

    def __init__(self) -> None:
        self.away = False
        self.is_open = False
        self.run_id = "fake"
        self.used_bytes = 1
        self.max_bytes = 0
        self.puts: list[list[QueuedCall]] = []
        self._taken = {"tool": 0, "judge": 0}
        self._calls: deque[QueuedCall] = deque()
        self._running: dict[str, Delivery] = {}
        self._replies: dict[str, deque[tuple[str, bytes]]] = defaultdict(deque)
        self._alive: dict[str, tuple[WorkerInfo, float]] = {}
        self._changed = asyncio.Condition()

    def _check(self) -> None:
        if self.away:
            raise Unavailable("Redis does not serve us (FakeError)", retry_after_s=1.0)

    async def open(self) -> None:
        self._check()
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False

    def now_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    async def pulse(self) -> Pulse:
        self._check()
        waiting = {
            priority: sum(queued.call.priority == priority for queued in self._calls)
            for priority in ("tool", "judge")
        }
        return Pulse(
            self.run_id,
            self.used_bytes,
            self.max_bytes,
            {priority: StreamPulse(waiting[priority], 0, self._taken[priority]) for priority in waiting},
        )

    async def put(self, calls: Sequence[QueuedCall]) -> None:
        self._check()
        self.puts.append(list(calls))
        async with self._changed:
            self._calls.extend(calls)
            self._changed.notify_all()

    async def take(self, consumer: str, count: int, block_s: float = 1.0) -> list[Delivery]:
        self._check()
        await self._wait(lambda: bool(self._calls), block_s)
        taken = []
        while self._calls and len(taken) < count:
            queued = self._calls.popleft()
            self._taken[queued.call.priority] += 1
            entry = f"{len(self._running)}-{queued.call.id}"
            delivery = Delivery(
                entry, "calls", queued.call, queued.reply_to, queued.accepted_ms, queued.deadline_ms, 1
            )
            self._running[entry] = delivery
            taken.append(delivery)
        return taken

    async def settle(self, done: Sequence[tuple[Delivery, ToolResult]]) -> None:
        self._check()
        async with self._changed:
            for delivery, result in done:
                self._running.pop(delivery.entry_id, None)
                self._replies[delivery.reply_to].append((result.id, result.model_dump_json().encode()))
            self._changed.notify_all()

    async def replies(self, gateway: str, block_s: float = 1.0) -> list[tuple[str, bytes]]:
        self._check()
        await self._wait(lambda: bool(self._replies[gateway]), block_s)
        self._check()
        replies = list(self._replies[gateway])
        self._replies[gateway].clear()
        return replies

    async def backlog(self) -> Backlog:
        self._check()
        oldest_s = (self.now_ms() - self._calls[0].accepted_ms) / 1000 if self._calls else 0.0
        return Backlog(len(self._calls), len(self._running), oldest_s)

    async def announce(self, info: WorkerInfo, ttl_s: float) -> None:
        self._check()
        self._alive[info.id] = (info, time.monotonic() + ttl_s)

    async def retire(self, worker_id: str) -> None:
        self._check()
        self._alive.pop(worker_id, None)

    async def workers(self) -> list[WorkerInfo]:
        self._check()
        return [info for info, until in self._alive.values() if until > time.monotonic()]

    async def _wait(self, there: object, block_s: float) -> None:
        try:
            async with asyncio.timeout(block_s), self._changed:
                await self._changed.wait_for(there)  # type: ignore[arg-type]
        except TimeoutError:
            return
