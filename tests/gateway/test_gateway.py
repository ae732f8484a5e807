"""How a gateway starts, meets trouble, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic

import httpx
import pytest

from gateway.gateway import Gateway
from sandbox.errors import ConfigError
from sandbox.queue import CallQueue, QueuedCall
from sandbox.settings import RedisSettings, Settings
from tests.conftest import RunningRedis

from .conftest import Serve, Service, bench, opened, serving, until, working

#: A few times the second within which a caller shall know that its call was not taken.
SOON_S = 3.0


async def run(service: Service, **call: object) -> httpx.Response:
    return await service.http.post("/v1/run", json=call)


async def test_a_gateway_starts_without_redis(any_redis: RunningRedis) -> None:
    """It answers 503 and is alive while there is no Redis, and serves as soon as there is one."""
    any_redis.kill()
    async with serving(Settings(), CallQueue(any_redis.settings)) as (gateway, http):
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        refused = await http.post("/v1/run", json={"code": "echo"})
        assert refused.status_code == 503
        assert "Redis is away" in refused.json()["error"]["message"]
        status = (await http.get("/v1/status")).json()
        assert (status["ready"], status["backlog"], status["workers"]) == (False, None, [])
        await any_redis.start()
        async with working(CallQueue(any_redis.settings)):
            await until(lambda: gateway.readiness.obstacle() is None)
            assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 200


async def test_redis_goes_and_comes_back(any_redis: RunningRedis) -> None:
    """While Redis is away calls are answered 503, in a batch in their place; afterwards all is as before."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        held = asyncio.create_task(service.http.post("/v1/batch", json={"calls": [{"code": "hold"}] * 2}))
        await service.worker.has_seen(2)
        any_redis.kill()
        refused = await run(service, code="echo")
        assert (refused.status_code, refused.json()["error"]["name"]) == (503, "Unavailable")
        await until(lambda: service.gateway.readiness.obstacle() is not None)
        assert (await service.http.get("/readyz")).status_code == 503
        await any_redis.start()
        await until(lambda: service.gateway.readiness.obstacle() is None)
        assert (await run(service, code="echo")).status_code == 200
        held.cancel()
        await asyncio.wait({held})


async def test_a_put_that_finds_no_redis_is_answered_soon(any_redis: RunningRedis) -> None:
    """While Redis hangs, all calls that wait to be queued are answered 503, in a batch in their place.

    Redis may have taken them all the same; when it is back they are cancelled, and no worker gets them.
    """
    async with bench(any_redis.settings) as serve, opened(any_redis.settings) as queue:
        service = await serve()
        await service.worker.rest()
        any_redis.freeze()
        begun = monotonic()
        calls = [{"id": str(number), "code": "echo"} for number in range(3)]
        single = asyncio.create_task(run(service, id="single", code="echo"))
        batch = asyncio.create_task(service.http.post("/v1/batch", json={"calls": calls}))
        refused = await single
        assert (refused.status_code, refused.json()["error"]["name"]) == (503, "Unavailable")
        assert refused.headers["retry-after"] == "1"
        assert [item["error"]["name"] for item in (await batch).json()["results"]] == ["Unavailable"] * 3
        assert monotonic() - begun < SOON_S
        any_redis.thaw()
        record = queue.record("", "single")
        with any_redis.client() as client:
            await until(lambda: client.hget(record, "cancelled"))
        await until(lambda: service.gateway.readiness.obstacle() is None)
        async with working(queue) as worker:
            assert (await run(service, id="later", code="echo")).status_code == 200
            assert [delivery.call.id for delivery in worker.seen] == ["later"]


async def test_a_full_redis_refuses_calls_and_takes_results(any_redis: RunningRedis) -> None:
    """Without memory for a call its caller gets 503, and calls under way are answered."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        held = asyncio.create_task(run(service, code="hold"))
        await service.worker.has_seen(1)
        with any_redis.client() as client:
            client.config_set("maxmemory", 1)
            refused = await run(service, code="echo")
            assert (refused.status_code, refused.json()["error"]["name"]) == (503, "Unavailable")
            service.worker.released.set()
            assert (await held).status_code == 200
            client.config_set("maxmemory", 0)


async def test_calls_are_put_again_into_a_redis_that_has_started_anew(any_redis: RunningRedis) -> None:
    """Who waits when Redis loses everything waits on, and gets the right answer from the new one."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        held = asyncio.create_task(run(service, id="a", code="hold"))
        await service.worker.has_seen(1)
        await until(lambda: all(waiting.is_put for waiting in service.gateway.replies))
        any_redis.kill()
        await any_redis.start()
        await service.worker.has_seen(2)
        service.worker.released.set()
        answer = await held
        assert (answer.status_code, answer.json()["id"]) == (200, "a")
        assert len(service.gateway.replies) == 0


async def test_putting_again_is_harmless(serve: Serve) -> None:
    """What the server still knows runs once, and what it has settled meanwhile is answered by that."""
    service = await serve()
    held = asyncio.create_task(run(service, id="a", code="hold"))
    await service.worker.has_seen(1)
    service.gateway._put_again()
    assert (await run(service, code="release")).status_code == 200
    assert (await held).json()["id"] == "a"
    assert len(service.worker.seen) == 2


@pytest.mark.parametrize("path", ["/v1/run", "/v1/jobs"])
async def test_a_loop_that_fails_answers_everybody(serve: Serve, path: str) -> None:
    """A bug in one loop ends all of them, answers the open calls, and says that the process must end."""
    service = await serve()

    async def broken(gateway: str, calls: Sequence[QueuedCall]) -> None:
        raise ZeroDivisionError

    service.gateway.queue.put = broken  # type: ignore[method-assign, assignment]
    answer = await service.http.post(path, json={"code": "echo"})
    assert (answer.status_code, answer.json()["error"]["name"]) == (503, "Unavailable")
    await service.gateway.crashed.wait()
    assert service.gateway.crash is not None
    assert (await service.http.get("/readyz")).status_code == 503


async def test_a_redis_that_will_never_do_ends_the_start(any_redis: RunningRedis) -> None:
    """A ConfigError of the queue is no reason to wait: it ends the gateway."""
    url = any_redis.settings.url.replace("unix://", "unix://nobody:wrong@")
    gateway = Gateway(Settings(), CallQueue(RedisSettings(url=url)))
    async with gateway.running():
        await gateway.crashed.wait()
    assert isinstance(gateway.crash, ConfigError)


async def test_the_queue_is_closed_last(any_redis: RunningRedis) -> None:
    """After the lifespan no connection and no task of the gateway is left."""
    before = asyncio.all_tasks()
    async with serving(Settings(), CallQueue(any_redis.settings)) as (gateway, _):
        await until(lambda: "worker" in str(gateway.readiness.obstacle()))
    with any_redis.client() as client:
        assert len(client.client_list()) == 1
    assert asyncio.all_tasks() == before
