"""Whether a call would be served now, and if not, why.

One task asks Redis twice a second for its pulse and for the workers that are alive; requests only look at what it
found last. So a request never waits to learn that nobody is there.

A Redis that hangs without an error counts as away once its last answer is `FRESH_S` old, and at once when a put has
failed (`lost`). After that a Redis that answers is no proof: one that is out of memory, a replica, or one whose
rules for our user have changed answers every question and takes no call. Only a put proves that puts work. So we put
a call of our own, which is late already and which whoever takes it drops, and until it is in, no other call is taken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple, Protocol

from gateway.pressure import Pressure
from sandbox.errors import Unavailable
from sandbox.process import LateTimer, told_within
from sandbox.queue import Pulse, WorkerInfo

log = logging.getLogger(__name__)

ASK_EVERY_S = 0.5
#: While nothing can be served, so that the first call after a start does not wait for the next question.
ASK_AGAIN_S = 0.1
#: The pause between two questions, and 0.75 s for the answer.
FRESH_S = 1.25
#: Further turns of the loop, since a lag of ours is no silence of Redis; the questions of one pulse take some 30.
FRESH_TURNS = 40


class Obstacle(NamedTuple):
    """Why no call is taken: a word for the metric, a sentence for the caller."""

    word: Literal["draining", "crashed", "no_redis", "redis_full", "no_worker"]
    sentence: str


class Heartbeat(Protocol):
    """What this file needs of the queue."""

    async def pulse(self) -> Pulse:
        """How Redis is. Raises Unavailable when it does not answer."""

    async def workers(self) -> list[WorkerInfo]:
        """Those alive. Raises Unavailable."""


class Readiness:
    """The last news of Redis and the workers, and whether this process still wants calls."""

    def __init__(
        self,
        queue: Heartbeat,
        pressure: Pressure,
        put_late_call: Callable[[], Awaitable[None]],
        on_new_server: Callable[[], None] = lambda: None,
    ) -> None:
        """`pressure` hears of each pulse. `put_late_call` raises Unavailable.

        `on_new_server` is called when Redis has been restarted or has failed over since the last pulse, and so
        may have lost calls.
        """
        self.workers: list[WorkerInfo] = []
        #: Set once Redis has answered, or never will.
        self.heard = asyncio.Event()
        #: Calls that the workers which take any can run at a time.
        self.slots = 0
        #: Set when this process itself takes no more calls, for good.
        self.refusing: Obstacle | None = None
        self._queue = queue
        self._pressure = pressure
        self._put_late_call = put_late_call
        self._on_new_server = on_new_server
        self._run_id: str | None = None
        self._is_stale = False
        self._staleness: LateTimer | None = None
        self._silence: str | None = "it was not reached yet"
        self._failed_put: str | None = None

    def obstacle(self) -> Obstacle | None:
        """What stands between a call and a worker; None when it would be served."""
        if self.refusing is not None:
            return self.refusing
        if self._silence is not None:
            why = f"is away: {self._silence}"
        elif self._is_stale:
            why = f"has been silent for more than {FRESH_S:g} s"
        elif self._pressure.is_full:
            return Obstacle("redis_full", "Redis is full")
        elif self._failed_put is not None:
            why = f"takes no calls: {self._failed_put}"
        elif self.slots == 0:
            return Obstacle("no_worker", "no worker is alive")
        else:
            return None
        return Obstacle("no_redis", f"Redis {why}")

    def lost(self, reason: str) -> None:
        """Take no more calls, because a put has failed; until one has not."""
        self._failed_put = reason

    async def run(self, stop: asyncio.Event) -> None:
        """Ask until told to stop."""
        while True:
            await self._ask()
            if await told_within(stop, ASK_AGAIN_S if self.obstacle() else ASK_EVERY_S):
                return

    async def _ask(self) -> None:
        try:
            self._note(await self._queue.pulse())
            self.workers = await self._queue.workers()
            self.slots = sum(worker.slots for worker in self.workers if not worker.draining)
            # A full one would refuse it, or be fuller by it.
            if self._failed_put is not None and not self._pressure.is_full:
                await self._put_late_call()
                self._failed_put = None
                log.info("Redis takes calls again")
        except Unavailable as exc:
            if self._silence is None:
                log.warning("Redis is away", extra={"reason": exc.message})
            self._silence = exc.message
            return
        if self._silence is not None:
            log.info("Redis answers", extra={"workers": len(self.workers)})
        self._silence = None
        self.heard.set()

    def _grow_stale(self) -> None:
        self._is_stale = True

    def _note(self, pulse: Pulse) -> None:
        if self._staleness is not None:
            self._staleness.cancel()
        self._is_stale = False
        self._staleness = LateTimer(FRESH_S, FRESH_TURNS, self._grow_stale)
        was_full = self._pressure.is_full
        self._pressure.note(pulse, self.slots)
        if self._pressure.is_full != was_full:
            used = {"used_bytes": pulse.used_bytes, "max_bytes": pulse.max_bytes}
            if was_full:
                log.info("Redis has room again", extra=used)
            else:
                log.warning("Redis is full", extra=used)
        if self._run_id not in {None, pulse.run_id}:
            log.warning("Redis is another server than before")
            self._on_new_server()
        self._run_id = pulse.run_id
