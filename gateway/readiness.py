"""Whether a call would be served now, and if not, why.

One task asks Redis once a second for a sign of life and for the workers that are alive; requests only look
at what it found last. So a request never waits to learn that nobody is there, and a Redis that hangs
without an error counts as away once its last answer is `FRESH_S` old.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Literal, NamedTuple, Protocol

from sandbox.errors import Unavailable
from sandbox.process import told_within
from sandbox.queue import WorkerInfo

log = logging.getLogger(__name__)

ASK_EVERY_S = 1.0
#: While nothing can be served, so that the first call after a start does not wait for the next second.
ASK_AGAIN_S = 0.1
#: Three questions in a row without an answer.
FRESH_S = 3.0


class Obstacle(NamedTuple):
    """Why no call is taken: a word for the metric, a sentence for the caller."""

    word: Literal["draining", "crashed", "no_redis", "no_worker"]
    sentence: str


class Heartbeat(Protocol):
    """What this file needs of the queue."""

    async def ping(self) -> None:
        """Raise Unavailable when Redis does not answer."""

    async def workers(self) -> list[WorkerInfo]:
        """Those alive. Raises Unavailable."""


class Readiness:
    """The last news of Redis and the workers, and whether this process still wants calls."""

    def __init__(self, queue: Heartbeat) -> None:
        self.workers: list[WorkerInfo] = []
        #: Set when this process itself takes no more calls, for good.
        self.refusing: Obstacle | None = None
        self._queue = queue
        self._heard_at: float | None = None
        self._silence: str | None = "it was not reached yet"

    def obstacle(self) -> Obstacle | None:
        """What stands between a call and a worker; None when it would be served."""
        if self.refusing is not None:
            return self.refusing
        if self._silence is not None or self._heard_at is None:
            return Obstacle("no_redis", f"Redis is away: {self._silence}")
        if asyncio.get_running_loop().time() - self._heard_at > FRESH_S:
            return Obstacle("no_redis", f"Redis has been silent for more than {FRESH_S:g} s")
        if all(worker.draining for worker in self.workers):
            return Obstacle("no_worker", "no worker is alive")
        return None

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until told to stop."""
        while True:
            await self._ask()
            if await told_within(stop, ASK_AGAIN_S if self.obstacle() else ASK_EVERY_S):
                return

    async def _ask(self) -> None:
        try:
            await self._queue.ping()
            self.workers = await self._queue.workers()
        except Unavailable as exc:
            if self._silence is None:
                log.warning("Redis is away", extra={"reason": exc.message})
            self._silence = exc.message
            return
        if self._silence is not None:
            log.info("Redis answers", extra={"workers": len(self.workers)})
        self._silence = None
        self._heard_at = asyncio.get_running_loop().time()
