"""What the long-running programs share: how their loops learn that they shall end, and what each may open."""

from __future__ import annotations

import asyncio
import resource


async def told_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until the event is set, at most for `seconds`; say whether it is."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def use_all_descriptors() -> None:
    """Raise the soft limit on open files to the hard one: common systems start programs with 1,024.

    Each connection, and each slot of a worker, takes a few. Jailed programs have a limit of their own.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
