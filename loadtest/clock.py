"""A clock that wakes a task at a moment, far more exactly than an event loop's own timers do.

Those count whole milliseconds, so a call would be sent half a millisecond late on average, a tenth of the latency of
a `print(1)`. A timer of the kernel that is a descriptor (timerfd_create(2)) wakes the loop when it is due.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from typing import Protocol, Self

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK and TFD_CLOEXEC are these
_NS = 1_000_000_000


class Clock(Protocol):
    """What an open loop needs of time."""

    def now(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    async def sleep_until(self, when_s: float) -> None:
        """Wait until `now()` is at least that; not at all where it is already."""
        ...


class _Spec(ctypes.Structure):
    """`struct itimerspec`: no interval, and when it is due."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("s", ctypes.c_long),
        ("ns", ctypes.c_long),
    )


class KernelClock:
    """The monotonic clock, with one timer: one task at a time may sleep by it. Use it in a `with`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._checked(self._libc.timerfd_create(time.CLOCK_MONOTONIC, _FLAGS))

    def __enter__(self) -> Self:
        """It is ready."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Let go of the timer."""
        os.close(self._timer)

    def now(self) -> float:
        """See `Clock`."""
        return time.clock_gettime(time.CLOCK_MONOTONIC)

    async def sleep_until(self, when_s: float) -> None:
        """See `Clock`."""
        if when_s <= self.now():
            return
        loop = asyncio.get_running_loop()
        due: asyncio.Future[None] = loop.create_future()
        seconds, nanoseconds = divmod(round(when_s * _NS), _NS)
        spec = _Spec(0, 0, seconds, nanoseconds)
        self._checked(self._libc.timerfd_settime(self._timer, _ABSOLUTE, ctypes.byref(spec), None))
        loop.add_reader(self._timer, _ring, due)
        try:
            await due
        finally:
            loop.remove_reader(self._timer)

    @staticmethod
    def _checked(answer: int) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return answer


def _ring(due: asyncio.Future[None]) -> None:
    if not due.done():
        due.set_result(None)
