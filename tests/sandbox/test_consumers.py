"""Who stays in the consumer group: Redis forgets no consumer by itself, and what it forgets takes its calls along."""

from __future__ import annotations

import asyncio

from sandbox.calls import ToolCall
from sandbox.keys import GROUP, Keys
from sandbox.queue import Backlog, CallQueue, Outcome, QueuedCall
from tests.sandbox.jail.box import until

TOOL = Keys("test").calls("tool")


async def put(queue: CallQueue, call_id: str) -> None:
    """Queue one call."""
    now_ms = queue.now_ms()
    call = ToolCall(id=call_id, code="")
    await queue.put("gateway", [QueuedCall(call, queue.record("", call_id), now_ms, now_ms + 60_000)])


async def serve_one(queue: CallQueue, worker: str) -> None:
    """Have a worker take a call and settle it, so that Redis knows it."""
    await put(queue, "served")
    [delivery] = await queue.take(worker, 1)
    assert await queue.settle([Outcome(delivery, None)]) == [True]


def consumers(redis_server, stream: str) -> set[str]:
    """The names that the group knows."""
    with redis_server.client() as client:
        return {consumer["name"].decode() for consumer in client.xinfo_consumers(stream, GROUP)}


async def test_killed_workers_are_forgotten_and_what_they_hold_is_not(redis_server, queue) -> None:
    """A consumer without calls goes; one that still holds a call stays, and so does its call."""
    await serve_one(queue, "idle")
    await put(queue, "held")
    [held] = await queue.take("holds", 1)
    assert consumers(redis_server, TOOL) == {"idle", "holds"}
    await queue.forget_consumers(idle_s=0)
    assert consumers(redis_server, TOOL) == {"holds"}
    assert await queue.backlog() == Backlog(waiting=0, running=1, oldest_wait_s=0)
    assert await queue.renew("holds", [held]) == []


async def test_who_was_heard_of_lately_stays(redis_server, queue) -> None:
    """Only a long silence means that a worker is gone."""
    await serve_one(queue, "idle")
    await queue.forget_consumers()
    assert consumers(redis_server, TOOL) == {"idle"}


async def test_a_worker_that_was_wrongly_forgotten_loses_nothing(redis_server, queue) -> None:
    """Forgotten while its read waits, it still gets the next call, holds it and can renew it."""
    await serve_one(queue, "reads")
    reading = asyncio.create_task(queue.take("reads", 1))
    with redis_server.client() as client:
        await until(lambda: client.info("clients")["blocked_clients"] == 1)
    await queue.forget_consumers(idle_s=0)
    await put(queue, "next")
    taken = await reading
    assert [delivery.call.id for delivery in taken] == ["next"]
    assert consumers(redis_server, TOOL) == {"reads"}
    assert await queue.renew("reads", taken) == []
