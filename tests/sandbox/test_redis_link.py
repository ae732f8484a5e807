"""Connections that end under those who use them, as they all do when Redis is found to be no master any more."""

from __future__ import annotations

import asyncio

import pytest

from sandbox._redis import RedisLink
from sandbox.errors import Unavailable
from tests.conftest import RunningRedis


@pytest.mark.parametrize("is_new", [True, False])
async def test_a_connection_that_ends_in_use_is_unavailable(any_redis: RunningRedis, is_new: bool) -> None:
    """Wherever an exchange is when another task closes everything, it is answered or Unavailable, and the next one works."""
    link = RedisLink(any_redis.settings.url)
    for turns in range(40):
        if is_new:
            await link.close()
        else:
            await link.send(("PING",))
        sending = asyncio.create_task(link.send(("PING",)))
        for _ in range(turns):
            await asyncio.sleep(0)
        await link.close()
        [answer] = await asyncio.gather(sending, return_exceptions=True)
        assert answer == [b"PONG"] or isinstance(answer, Unavailable), repr(answer)
    await link.close()
