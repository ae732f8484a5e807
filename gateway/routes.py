"""The two hot routes, as plain ASGI applications: bytes in, bytes out.

FastAPI's machinery for models in and out costs more per request than everything that happens here, so these
routes read the body themselves and pass a worker's JSON on as it came. `openapi.py` describes them, and a
test holds that description against what they accept.

`POST /v1/run` takes one ToolCall and answers one ToolResult. A fault is answered with its error's status.

`POST /v1/batch` takes `{"calls": [ToolCall, ...]}`. An item without a result never fails the others: it is
answered in its place as `{"error": {"name", "message", "retry_after_s"?}}`, and a fault stays a ToolResult
there. The answer is one of two:
- `{"results": [...]}` in the order of the calls;
- with `Accept: application/x-ndjson` one line an item as each is done, with the item's position in front:
  `{"index": 3, "id": ..., ...}` or `{"index": 3, "error": {...}}`.

Calls that are in flight under one id, in one batch or in several requests, must be the same call. They share
one run and its result; a different call under that id is an InvalidCall.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from functools import partial

from starlette.types import Receive, Scope, Send

from gateway.gateway import Gateway
from gateway.reader import CallReader, read_body
from gateway.replies import Answer, Reply
from gateway.tenants import tenant_of
from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.errors import InternalError, InvalidCall, QueueTimeout, SandboxError

NDJSON = b"application/x-ndjson"
_STREAM_HEADERS = [(b"content-type", NDJSON), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


class RunRoute:
    """One call, one result."""

    def __init__(self, gateway: Gateway, reader: CallReader) -> None:
        self._gateway = gateway
        self._reader = reader
        self._max_body_bytes = gateway.settings.gateway.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; what is wrong rises as a SandboxError."""
        with self._gateway.admission.enter(tenant_of(scope)) as permit:
            call = self._reader.one(await read_body(scope, receive, self._max_body_bytes, permit))
            answer = await asyncio.shield(self._gateway.submit(call))
            if isinstance(answer, SandboxError):
                raise answer
            if answer.status.is_fault:
                raise _error_of(ToolResult.model_validate_json(answer.raw))
            await send_json(send, 200, answer.raw)


class BatchRoute:
    """Many calls, as many results."""

    def __init__(self, gateway: Gateway, reader: CallReader) -> None:
        self._gateway = gateway
        self._reader = reader
        self._max_body_bytes = gateway.settings.gateway.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; what is wrong with the whole of it rises as a SandboxError."""
        with self._gateway.admission.enter(tenant_of(scope)) as permit:
            items = self._reader.many(await read_body(scope, receive, self._max_body_bytes, permit))
            permit.widen(sum(isinstance(item, ToolCall) for item in items))
            self._gateway.metrics.batch_calls.observe(len(items))
            answers = [self._answer(item) for item in items]
            if _wants_lines(scope):
                await _send_lines(send, answers)
            else:
                await _send_results(send, answers)

    def _answer(self, item: ToolCall | InvalidCall) -> asyncio.Future[Answer] | InvalidCall:
        if isinstance(item, InvalidCall):
            return item
        try:
            return self._gateway.submit(item)
        except InvalidCall as exc:
            return exc


async def send_json(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Answer a request as a whole."""
    length = (b"content-length", b"%d" % len(body))
    head = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _error_of(fault: ToolResult) -> SandboxError:
    if fault.status is CallStatus.QUEUE_TIMEOUT:
        return QueueTimeout(fault.reason or "the deadline passed before the program started")
    return InternalError(fault.reason or "the service failed while it ran the call")


def _wants_lines(scope: Scope) -> bool:
    return any(name == b"accept" and NDJSON in value for name, value in scope["headers"])


async def _send_results(send: Send, answers: Sequence[asyncio.Future[Answer] | InvalidCall]) -> None:
    # Neither `gather` nor awaiting one by one: both would cancel futures that another request may share.
    if futures := {answer for answer in answers if isinstance(answer, asyncio.Future)}:
        await asyncio.wait(futures)
    items = b",".join(_item(answer) for answer in answers)
    await send_json(send, 200, b'{"results":[%b]}' % items)


async def _send_lines(send: Send, answers: Sequence[asyncio.Future[Answer] | InvalidCall]) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
    done: asyncio.Queue[int] = asyncio.Queue()
    for index, answer in enumerate(answers):
        if isinstance(answer, asyncio.Future):
            answer.add_done_callback(partial(_note, done, index))
        else:
            done.put_nowait(index)
    left = len(answers)
    while left:
        ready = [await done.get()]
        while not done.empty():
            ready.append(done.get_nowait())
        left -= len(ready)
        lines = b"".join(_line(index, _item(answers[index])) for index in ready)
        await send({"type": "http.response.body", "body": lines, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _note(done: asyncio.Queue[int], index: int, _: object) -> None:
    done.put_nowait(index)


def _item(answer: asyncio.Future[Answer] | InvalidCall) -> bytes:
    """The JSON object of one item whose answer is there."""
    known = answer.result() if isinstance(answer, asyncio.Future) else answer
    if isinstance(known, Reply):
        return known.raw
    return json.dumps(known.to_wire(), separators=(",", ":")).encode()


def _line(index: int, item: bytes) -> bytes:
    """An item as a line, with its index as the first field; every item starts with a brace and a field."""
    return b'{"index":%d,%b\n' % (index, item[1:])
