"""What the long-running programs share: how their loops learn that it is time, and what each may open."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable


async def told_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, at most for `seconds`; say whether it is."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


class LateTimer:
    """Calls a function when some time has passed and the loop has made some more turns, unless it is cancelled.

    In a process that gets no CPU time, what it waits for may be here for long, and only the process has not read it.
    The turns are there for that. In a loop that does not lag they take less than a millisecond.
    """

    __slots__ = ("_callback", "_handle", "_loop")

    def __init__(self, seconds: float, turns: int, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.Handle = self._loop.call_later(seconds, self._turn, turns)

    def cancel(self) -> None:
        """Do not call it, if that has not been done yet."""
        self._handle.cancel()

    def _turn(self, left: int) -> None:
        if left:
            self._handle = self._loop.call_soon(self._turn, left - 1)
        else:
            self._callback()


def use_all_descriptors() -> None:
    """Raise the soft limit on open files to the hard one: common systems start programs with 1,024.

    Each connection, and each slot of a worker, takes a few. Jailed programs have a limit of their own.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
