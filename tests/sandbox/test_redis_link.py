"""Connections that end under those who use them, as they all do when Redis is found to be no master any more."""

from __future__ import annotations

import asyncio
import time

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


async def test_an_answer_that_is_here_is_not_too_late_because_we_are(any_redis: RunningRedis) -> None:
    """A loop that lags by more than a command may take reads the answer that came in time."""
    link = RedisLink(any_redis.settings.url, command_timeout_s=0.05)
    await link.send(("PING",))
    lagging = asyncio.create_task(_lag(turns=10, turn_s=0.1))
    assert await link.send(("PING",)) == [b"PONG"]
    await lagging
    await link.close()


async def test_a_redis_that_hangs_is_noticed_in_time_by_a_loop_that_does_not_lag(
    any_redis: RunningRedis,
) -> None:
    """What has no answer within its time is Unavailable, and the time is not stretched where there is nothing to read."""
    link = RedisLink(any_redis.settings.url, command_timeout_s=0.2)
    await link.send(("PING",))
    any_redis.freeze()
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(link.send(("PING",)), timeout=10)
    assert loop.time() - started >= 0.2
    any_redis.thaw()
    await link.close()


async def _lag(turns: int, turn_s: float) -> None:
    """Keep the loop from everything else for so long, at each of so many turns."""
    for _ in range(turns):
        await asyncio.sleep(0)
        time.sleep(turn_s)  # noqa: ASYNC251 - what a starved process does to its loop
