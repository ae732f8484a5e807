"""The same call sent more than once: at once, to two gateways, or after its result."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gateway.tenants import ANONYMOUS
from sandbox.calls import ToolCall
from sandbox.errors import InvalidCall
from sandbox.queue import CallQueue
from sandbox.settings import RedisSettings
from tests.conftest import RunningRedis

from .conftest import Serve, Service, bench, opened, until


async def run(service: Service, **call: Any) -> httpx.Response:
    return await service.http.post("/v1/run", json=call)


async def waiters(queue: CallQueue, call_id: str) -> list[str]:
    """The gateways that wait for a call, as its record says."""
    (found,) = await queue._link.send(("HGET", queue.record("", call_id), "waiters"))
    return found.decode().split() if found else []


async def test_two_requests_share_one_run(serve: Serve) -> None:
    """A caller that lost its connection may send its call again while it runs; it runs once."""
    service = await serve()
    first = asyncio.create_task(run(service, id="a", code="hold"))
    await service.worker.has_seen(1)
    second = asyncio.create_task(run(service, id="a", code="hold"))
    await until(lambda: service.gateway.admission.held == 2)
    service.worker.released.set()
    assert (await first).content == (await second).content
    assert (await first).status_code == 200
    assert len(service.worker.seen) == 1


async def test_a_batch_may_hold_a_call_twice(serve: Serve) -> None:
    """Both places of a call that stands twice in a batch get the result of its one run."""
    service = await serve()
    calls = {"calls": [{"id": "a", "code": "echo 1"}] * 2}
    results = (await service.http.post("/v1/batch", json=calls)).json()["results"]
    assert [result["stdout"] for result in results] == ["1", "1"]
    assert len(service.worker.seen) == 1


async def test_two_gateways_share_one_run(serve: Serve, redis_of_test: RedisSettings) -> None:
    """A call that is sent again to another gateway joins the one that runs."""
    one, other = await serve(), await serve()
    first = asyncio.create_task(run(one, id="a", code="hold"))
    await one.worker.has_seen(1)
    second = asyncio.create_task(run(other, id="a", code="hold", deadline_s=30, priority="judge"))
    async with opened(redis_of_test) as queue:
        while len(await waiters(queue, "a")) < 2:
            pass
    one.worker.released.set()
    assert (await first).content == (await second).content
    assert (await first).status_code == 200
    assert len(one.worker.seen) == 1


async def test_a_result_is_kept_for_a_while(serve: Serve) -> None:
    """Who sends a call again after it ended gets its result, from any gateway, and it does not run again."""
    one, other = await serve(), await serve()
    answer = await run(one, id="a", code="echo 1")
    for service in (one, other):
        assert (await run(service, id="a", code="echo 1")).content == answer.content
    assert len(one.worker.seen) == 1


async def test_a_verdict_is_kept_and_a_fault_is_not(serve: Serve) -> None:
    """A program that failed has failed; what we failed to do is tried again."""
    service = await serve()
    for code, status, runs in (("fail", 200, 1), ("fault", 500, 2), ("late", 504, 2)):
        service.worker.seen.clear()
        for _ in range(2):
            assert (await run(service, id=code, code=code)).status_code == status
        assert len(service.worker.seen) == runs


@pytest.mark.parametrize("ended", [False, True])
async def test_an_id_means_one_call_in_the_whole_service(serve: Serve, ended: bool) -> None:
    """A different call under an id in use, or used a short time ago, is refused by every gateway."""
    one, other = await serve(), await serve()
    first = asyncio.create_task(run(one, id="a", code="hold"))
    await one.worker.has_seen(1)
    if ended:
        one.worker.released.set()
        await first
    for service in (one, other):
        refused = await run(service, id="a", code="echo")
        assert refused.status_code == 422
        assert refused.json()["error"]["message"].startswith("id: a names a different call")
    one.worker.released.set()
    assert (await first).status_code == 200
    assert len(one.worker.seen) == 1


async def test_a_changed_call_leaves_nothing_running(serve: Serve, redis_of_test: RedisSettings) -> None:
    """A caller that goes, and comes at once with another program under the id, is refused, and the first one ends."""
    service = await serve()
    gateway = service.gateway
    first = gateway.submit(ToolCall(id="a", code="hold"), ANONYMOUS)
    await service.worker.has_seen(1)
    gateway.leave(first)
    changed = gateway.submit(ToolCall(id="a", code="echo"), ANONYMOUS)
    assert isinstance(await changed.future, InvalidCall)
    async with opened(redis_of_test) as queue:
        assert await queue.orders("echo") == [service.worker.seen[0].place]


async def test_who_joins_with_less_time_is_answered_by_then(serve: Serve) -> None:
    """A caller that joins with an earlier deadline gets a fault at that, and the first one its result."""
    service = await serve()
    loop = asyncio.get_running_loop()
    first = asyncio.create_task(run(service, id="a", code="hold"))
    await service.worker.has_seen(1)
    began = loop.time()
    hasty = await run(service, id="a", code="hold", deadline_s=0.2)
    assert (hasty.status_code, hasty.json()["error"]["name"]) == (504, "QueueTimeout")
    assert loop.time() - began < 3
    also = asyncio.create_task(run(service, id="a", code="hold", deadline_s=30))
    await until(lambda: service.gateway.admission.held == 2)
    service.worker.released.set()
    assert (await first).status_code == (await also).status_code == 200
    assert len(service.worker.seen) == 1
    assert len(service.gateway.replies) == 0


async def test_a_kept_result_of_another_program(any_redis: RunningRedis) -> None:
    """A caller that goes while its call is put, and one with another program under the id: that one is refused."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        gateway = service.gateway
        call, changed = ToolCall(id="a", code="echo 1"), ToolCall(id="a", code="echo 2")
        first = gateway.submit(call, ANONYMOUS)
        await first.future
        gateway.leave(first)
        any_redis.freeze()
        again = gateway.submit(call, ANONYMOUS)
        await until(lambda: len(gateway.line) == 0)
        gateway.leave(again)
        other = gateway.submit(changed, ANONYMOUS)
        any_redis.thaw()
        assert isinstance(await other.future, InvalidCall)
        gateway.leave(other)


async def test_a_late_result_of_another_program(any_redis: RunningRedis) -> None:
    """What comes of a program that its caller has left is no answer for who sends another one under its id."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        gateway = service.gateway
        first = gateway.submit(ToolCall(id="a", code="hold"), ANONYMOUS)
        await service.worker.has_seen(1)
        any_redis.freeze()
        service.worker.released.set()
        await asyncio.sleep(0)
        gateway.leave(first)
        other = gateway.submit(ToolCall(id="a", code="echo"), ANONYMOUS)
        any_redis.thaw()
        assert isinstance(await other.future, InvalidCall)
        gateway.leave(other)
