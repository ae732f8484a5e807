"""How a gateway starts, meets trouble, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from gateway.gateway import Gateway
from sandbox.errors import ConfigError, Unavailable
from sandbox.queue import QueuedCall
from sandbox.settings import Settings

from .conftest import serving, until, working
from .fake_queue import FakeQueue


async def test_a_gateway_starts_without_redis() -> None:
    """It answers 503 and is alive while there is no Redis, and serves as soon as there is one."""
    queue = FakeQueue()
    queue.away = True
    async with serving(Settings(), queue) as (gateway, http):
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 503
        refused = await http.post("/v1/run", json={"code": "echo"})
        assert refused.status_code == 503
        assert "Redis is away" in refused.json()["error"]["message"]
        status = (await http.get("/v1/status")).json()
        assert (status["ready"], status["backlog"], status["workers"]) == (False, None, [])
        queue.away = False
        async with working(queue):
            await until(lambda: gateway.readiness.obstacle() is None)
            assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 200


async def test_redis_goes_and_comes_back() -> None:
    """While Redis is away calls are answered 503, in a batch in their place; afterwards all is as before."""
    queue = FakeQueue()
    async with working(queue) as worker, serving(Settings(), queue) as (gateway, http):
        await until(lambda: gateway.readiness.obstacle() is None)
        queue.put = _away  # type: ignore[method-assign]
        refused = await http.post("/v1/run", json={"code": "echo"})
        assert (refused.status_code, refused.json()["error"]["name"]) == (503, "Unavailable")
        batch = await http.post("/v1/batch", json={"calls": [{"code": "echo"}]})
        assert batch.json()["results"][0]["error"]["name"] == "Unavailable"
        del queue.put  # type: ignore[attr-defined]
        queue.pulse = _away  # type: ignore[method-assign]
        await until(lambda: gateway.readiness.obstacle() is not None)
        assert (await http.get("/readyz")).status_code == 503
        del queue.pulse  # type: ignore[attr-defined]
        await until(lambda: gateway.readiness.obstacle() is None)
        assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 200
        assert len(worker.seen) == 1


async def _away(*_: Any) -> None:
    raise Unavailable("Redis does not serve us")


async def test_a_loop_that_fails_answers_everybody() -> None:
    """A bug in one loop ends all of them, answers the open calls, and says that the process must end."""
    queue = FakeQueue()

    async def broken(calls: Sequence[QueuedCall]) -> None:
        raise ZeroDivisionError

    async with working(queue), serving(Settings(), queue) as (gateway, http):
        await until(lambda: gateway.readiness.obstacle() is None)
        queue.put = broken  # type: ignore[method-assign]
        answer = await http.post("/v1/run", json={"code": "echo"})
        assert (answer.status_code, answer.json()["error"]["name"]) == (503, "Unavailable")
        await gateway.crashed.wait()
        assert gateway.crash is not None
        assert (await http.get("/readyz")).status_code == 503


async def test_a_redis_that_will_never_do_ends_the_start() -> None:
    """A ConfigError of the queue is no reason to wait: it ends the gateway."""
    queue = FakeQueue()

    async def too_old() -> None:
        raise ConfigError("Redis 6.2 is too old")

    queue.open = too_old  # type: ignore[method-assign]
    gateway = Gateway(Settings(), queue)
    async with gateway.running():
        await gateway.crashed.wait()
    assert isinstance(gateway.crash, ConfigError)


async def test_the_queue_is_closed_last() -> None:
    """After the lifespan the queue is closed and no task of the gateway is left."""
    queue = FakeQueue()
    before = asyncio.all_tasks()
    async with serving(Settings(), queue):
        await until(lambda: queue.is_open)
    assert not queue.is_open
    assert asyncio.all_tasks() == before
