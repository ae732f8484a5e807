"""How long a call that comes now would wait, and whether it had better come later.

Redis tells twice a second how many calls of each priority wait and how many were ever taken (`Pulse`). What is
taken while others wait is the pace of the workers, and the calls that wait, over the pace, are the wait of the next.
A call whose deadline would pass meanwhile is refused at once, while its caller can still do something else. Calls
that other gateways put are known at the next pulse; our own since the last one are counted as they leave.

The pace is a mean over the last seconds. Over how many depends on the calls: slots that all run long programs become
free in lumps, and between two lumps a short memory would see a service that stands still. So it goes back twice as
long as a call takes, which is `running / pace`. A pace of which little is known yet begins as if every slot became
free now, and comes down from there, for no call shall be refused for want of knowledge. And where nothing is taken
for `t` seconds it comes down to `2 * running / t`, so that slots which are all stuck are found out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NoReturn

from gateway.metrics import Metrics
from sandbox.errors import Overloaded
from sandbox.queue import Pulse, StreamPulse

#: The shortest memory of a pace: long against the time between two pulses, short against a caller's patience.
MEMORY_S = 5.0
#: A pace that was not seen for so long counts as unknown: workers come and go meanwhile.
FORGET_S = 60.0
#: Pulses that are further apart have a silence of Redis between them, in which nobody could take anything.
SILENCE_S = 2.5
#: Nobody is sent away for longer, however long the wait: what is known is too little to look further.
LONGEST_RETRY_S = 60.0
#: Redis counts as full from this share of its bound on; what is left is for the results of calls that it has.
FULL = 0.85
#: And until it is below this again, or we would open and close with every call that ends.
ROOMY = 0.80


class Pressure:
    """How full the queue is, as the last pulse and our own puts tell."""

    def __init__(
        self, max_backlog: int, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`max_backlog` bounds the calls of one priority that wait in Redis; `clock` is in seconds."""
        #: Whether Redis is so full that it should get no more calls.
        self.is_full = False
        self._max_backlog = max_backlog
        self._metrics = metrics
        self._clock = clock
        self._heard_at = clock()
        self._run_id = ""
        self._lanes = {"tool": _Lane(), "judge": _Lane()}

    def note(self, pulse: Pulse, slots: int) -> None:
        """Learn from a pulse, as soon as it has come. `slots` are how many calls the live workers run at a time."""
        now = self._clock()
        if pulse.run_id != self._run_id:
            self._run_id = pulse.run_id
            self._lanes = {priority: _Lane() for priority in self._lanes}
        for priority, lane in self._lanes.items():
            lane.note(pulse.streams[priority], slots, now - self._heard_at)
        self._heard_at = now
        bound = ROOMY if self.is_full else FULL
        self.is_full = 0 < pulse.max_bytes * bound <= pulse.used_bytes
        self._show(pulse)

    def note_put(self, priority: str, calls: int) -> None:
        """Count calls of ours that have just been put."""
        self._lanes[priority].waiting += calls

    def wait_s(self, priority: str, ahead: int = 0) -> float | None:
        """Seconds until a call that comes now would be taken; None when nobody knows.

        `ahead` are calls that this gateway would put before it.
        """
        lane = self._lanes[priority]
        calls = lane.waiting + ahead
        if calls == 0:
            return 0.0
        if lane.seconds_per_call is None:
            return None
        # As much of the backlog has gone since the pulse as goes in that time.
        return max(0.0, calls * lane.seconds_per_call - (self._clock() - self._heard_at))

    def check(self, priority: str, deadline_s: float, ahead: int = 0) -> None:
        """Raise Overloaded for a call that would not be taken before its deadline, or for which there is no room.

        Its `retry_after_s` is when the wait would fit into the same deadline, if nobody else came.
        """
        lane = self._lanes[priority]
        calls = lane.waiting
        # Nearly every call ends here, in few steps.
        if calls < self._max_backlog and (calls + ahead) * (lane.seconds_per_call or 0.0) < deadline_s:
            return
        wait_s = self.wait_s(priority, ahead)
        if wait_s is not None and wait_s >= deadline_s:
            how_long = "without end" if wait_s == math.inf else f"about {wait_s:.0f} s"
            self._refuse(
                "late", f"it would wait {how_long}, and is due in {deadline_s:g} s", wait_s - deadline_s
            )
        if calls >= self._max_backlog:
            too_many = calls - self._max_backlog + 1
            self._refuse(
                "backlog", f"{calls} calls wait, and no more may", too_many * (lane.seconds_per_call or 0.0)
            )

    def _refuse(self, reason: str, why: str, retry_after_s: float) -> NoReturn:
        self._metrics.shed.labels(reason).inc()
        raise Overloaded(why, retry_after_s=math.ceil(min(max(retry_after_s, 1.0), LONGEST_RETRY_S)))

    def _show(self, pulse: Pulse) -> None:
        for priority, stream in pulse.streams.items():
            wait_s = self.wait_s(priority)
            self._metrics.estimated_wait.labels(priority).set(math.nan if wait_s is None else wait_s)
            self._metrics.waiting.labels(priority).set(stream.waiting)
            self._metrics.running.labels(priority).set(stream.running)
        self._metrics.redis_used.set(pulse.used_bytes)
        self._metrics.redis_max.set(pulse.max_bytes)


class _Lane:
    """The stream of one priority, and the pace at which workers take from it."""

    __slots__ = ("_last", "_learned_s", "_pace", "_unseen_s", "seconds_per_call", "waiting")

    def __init__(self) -> None:
        self.waiting = 0  # at the last pulse, and what we have put since
        self.seconds_per_call: float | None = None  # one over the pace; None while that is unknown
        self._last: StreamPulse | None = None
        self._pace = 0.0  # calls a second
        self._learned_s = 0.0  # how long calls have waited while we watched
        self._unseen_s = 0.0  # how long none have since then

    def note(self, now: StreamPulse, slots: int, elapsed_s: float) -> None:
        """Learn where the stream stands, so long after the last time."""
        last, self._last = self._last, now
        self.waiting = now.waiting
        if last is None or last.taken_total is None or now.taken_total is None or elapsed_s > SILENCE_S:
            return
        taken = now.taken_total - last.taken_total
        # Where the stream was empty for a part of the time, workers could have taken more, and not less.
        if (last.waiting and now.waiting) or (self._learned_s and taken > self._pace * elapsed_s):
            self._learn(taken, now.running, slots, elapsed_s)
        else:
            self._unseen_s += elapsed_s
            if self._unseen_s > FORGET_S:
                self._learned_s, self.seconds_per_call = 0.0, None

    def _learn(self, taken: int, running: int, slots: int, elapsed_s: float) -> None:
        self._unseen_s = 0.0
        self._learned_s += elapsed_s
        if self.seconds_per_call is None:
            self._pace = (taken + max(slots, running)) / elapsed_s
        else:
            two_calls_s = 2 * running / self._pace if self._pace else math.inf
            memory_s = min(self._learned_s, max(MEMORY_S, two_calls_s))
            self._pace += (taken / elapsed_s - self._pace) * elapsed_s / memory_s
        self.seconds_per_call = 1 / self._pace if self._pace else math.inf
