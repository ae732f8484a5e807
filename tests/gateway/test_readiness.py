"""What readiness makes of the news of Redis and the workers, over real servers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway import readiness as readiness_module
from gateway.gateway import Gateway
from gateway.readiness import Obstacle
from sandbox.calls import ToolCall
from sandbox.errors import Unavailable
from sandbox.keys import Keys
from sandbox.queue import CallQueue, Pulse, QueuedCall
from sandbox.settings import RedisSettings, Settings

from .conftest import make_ready, opened, until
from .echo_worker import EchoWorker


class Watched(CallQueue):
    """A queue that counts the pulses it was asked for."""

    pulses = 0

    async def pulse(self) -> Pulse:
        self.pulses += 1
        return await super().pulse()


class Watch:
    """A gateway that looks after a real Redis."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.queue = Watched(server.settings)
        self.gateway = Gateway(Settings(redis=server.settings), self.queue)
        self.readiness = self.gateway.readiness

    @property
    def word(self) -> str:
        assert self.gateway.crash is None, repr(self.gateway.crash)
        obstacle = self.readiness.obstacle()
        return obstacle.word if obstacle else ""

    async def shows(self, word: str) -> None:
        """Wait until this obstacle is there; the empty word for none."""
        await until(lambda: self.word == word)

    async def put(self) -> None:
        """Put a call as the batcher does."""
        now_ms = self.queue.now_ms()
        call = QueuedCall(ToolCall(code="echo"), self.queue.record("", "echo"), now_ms, now_ms + 60_000)
        try:
            await self.queue.put("somebody", [call])
        except Unavailable as exc:
            self.readiness.lost(exc.message)

    async def asked_again(self) -> None:
        """Wait for two more pulses, at least one of which was asked for after now."""
        before = self.queue.pulses
        await until(lambda: self.queue.pulses >= before + 2)


@asynccontextmanager
async def watching(server: Any) -> AsyncIterator[Watch]:
    """A gateway on a Redis of its own, and the word of a worker, which takes nothing."""
    watch = Watch(server)
    async with watch.gateway.running():
        await watch.shows("no_worker")
        await watch.queue.announce(EchoWorker(watch.queue).info(), ttl_s=3600)
        await watch.shows("")
        yield watch


@pytest.fixture
async def watch(redis_server: Any) -> AsyncIterator[Watch]:
    """A gateway that serves, on each kind of Redis."""
    async with watching(redis_server) as watch:
        yield watch


def replica(client: Any, *, on: bool) -> None:
    """Make the server a replica of nobody that is there, as a failover does."""
    client.execute_command("REPLICAOF", *(("127.0.0.1", "1") if on else ("NO", "ONE")))


def forbidden(client: Any, *, on: bool) -> None:
    """Take the right to add to a stream from us."""
    client.execute_command("ACL", "SETUSER", "default", "-xadd" if on else "+xadd")


@pytest.mark.parametrize("refuse", [replica, forbidden])
async def test_only_a_put_proves_that_puts_work(watch: Watch, refuse: Any) -> None:
    """A Redis that answers questions and takes no calls is none, from the first failed put until it takes one."""
    with watch.server.client() as client:
        refuse(client, on=True)
        await watch.put()
        assert watch.word == "no_redis"
        for _ in range(3):
            await watch.asked_again()
            assert watch.word == "no_redis"
        refuse(client, on=False)
    await watch.shows("")


async def test_a_stream_that_is_none_is_no_redis(watch: Watch) -> None:
    """Where another kind of key has taken a stream's place, the pulse itself fails; nobody needs to put a call."""
    key = Keys(watch.server.settings.namespace).calls("judge")
    with watch.server.client() as client:
        client.delete(key)
        client.set(key, "no stream")
        await watch.shows("no_redis")
        client.delete(key)
    await watch.shows("")


async def test_a_full_redis_is_told_apart(watch: Watch) -> None:
    """Out of memory is `redis_full`, also right after a put that failed by it, and over when there is room."""
    with watch.server.client() as client:
        before = client.config_get("maxmemory")["maxmemory"]
        client.config_set("maxmemory", 1)
        await watch.put()
        await watch.shows("redis_full")
        await watch.asked_again()
        assert watch.word == "redis_full"
        client.config_set("maxmemory", before)
    await watch.shows("")


async def test_a_frozen_redis_shows_without_a_put(watch: Watch) -> None:
    """A server that hangs is away about a second later, though no question of ours has failed yet, and then is back."""
    loop = asyncio.get_running_loop()
    watch.server.freeze()
    frozen_at = loop.time()
    try:
        await watch.shows("no_redis")
        assert loop.time() - frozen_at < 3 * readiness_module.FRESH_S
    finally:
        watch.server.thaw()
    await watch.shows("")


async def test_a_new_server_is_told_once(watch: Watch) -> None:
    """After a restart whoever put calls hears of it, so that they can be put again."""
    told = []
    watch.readiness._on_new_server = lambda: told.append(watch.word)
    await watch.asked_again()
    watch.server.kill()
    await watch.shows("no_redis")
    await watch.server.start()
    await watch.shows("no_worker")
    await watch.asked_again()
    assert told == ["no_redis"]


async def test_a_late_call_is_run_by_nobody(watch: Watch) -> None:
    """What proves that puts work is past its deadline when it is put, cancelled at once, and one call."""
    watch.readiness.lost("a put failed")
    await watch.shows("")
    await watch.asked_again()
    assert (await watch.queue.backlog()).waiting == 1
    assert await watch.queue.take("w", 10, block_s=0) == []
    assert (await watch.queue.backlog()).running == 0


async def test_a_silent_redis_counts_as_away(
    redis_of_test: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When questions hang without an error, readiness ends once the last answer is too old."""
    monkeypatch.setattr(readiness_module, "FRESH_S", 0.0)
    async with opened(redis_of_test) as queue:
        readiness = await make_ready(queue)
        await until(lambda: readiness.obstacle() is not None)
    obstacle = readiness.obstacle()
    assert obstacle is not None
    assert "silent" in obstacle.sentence


async def test_a_lag_of_ours_is_no_silence_of_redis(redis_of_test: RedisSettings) -> None:
    """While the loop gets so little time that the news of one pulse take two seconds, Redis does not count as away."""
    async with opened(redis_of_test) as queue:
        readiness = await make_ready(queue)
        stop = asyncio.Event()
        asking = asyncio.create_task(readiness.run(stop))
        for _ in range(60):
            await asyncio.sleep(0)
            time.sleep(0.07)  # noqa: ASYNC251 - what a starved process does to its loop
            assert readiness.obstacle() is None
        stop.set()
        await asking


async def test_slots_are_those_of_workers_that_take_calls(redis_of_test: RedisSettings) -> None:
    """A draining worker's slots count no more, and without any other there is no worker."""
    async with opened(redis_of_test) as queue:
        readiness = await make_ready(queue)
        assert readiness.slots == 64
        worker = EchoWorker(queue)
        worker.draining = True
        await queue.announce(worker.info(), ttl_s=60)
        stop = asyncio.Event()
        stop.set()
        await readiness.run(stop)
    assert readiness.slots == 0
    assert readiness.obstacle() == Obstacle("no_worker", "no worker is alive")
