"""A call is answered within a second after its deadline, whatever has become of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import httpx
import pytest

from gateway.deadlines import TICK_S, Deadlines
from sandbox.calls import CallStatus, ToolResult
from sandbox.settings import RedisSettings
from tests.conftest import RunningRedis

from .conftest import Serve, Service, bench, opened, until

#: The service promises a second; this bound is for busy machines.
LATE_S = 3.0


async def run(service: Service, **call: Any) -> httpx.Response:
    return await service.http.post("/v1/run", json=call)


@asynccontextmanager
async def within(deadline_s: float) -> AsyncIterator[None]:
    """The block takes no longer than until the deadline, and no shorter."""
    begun = monotonic()
    yield
    assert deadline_s - 0.05 < monotonic() - begun < deadline_s + LATE_S


async def test_a_call_that_no_worker_takes(serve: Serve, redis_of_test: RedisSettings) -> None:
    """It is a queue_timeout, safe to send again, and no worker gets it afterwards."""
    service = await serve()
    await service.worker.rest()
    async with within(0.3):
        answer = await run(service, id="a", code="echo", deadline_s=0.3)
    assert (answer.status_code, answer.json()["error"]["name"]) == (504, "QueueTimeout")
    assert "no worker was free" in answer.json()["error"]["message"]
    async with opened(redis_of_test) as queue:
        assert await queue.take("other", 1, block_s=0) == []


async def test_a_call_whose_worker_is_silent(serve: Serve, redis_of_test: RedisSettings) -> None:
    """It may have run: an internal_error that names the worker, which is told to stop it."""
    service = await serve()
    async with within(0.3):
        answer = await run(service, code="lose", deadline_s=0.3)
    assert (answer.status_code, answer.json()["error"]["name"]) == (500, "InternalError")
    assert "the worker echo had it" in answer.json()["error"]["message"]
    async with opened(redis_of_test) as queue:
        (order,) = await queue.orders("echo")
    assert order == service.worker.seen[0].place


async def test_a_result_whose_reply_was_lost(serve: Serve, redis_of_test: RedisSettings) -> None:
    """The record has it: the caller gets the verdict, late but right."""
    service = await serve()
    held = asyncio.create_task(run(service, id="a", code="hold", deadline_s=0.5))
    await service.worker.has_seen(1)
    async with opened(redis_of_test) as queue:
        record = queue.record("", "a")
        # Nobody hears of the result.
        await queue._link.send(("HSET", record, "waiters", ""))
        service.worker.released.set()
        answer = await held
    assert answer.status_code == 200
    assert ToolResult.model_validate_json(answer.content).status is CallStatus.OK


async def test_a_call_that_redis_has_lost(serve: Serve, redis_of_test: RedisSettings) -> None:
    """Nobody knows whether it ran: an internal_error."""
    service = await serve()
    held = asyncio.create_task(run(service, id="a", code="lose", deadline_s=0.3))
    await service.worker.has_seen(1)
    async with opened(redis_of_test) as queue:
        await queue._link.send(("DEL", queue.record("", "a")))
    answer = await held
    assert (answer.status_code, answer.json()["error"]["name"]) == (500, "InternalError")
    assert "Redis had lost it" in answer.json()["error"]["message"]


async def test_a_redis_that_hangs_at_the_deadline(any_redis: RunningRedis) -> None:
    """Nobody waits for Redis: an internal_error within the second, in a batch in its place."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        calls = {"calls": [{"code": "lose", "deadline_s": 0.5}, {"code": "hold", "deadline_s": 0.6}]}
        async with within(0.5):
            batch = asyncio.create_task(service.http.post("/v1/batch", json=calls))
            await service.worker.has_seen(2)
            any_redis.freeze()
            answer = await batch
        any_redis.thaw()
    results = answer.json()["results"]
    assert [result["status"] for result in results] == ["internal_error"] * 2
    assert "does not tell why" in results[0]["reason"]


async def test_a_redis_that_is_gone_at_the_deadline(any_redis: RunningRedis) -> None:
    """An internal_error that says what is wrong."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        async with within(0.5):
            held = asyncio.create_task(run(service, code="lose", deadline_s=0.5))
            await service.worker.has_seen(1)
            await until(lambda: all(waiting.is_put for waiting in service.gateway.replies))
            any_redis.kill()
            answer = await held
        assert (answer.status_code, answer.json()["error"]["name"]) == (500, "InternalError")
        assert "Redis does not serve us" in answer.json()["error"]["message"]
        await any_redis.start()


@pytest.mark.parametrize(
    ("header_ms", "call", "deadline_ms"),
    [
        (2500, {}, 2500),  # none is named
        (2500, {"deadline_s": 1.5}, 1500),  # a shorter one is
        (2500, {"deadline_s": 100}, 2500),  # a longer one is
        (3_600_000, {}, 3_600_000),  # at the ceiling
    ],
)
@pytest.mark.parametrize("path", ["/v1/run", "/v1/batch", "/v1/jobs"])
async def test_a_request_may_say_how_long_its_caller_waits(
    serve: Serve, path: str, header_ms: int, call: dict[str, Any], deadline_ms: int
) -> None:
    """`x-deadline-ms` is the deadline of calls that name none, and a bound on the others."""
    service = await serve()
    body: dict[str, Any] = {"code": "echo", **call}
    if path == "/v1/batch":
        body = {"calls": [body]}
    answer = await service.http.post(path, json=body, headers={"x-deadline-ms": str(header_ms)})
    assert answer.status_code < 300
    await service.worker.has_seen(1)
    (seen,) = service.worker.seen
    assert seen.deadline_ms - seen.accepted_ms == deadline_ms


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "1" * 10, "3600001"])
@pytest.mark.parametrize("path", ["/v1/run", "/v1/batch", "/v1/jobs"])
async def test_a_header_that_is_no_deadline_is_refused(serve: Serve, path: str, value: str) -> None:
    """Neither garbage nor more than the ceiling is taken, whatever the request holds."""
    service = await serve()
    body: dict[str, Any] = {"calls": [{"code": "echo"}]} if path == "/v1/batch" else {"code": "echo"}
    answer = await service.http.post(path, json=body, headers={"x-deadline-ms": value})
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith("x-deadline-ms: ")
    assert service.worker.seen == []


async def test_a_header_lowers_no_ceiling(serve: Serve) -> None:
    """A call that names a deadline above the ceiling is refused for it, however short its caller waits."""
    answer = await (await serve()).http.post(
        "/v1/run", json={"code": "echo", "deadline_s": 3601}, headers={"x-deadline-ms": "1000"}
    )
    assert answer.status_code == 422
    assert answer.json()["error"]["message"].startswith("deadline_s: ")


async def test_deadlines_ring_once_and_never_early() -> None:
    """Those of different ticks ring in their order, and none before its time."""
    rung: asyncio.Queue[tuple[str, float]] = asyncio.Queue()
    deadlines = Deadlines[str](lambda name: rung.put_nowait((name, monotonic())))
    begun = monotonic()
    deadlines.add("second", begun + 3 * TICK_S)
    deadlines.add("first", begun + TICK_S)
    for name, after_s in (("first", TICK_S), ("second", 3 * TICK_S)):
        rung_name, at = await rung.get()
        assert (rung_name, at >= begun + after_s) == (name, True)
    assert rung.empty()


async def test_what_is_taken_away_does_not_ring() -> None:
    """Neither what was taken away before, nor what one that rings in the same tick takes away."""
    due_s = monotonic() + TICK_S
    rung: list[str] = []
    ended = asyncio.Event()

    def ring(name: str) -> None:
        rung.append(name)
        for other in {"a", "b", "c"} - {name}:
            deadlines.remove(other, due_s)

    deadlines = Deadlines[str](ring)
    for name in ("a", "b", "c"):
        deadlines.add(name, due_s)
    deadlines.remove("a", due_s)
    after = Deadlines[str](lambda _: ended.set())
    after.add("end", due_s + TICK_S)
    await ended.wait()
    assert len(rung) == 1
    assert rung[0] in {"b", "c"}


async def test_what_rings_may_be_added_again() -> None:
    """A call that is asked after at its deadline has a second one."""
    rung: asyncio.Queue[str] = asyncio.Queue()

    def ring(name: str) -> None:
        rung.put_nowait(name)
        if name == "once":
            deadlines.add("again", monotonic())

    deadlines = Deadlines[str](ring)
    deadlines.add("once", monotonic())
    assert [await rung.get(), await rung.get()] == ["once", "again"]
