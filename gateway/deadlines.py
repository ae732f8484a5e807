"""The deadlines of many calls, kept by few timers.

Nearly every call is answered long before its deadline, and a timer of its own would cost 2 µs of CPU, made and
cancelled for nothing. So calls whose deadlines fall into the same tick share a timer, which rings at the tick's end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

#: A deadline rings so late at most. A late call has two, and must be answered within a second.
TICK_S = 0.01

T = TypeVar("T", bound=Hashable)


class _Tick(NamedTuple, Generic[T]):
    due: dict[T, None]
    timer: asyncio.TimerHandle


class Deadlines(Generic[T]):
    """What is due, and when; by `time.monotonic`."""

    def __init__(self, ring: Callable[[T], None]) -> None:
        """`ring` hears of each thing whose deadline has passed, once, and may take away others meanwhile."""
        self._ring = ring
        self._ticks: dict[int, _Tick[T]] = {}

    def add(self, thing: T, due_s: float) -> None:
        """Ring for it at that time, or up to a tick later."""
        number = int(due_s / TICK_S) + 1
        tick = self._ticks.get(number)
        if tick is None:
            after_s = number * TICK_S - time.monotonic()
            timer = asyncio.get_running_loop().call_later(after_s, self._ring_all, number)
            tick = self._ticks[number] = _Tick({}, timer)
        tick.due[thing] = None

    def remove(self, thing: T, due_s: float) -> None:
        """Do not ring for it, which was added with that time. It may have rung."""
        number = int(due_s / TICK_S) + 1
        tick = self._ticks.get(number)
        if tick is not None:
            tick.due.pop(thing, None)
            if not tick.due:
                tick.timer.cancel()
                del self._ticks[number]

    def _ring_all(self, number: int) -> None:
        tick = self._ticks[number]
        while tick.due:
            thing, _ = tick.due.popitem()
            self._ring(thing)
        if self._ticks.get(number) is tick:
            del self._ticks[number]
