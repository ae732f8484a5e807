"""How the loops of this process learn that they shall end."""

from __future__ import annotations

import asyncio


async def told_within(stop: asyncio.Event, seconds: float) -> bool:
    """Wait until `stop` is set, at most for `seconds`; say whether it is."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return False
    return True
