"""The Model Context Protocol over HTTP ("streamable HTTP"), on its official SDK, at `/mcp`.

Theory of operation. Nothing is kept between requests: the SDK runs without sessions and answers each request with JSON,
so that any gateway process can answer any of them and no table grows. `EngineRoute` holds the permit, has read the body
within its bound, and cancels us when the caller goes away; the request that the SDK sees is made of that, and what it
sends becomes our answer. The SDK runs a tool in a task of its own and ends it when the request is cancelled.

A client cancels by going away, since 2026-07-28, or by `notifications/cancelled` before that: another request, which
names the first by its id. Ids belong to a client, so `initialize` names a session that no one remembers, the client
shows it with what follows, and the calls in flight are found by session and id. That is this process's own: where there
are several, the word may reach another, which ignores it.

The SDK takes a second to import and 25 MB. So the first request starts it, in a thread while the loop goes on, and
`Mcp.running`, a part of the application's lifespan, ends it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Iterator, MutableMapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal
from urllib.parse import urlsplit
from uuid import uuid4

import anyio
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.types import Message, Scope

from gateway.engine import Answer, Door, Engine, EngineRoute, Exchange
from gateway.reader import has_more_parts
from gateway.routes import retry_after
from sandbox.calls import ToolCall, ToolResult
from sandbox.errors import Cancelled, Forbidden, InvalidCall, SandboxError
from sandbox.jsonrpc import to_rpc_error

#: Names, texts, brackets and commas of a request: a client that says much of itself has some hundreds.
MOST_PARTS = 10_000
#: A notification, and what a client says of itself, are short; no program is looked at for them.
SHORT_BYTES = 64 * 1024

_SESSION = b"mcp-session-id"
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def doors(engine: Engine) -> list[Door]:
    """`POST /mcp`. It has no stream for a `GET` and no session to `DELETE`: 405, as the protocol wants."""
    mcp = Mcp(engine)
    return [Door("/mcp", EngineRoute(engine, mcp.answer, refuse), running=mcp.running)]


def refuse(exc: SandboxError) -> Answer:
    """An error before there is a request to answer: its id is not known."""
    error = {"jsonrpc": "2.0", "id": None, "error": to_rpc_error(exc)._asdict()}
    return Answer(json.dumps(error).encode(), exc.http_status, retry_after(exc))


class Mcp:
    """The SDK's server, and the calls that are under way in it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._serving: asyncio.Task[None] | None = None
        self._manager: Any = None  # the SDK's StreamableHTTPSessionManager
        self._served = asyncio.Event()
        self._over = asyncio.Event()
        self._in_flight: dict[_Key, anyio.CancelScope] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """End what the first request started."""
        try:
            yield
        finally:
            self._over.set()
            if self._serving is not None:
                await asyncio.wait({self._serving})

    async def answer(self, exchange: Exchange) -> Answer:
        """What the SDK answers to a request."""
        if has_more_parts(exchange.body, MOST_PARTS):
            raise InvalidCall(f"body: it has more than {MOST_PARTS} names, texts, brackets and commas")
        self._check_origin(exchange)
        said = _said(exchange.body)
        if said.method == "notifications/cancelled":
            self._cancel(exchange, said)
        manager = await self._start()
        request = _Request(exchange)
        try:
            await manager.handle_request(request.scope, request.receive, request.send)
        finally:
            await request.end()
        answer = request.answer()
        if said.method == "initialize" and answer.status == 200:
            return answer._replace(headers=[*answer.headers, (_SESSION, uuid4().hex.encode())])
        return answer

    async def _run(self, context: Any, call: ToolCall) -> ToolResult:
        """Run a tool's call, in a task of the SDK's."""
        request: _Request = context.request.scope["request"]
        key = _key(request.exchange, context.request_id)
        with request.running() as scope:
            self._in_flight[key] = scope
            try:
                return await request.exchange.run(call)
            finally:
                if self._in_flight.get(key) is scope:
                    del self._in_flight[key]
        raise Cancelled("the client asked for the end of this call")

    def _cancel(self, exchange: Exchange, said: _Said) -> None:
        if said.params.requestId is not None:
            scope = self._in_flight.get(_key(exchange, said.params.requestId))
            if scope is not None:
                scope.cancel()

    def _check_origin(self, exchange: Exchange) -> None:
        """A page in a browser says where it is from, and may be led to this address by its own name server.

        Where there are keys, it has none of them unless it may have it.
        """
        origin = dict(exchange.scope["headers"]).get(b"origin")
        if origin is None or self._engine.gateway.keys.are_needed:
            return
        if _host_of(origin.decode("latin-1")) not in _LOOPBACK:
            raise Forbidden("pages from elsewhere may call this only where the service has API keys")

    async def _start(self) -> Any:
        """The SDK's manager, started by whoever comes first."""
        if self._serving is None:
            self._serving = asyncio.create_task(self._serve())
        if self._manager is None:
            served = asyncio.create_task(self._served.wait())
            try:
                await asyncio.wait({self._serving, served}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                served.cancel()
            if self._manager is None:
                self._serving.result()  # raises what went wrong
        return self._manager

    async def _serve(self) -> None:
        words = await asyncio.to_thread(importlib.import_module, "sandbox.mcp_server")
        async with words.http_manager(
            self._run, self._engine.gateway.settings.gateway.max_body_bytes
        ) as manager:
            self._manager = manager
            self._served.set()
            await self._over.wait()


_Key = tuple[str, bytes, int | str]


def _key(exchange: Exchange, request_id: int | str) -> _Key:
    """Whose request this is. Without a session a client's requests are told from others' by nothing."""
    session = dict(exchange.scope["headers"]).get(_SESSION) or uuid4().hex.encode()
    return exchange.tenant.name, session, request_id


class _Request:
    """A request as the SDK wants it, from one that has been read, and what it answers."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.scope: Scope = {**exchange.scope, "request": self}
        self._call: anyio.CancelScope | None = None
        self._is_over = False
        self._ended = asyncio.Event()
        self._body: bytes | None = exchange.body
        self._start: MutableMapping[str, Any] = {"status": 500, "headers": []}
        self._sent = bytearray()

    async def receive(self) -> Message:
        """The body, once. That the caller has gone away is not said here: this task is cancelled then."""
        if self._body is None:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Keep it."""
        if message["type"] == "http.response.start":
            self._start = message
        else:
            self._sent += message.get("body", b"")

    @contextmanager
    def running(self) -> Iterator[anyio.CancelScope]:
        """Around its call, to end that from outside."""
        if self._is_over:
            raise Cancelled("the caller had gone before the call began")
        try:
            with anyio.CancelScope() as self._call:
                yield self._call
        finally:
            self._ended.set()

    async def end(self) -> None:
        """Return when its call has ended, which the SDK does not wait for when the caller has gone."""
        self._is_over = True
        if self._call is not None:
            self._call.cancel()
            await self._ended.wait()

    def answer(self) -> Answer:
        """What was sent. Some of the SDK's refusals are plain text."""
        status: int = self._start["status"]
        kind = dict(self._start["headers"]).get(b"content-type", b"")
        if not self._sent or kind.startswith(b"application/json"):
            return Answer(bytes(self._sent), status)
        return refuse(InvalidCall(self._sent.decode()))._replace(status=status)


class _Named(BaseModel):
    model_config = ConfigDict(strict=True)

    requestId: int | str | None = None  # noqa: N815 - the protocol's word


class _Said(BaseModel):
    """What we look at in a request before the SDK does."""

    method: Literal["initialize", "notifications/cancelled", ""] = ""
    params: _Named = _Named()


def _said(body: bytes) -> _Said:
    if len(body) > SHORT_BYTES:
        return _Said()
    try:
        return _Said.model_validate_json(body)
    except ValidationError:
        return _Said()


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None
