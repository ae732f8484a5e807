"""Callers that go away: real connections, closed in the middle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox.queue import CallQueue
from sandbox.settings import RedisSettings

from .conftest import Serve, Service, listening, opened, until, working

WAYS = pytest.mark.parametrize(
    ("path", "accept"),
    [
        ("/v1/run", "application/json"),
        ("/v1/batch", "application/json"),
        ("/v1/batch", "application/x-ndjson"),
    ],
)


@dataclass
class Caller:
    """One connection with one request on it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def answer(self) -> bytes:
        """All that comes until the service closes the connection."""
        return await self.reader.read()

    async def hang_up(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@dataclass
class Bench:
    service: Service
    queue: CallQueue
    address: tuple[str, int]

    async def call(self, path: str, accept: str, *calls: dict[str, Any]) -> Caller:
        """Send calls, the only one of a run or all of a batch."""
        reader, writer = await asyncio.open_connection(*self.address)
        body = json.dumps({"calls": calls} if path == "/v1/batch" else calls[0]).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\naccept: {accept}\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        return Caller(reader, writer)

    async def state(self, call_id: str) -> str:
        return (await self.queue.look(self.queue.record("", call_id))).state

    async def becomes(self, state: str, call_id: str) -> None:
        while await self.state(call_id) != state:
            pass

    @property
    def held(self) -> int:
        return self.service.gateway.admission.held


@pytest.fixture
async def bench(serve: Serve, redis_of_test: RedisSettings) -> AsyncIterator[Bench]:
    async with started(await serve(), redis_of_test) as bench:
        yield bench


@asynccontextmanager
async def started(service: Service, redis: RedisSettings) -> AsyncIterator[Bench]:
    async with listening(service) as address, opened(redis) as queue:
        yield Bench(service, queue, address)


@WAYS
async def test_a_call_that_waits_is_never_handed_out(
    bench: Bench, redis_of_test: RedisSettings, path: str, accept: str
) -> None:
    """No worker gets a call whose caller has gone before, and its place is free at once."""
    await bench.service.worker.rest()
    caller = await bench.call(path, accept, {"id": "a", "code": "echo"})
    await bench.becomes("waiting", "a")
    await caller.hang_up()
    await bench.becomes("unknown", "a")
    assert bench.held == 0
    async with working(CallQueue(redis_of_test)) as worker:
        later = await bench.call("/v1/run", "application/json", {"id": "b", "code": "echo"})
        assert b"200 OK" in await later.answer()
        await later.hang_up()
    assert [delivery.call.id for delivery in worker.seen] == ["b"]
    assert (await bench.queue.backlog()).running == 0


@WAYS
async def test_the_worker_of_a_call_that_runs_is_told(bench: Bench, path: str, accept: str) -> None:
    """The worker gets an order for the call of a caller that has gone, and for no other's."""
    other = await bench.call("/v1/run", "application/json", {"id": "b", "code": "hold"})
    await bench.service.worker.has_seen(1)
    caller = await bench.call(path, accept, {"id": "a", "code": "hold"})
    await bench.service.worker.has_seen(2)
    await caller.hang_up()
    assert await bench.queue.orders("echo") == [bench.service.worker.seen[1].place]
    assert await bench.state("b") == "running"
    assert bench.held == 1
    bench.service.worker.released.set()
    assert b'"id":"b","status":"ok"' in await other.answer()
    await other.hang_up()
    assert bench.service.gateway.metrics.cancelled._value.get() == 1


@WAYS
async def test_a_call_lives_while_anybody_waits(bench: Bench, path: str, accept: str) -> None:
    """When one of two callers of a call goes, the other one gets its result."""
    stays = await bench.call("/v1/run", "application/json", {"id": "a", "code": "hold"})
    goes = await bench.call(path, accept, {"id": "a", "code": "hold"})
    await until(lambda: bench.held == 2)
    await bench.service.worker.has_seen(1)
    await goes.hang_up()
    await until(lambda: bench.held == 1)
    bench.service.worker.released.set()
    assert b'"id":"a","status":"ok"' in await stays.answer()
    await stays.hang_up()
    assert await bench.queue.orders("echo", block_s=0) == []


async def test_a_call_lives_while_anybody_waits_elsewhere(
    bench: Bench, serve: Serve, redis_of_test: RedisSettings
) -> None:
    """The same, with the callers at two gateways."""
    async with started(await serve(), redis_of_test) as other:
        stays = await bench.call("/v1/run", "application/json", {"id": "a", "code": "hold"})
        await bench.service.worker.has_seen(1)
        goes = await other.call("/v1/run", "application/json", {"id": "a", "code": "hold"})
        await until(lambda: [waiting.is_put for waiting in other.service.gateway.replies] == [True])
        await goes.hang_up()
        await until(lambda: other.held == 0)
        bench.service.worker.released.set()
        assert b'"id":"a","status":"ok"' in await stays.answer()
        await stays.hang_up()
    assert await bench.queue.orders("echo", block_s=0) == []


@WAYS
async def test_a_caller_may_come_back(bench: Bench, path: str, accept: str) -> None:
    """Who went and sends the call once more is served: it runs anew, as the first run may have been stopped."""
    caller = await bench.call(path, accept, {"id": "a", "code": "hold"})
    await bench.service.worker.has_seen(1)
    await caller.hang_up()
    await bench.becomes("unknown", "a")
    again = await bench.call(path, accept, {"id": "a", "code": "hold"})
    await bench.service.worker.has_seen(2)
    bench.service.worker.released.set()
    assert b'"id":"a","status":"ok"' in await again.answer()
    await again.hang_up()


async def test_a_caller_may_come_back_at_once(bench: Bench) -> None:
    """However soon that is after hanging up, and however often."""
    for _ in range(20):
        caller = await bench.call("/v1/run", "application/json", {"id": "a", "code": "hold"})
        await caller.hang_up()
    bench.service.worker.released.set()
    last = await bench.call("/v1/run", "application/json", {"id": "a", "code": "hold"})
    assert b'"id":"a","status":"ok"' in await last.answer()
    await last.hang_up()
    await until(lambda: bench.held == 0)


async def test_a_batch_is_left_in_the_middle(bench: Bench) -> None:
    """Of a batch whose first lines are out, what is done is done and what runs is stopped."""
    caller = await bench.call(
        "/v1/batch", "application/x-ndjson", {"id": "a", "code": "echo"}, {"id": "b", "code": "hold"}
    )
    await caller.reader.readuntil(b'"id":"a"')
    await bench.service.worker.has_seen(2)
    await caller.hang_up()
    await bench.becomes("unknown", "b")
    assert await bench.state("a") == "done"
    (order,) = await bench.queue.orders("echo")
    (stopped,) = [delivery for delivery in bench.service.worker.seen if delivery.call.id == "b"]
    assert order == stopped.place
    assert bench.held == 0


async def test_who_waits_for_a_job_may_go(bench: Bench) -> None:
    """A job runs on whoever stops asking for it."""
    assert (await bench.service.http.post("/v1/jobs", json={"id": "a", "code": "hold"})).status_code == 202
    reader, writer = await asyncio.open_connection(*bench.address)
    writer.write(b"GET /v1/jobs/a?wait=30 HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: bench.held == 2)
    await bench.service.worker.has_seen(1)
    await Caller(reader, writer).hang_up()
    await until(lambda: bench.held == 1)
    assert await bench.queue.orders("echo", block_s=0) == []
    bench.service.worker.released.set()
    answer = await bench.service.http.get("/v1/jobs/a", params={"wait": 30})
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
