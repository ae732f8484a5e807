"""The stand-in for a worker, on a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from loadtest.standin import NAME, PRINTED, StandIn
from sandbox._redis import MAX_BLOCK_S
from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.queue import CallQueue, Delivery, Pulse, QueuedCall
from sandbox.settings import RedisSettings
from tests.conftest import RunningRedis

GATEWAY = "gw"


class WatchedQueue(CallQueue):
    """A queue that tells what its stand-in does: how often it looks how many wait, and how many calls it takes."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._looks = 0
        self._reads = 0
        self._taken = 0
        self._news = asyncio.Condition()

    async def pulse(self) -> Pulse:
        pulse = await super().pulse()
        async with self._news:
            self._looks += 1
            self._news.notify_all()
        return pulse

    async def take(self, consumer: str, count: int, block_s: float = MAX_BLOCK_S) -> list[Delivery]:
        async with self._news:
            self._reads += 1
            self._news.notify_all()
        taken = await super().take(consumer, count, block_s)
        async with self._news:
            self._taken += len(taken)
            self._news.notify_all()
        return taken

    async def looked_again(self) -> None:
        """Wait for two further looks, of which the second has begun after this."""
        async with self._news:
            enough = self._looks + 2
            await self._news.wait_for(lambda: self._looks >= enough)

    async def reads(self) -> None:
        """Wait until it is about to read for the first time."""
        async with self._news:
            await self._news.wait_for(lambda: self._reads > 0)

    async def has_taken(self, count: int) -> None:
        """Wait until so many calls are taken."""
        async with self._news:
            await self._news.wait_for(lambda: self._taken >= count)


@asynccontextmanager
async def opened(redis: RunningRedis) -> AsyncIterator[CallQueue]:
    """A queue as a gateway has it."""
    queue = CallQueue(redis.settings)
    await queue.open()
    try:
        yield queue
    finally:
        await queue.close()


@asynccontextmanager
async def standing_in(
    redis: RunningRedis, hold_s: float = 0.0, after: int = 0
) -> AsyncIterator[tuple[StandIn, WatchedQueue]]:
    """A stand-in, and its queue, that serves for the length of the block and ends in good order then."""
    queue = WatchedQueue(redis.settings)
    standin = StandIn(queue, hold_s, after)
    async with asyncio.TaskGroup() as group:
        group.create_task(standin.run())
        try:
            yield standin, queue
        finally:
            standin.stop()
    await queue.close()


async def put(queue: CallQueue, count: int) -> list[str]:
    """Queue so many calls and return their ids."""
    calls = [ToolCall(code="pass") for _ in range(count)]
    now_ms = queue.now_ms()
    await queue.put(
        GATEWAY,
        [QueuedCall(call, queue.record("", call.id), now_ms, now_ms + 60_000) for call in calls],
    )
    return [call.id for call in calls]


async def answers(queue: CallQueue, count: int) -> list[ToolResult]:
    """Read so many replies."""
    read: list[ToolResult] = []
    while len(read) < count:
        read += [ToolResult.model_validate_json(raw) for _, raw in await queue.replies(GATEWAY)]
    return read


async def test_every_call_is_answered_once_by_a_stand_in(any_redis: RunningRedis) -> None:
    """More calls than one round trip takes have one answer each, and all say who gave it."""
    async with opened(any_redis) as queue:
        async with standing_in(any_redis):
            ids = await put(queue, 1000)
            results = await answers(queue, 1000)
        assert await queue.replies(GATEWAY, 0) == []
        backlog = await queue.backlog()
    assert sorted(result.id for result in results) == sorted(ids)
    assert {(result.status, result.stdout) for result in results} == {(CallStatus.OK, PRINTED)}
    assert all(result.worker.startswith(NAME) for result in results)
    assert (backlog.waiting, backlog.running) == (0, 0)


async def test_the_list_of_workers_says_that_it_is_none(any_redis: RunningRedis) -> None:
    """Whoever looks at the workers reads that there is no jail; at its end it leaves the list."""
    async with opened(any_redis) as queue:
        async with standing_in(any_redis):
            await put(queue, 1)
            await answers(queue, 1)
            [info] = await queue.workers()
        assert await queue.workers() == []
    assert info.id.startswith(NAME)
    assert info.level == f"none ({NAME})"


async def test_it_begins_only_when_so_many_wait(any_redis: RunningRedis) -> None:
    """With one call less than it waits for it takes nothing; with that one it answers all."""
    async with opened(any_redis) as queue, standing_in(any_redis, after=3) as (_, its_queue):
        await put(queue, 2)
        await its_queue.looked_again()
        backlog = await queue.backlog()
        assert (backlog.waiting, backlog.running) == (2, 0)
        await put(queue, 1)
        assert len(await answers(queue, 3)) == 3


async def test_all_begin_though_the_first_to_see_it_takes_the_calls(any_redis: RunningRedis) -> None:
    """Two that wait for as many calls begin both, so that one can go on alone when the other has ended."""
    async with opened(any_redis) as queue, standing_in(any_redis, after=2):
        async with standing_in(any_redis, after=2):
            await put(queue, 2)
            await answers(queue, 2)
        await put(queue, 1)
        assert len(await answers(queue, 1)) == 1


async def test_what_it_holds_is_answered_as_it_ends(any_redis: RunningRedis) -> None:
    """Asked to stop while it holds calls for very long, it answers each, and at once."""
    async with opened(any_redis) as queue:
        async with standing_in(any_redis, hold_s=3600) as (_, its_queue):
            await put(queue, 5)
            await its_queue.has_taken(5)
        assert len(await answers(queue, 5)) == 5


async def test_what_is_on_its_way_to_it_is_answered_as_it_ends(any_redis: RunningRedis) -> None:
    """A call that comes by the read in which it was when it was asked to stop is not left behind."""
    async with opened(any_redis) as queue:
        async with standing_in(any_redis) as (standin, its_queue):
            await its_queue.reads()
            standin.stop()
            await put(queue, 1)
        assert len(await answers(queue, 1)) == 1
