"""Adapters of services: what they send, and what they make of answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from loadtest.openloop import CONNECTION_ERROR, REFUSED, UNREADABLE, Reply
from loadtest.targets import V1, Adapter, open_target
from sandbox import Limits, ToolCall

Answer = Callable[[dict[str, Any]], web.Response]

CALL = ToolCall(code="print(1)", stdin="x", limits=Limits(wall_s=2))


@asynccontextmanager
async def service(path: str, answer: Answer) -> AsyncIterator[str]:
    """A service that has this one path."""

    async def handle(request: web.Request) -> web.Response:
        return answer(await request.json())

    app = web.Application()
    app.router.add_post(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(adapter: Adapter, answer: Answer) -> Reply:
    """What the adapter makes of this answer."""
    async with service(adapter.path, answer) as url, open_target(url, adapter) as target:
        return await target.ask(CALL)


def v1_result(call: dict[str, Any], **fields: Any) -> web.Response:
    return web.json_response({"id": call["id"], "status": "ok", **fields})


async def test_v1_sends_the_fields_of_the_call_and_no_others() -> None:
    """What a call leaves out is left to the server's defaults, and its id is sent."""
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> web.Response:
        bodies.append(body)
        return v1_result(body)

    await ask(V1(), answer)

    assert bodies == [{"id": CALL.id, "code": "print(1)", "stdin": "x", "limits": {"wall_s": 2.0}}]


async def test_v1_tells_the_usage() -> None:
    """A result brings its status, its stdout and what it used."""
    usage = {"cpu_s": 0.25, "wall_s": 0.5, "queue_s": 0.75}

    reply = await ask(V1(), lambda call: v1_result(call, status="error", stdout="2\n", usage=usage))

    assert reply == Reply("error", "2\n", cpu_s=0.25, wall_s=0.5, queue_s=0.75)


@pytest.mark.parametrize(
    ("status", "name", "outcome"),
    [
        (429, "Overloaded", REFUSED),
        (503, "Unavailable", REFUSED),
        (504, "QueueTimeout", "queue_timeout"),
        (500, "InternalError", "internal_error"),
        (401, "Unauthorized", "http_401"),
        (422, "InvalidCall", "http_422"),
    ],
)
async def test_v1_errors_are_told_apart(status: int, name: str, outcome: str) -> None:
    """A refusal is one, a fault has its status's name, and anything else its number; the words are kept."""
    error = {"error": {"name": name, "message": "because"}}

    reply = await ask(V1(), lambda _: web.json_response(error, status=status))

    assert reply.outcome == outcome
    assert "because" in reply.why


@pytest.mark.parametrize(
    "body", ["<h1>Bad gateway</h1>", "[]", '{"error": 1}', '{"error": {"name": ["x"]}}', ""]
)
async def test_an_answer_of_something_before_the_service_keeps_its_number(body: str) -> None:
    """A proxy's error is no fault of ours."""
    assert (await ask(V1(), lambda _: web.Response(status=504, text=body))).outcome == "http_504"


@pytest.mark.parametrize(
    "body", ["", "null", "[1]", '{"status": "ok"}', '{"id": "1", "status": "fine"}', "\0"]
)
async def test_an_answer_without_the_shape_is_unreadable(body: str) -> None:
    """200 with anything else than a result is an outcome of its own."""
    assert (await ask(V1(), lambda _: web.Response(text=body))).outcome == UNREADABLE


async def test_an_answer_is_read_up_to_a_bound() -> None:
    """A service that answers without end costs a bounded memory, and is unreadable."""
    reply = await ask(V1(), lambda _: web.Response(body=b" " * 2 * 1024 * 1024))

    assert reply.outcome == UNREADABLE
    assert "longer" in reply.why


async def test_a_compressed_answer_is_not_unpacked() -> None:
    """Nobody asked for it, and what it would become has no bound."""
    packed = gzip.compress(b'{"id": "1", "status": "ok"}')

    reply = await ask(V1(), lambda _: web.Response(body=packed, headers={"content-encoding": "gzip"}))

    assert reply.outcome == UNREADABLE


async def test_no_service_is_an_outcome() -> None:
    """Where nobody listens, each call is a connection error that says why."""
    async with open_target(f"http://127.0.0.1:{unused_port()}", V1()) as target:
        reply = await target.ask(CALL)

    assert reply.outcome == CONNECTION_ERROR
    assert "Connect" in reply.why


async def test_the_words_of_a_service_are_cut() -> None:
    """A long error is kept in part."""
    reply = await ask(V1(), lambda _: web.Response(status=500, text="x" * 10_000))

    assert len(reply.why) == 200


async def test_the_key_is_shown() -> None:
    """Services with keys get ours."""
    shown: list[str | None] = []

    async def handle(request: web.Request) -> web.Response:
        shown.append(request.headers.get("authorization"))
        return web.Response(text=json.dumps({}))

    app = web.Application()
    app.router.add_post("/v1/run", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with open_target(url, V1(), "a-key") as target:
        await target.ask(CALL)
    await runner.cleanup()

    assert shown == ["Bearer a-key"]
