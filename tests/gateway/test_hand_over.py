"""Calls that their caller hands over from one request to another, perhaps at another gateway, and cuts the first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from sandbox.errors import Unavailable
from sandbox.queue import CallQueue, Put, QueuedCall

from .conftest import Serve, Service, listening, until

HOLD = {"id": "a", "code": "hold"}
KNOWN = {"known": True}


@dataclass
class Request:
    """A batch whose answer is read line by line."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def line(self) -> dict[str, Any]:
        """The next line; those of the chunks around it are no JSON objects."""
        while not (line := await self.reader.readline()).startswith(b"{"):
            assert line, "the answer is at its end"
        return dict(json.loads(line))

    def cut(self) -> None:
        """Go away."""
        self.writer.close()


@asynccontextmanager
async def asked(service: Service, handed_over: int, *calls: dict[str, str]) -> AsyncIterator[Request]:
    """Send a batch whose last calls are handed over to it."""
    async with listening(service) as address:
        reader, writer = await asyncio.open_connection(*address)
        body = json.dumps({"calls": calls}).encode()
        head = (
            "POST /v1/batch HTTP/1.1\r\nhost: x\r\naccept: application/x-ndjson\r\n"
            f"x-hand-over: {handed_over}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        yield Request(reader, writer)
        writer.close()


@pytest.mark.parametrize("gateways", [1, 2])
async def test_a_call_that_was_handed_over_outlives_the_first_request(serve: Serve, gateways: int) -> None:
    """It goes on, is run once, and the second request has its answer; so on one gateway, and from one to another."""
    services = [await serve() for _ in range(gateways)]
    worker = services[0].worker
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(asked(services[0], 0, HOLD))
        await worker.has_seen(1)
        second = await stack.enter_async_context(asked(services[-1], 1, {"id": "b", "code": "echo"}, HOLD))
        lines = [await second.line(), await second.line()]
        assert sorted(line.get("index", -1) for line in lines) == [-1, 0]
        assert KNOWN in lines
        first.cut()
        held_by_second = 2 if gateways == 1 else 0
        await until(lambda: services[0].gateway.admission.held == held_by_second)
        await services[0].gateway.queue.look("any")  # a round trip after that of a cancel, if there was one
        assert await worker.queue.orders("echo") == []
        worker.released.set()
        answer = await second.line()
    assert (answer["index"], answer["id"], answer["status"]) == (1, "a", "ok")
    assert sorted(delivery.call.id for delivery in worker.seen) == ["a", "b"]


@pytest.mark.parametrize("times", [1, 2])
async def test_a_call_is_not_known_before_the_queue_has_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """While its put is under way at the second gateway, the end of the first request would still cancel it.

    So also where the second request has it twice, of which one is no hand-over.
    """
    one, two = await serve(), await serve()
    go_on = asyncio.Event()
    put = CallQueue.put

    async def held_up(queue: CallQueue, gateway: str, calls: list[QueuedCall]) -> list[Put]:
        if queue is two.gateway.queue:
            await go_on.wait()
        return await put(queue, gateway, calls)

    monkeypatch.setattr(CallQueue, "put", held_up)
    async with asked(one, 0, HOLD), asked(two, 1, *[HOLD] * times) as second:
        await one.worker.has_seen(1)
        line = asyncio.create_task(second.line())
        await until(lambda: two.gateway.admission.held == times)
        async with asked(two, 0, {"id": "no good"}) as later:  # what was sent before its answer is here, too
            assert "error" in await later.line()
        is_early = line.done()
        go_on.set()  # or a failure would wait for ever
        assert not is_early
        assert await line == KNOWN
        one.worker.released.set()
        assert (await second.line())["status"] == "ok"


async def test_a_call_that_cannot_be_put_is_said_before_the_others_are_known(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller must not cut the request that has it."""
    service = await serve()

    async def refused(queue: CallQueue, gateway: str, calls: list[QueuedCall]) -> list[Put]:
        raise Unavailable("no Redis")

    monkeypatch.setattr(CallQueue, "put", refused)
    async with asked(service, 1, HOLD, HOLD | {"id": "b"}) as request:
        lines = [await request.line() for _ in range(2)]
    assert [line.get("index") for line in lines] == [0, 1]


async def test_a_call_that_is_over_is_known(serve: Serve) -> None:
    """One with a result, and one that is refused: both are answered, and nobody waits for a line in vain."""
    service = await serve()
    done, bad = {"id": "done", "code": "echo x"}, {"id": "done", "code": "echo another"}
    assert (await service.http.post("/v1/run", json=done)).status_code == 200
    async with asked(service, 3, done, bad, {"id": "no good", "code": ""}) as request:
        lines = [await request.line() for _ in range(4)]
    assert KNOWN in lines
    by_index = {line["index"]: line for line in lines if line != KNOWN}
    assert by_index[0]["stdout"] == "x"
    assert [by_index[n]["error"]["name"] for n in (1, 2)] == ["InvalidCall"] * 2


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "9999999999"])
async def test_a_hand_over_is_a_number(serve: Serve, value: str) -> None:
    """Anything else is refused with the name of the header."""
    service = await serve()
    headers = {"x-hand-over": value, "accept": "application/x-ndjson"}
    answer = await service.http.post("/v1/batch", json={"calls": [HOLD]}, headers=headers)
    assert answer.status_code == 422
    assert "x-hand-over" in answer.json()["error"]["message"]
