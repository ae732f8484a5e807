"""Calls for routes that speak another language than our own: the dialects, and the graders.

Such a route reads its request, asks for one `ToolCall` or many, and says what came of them in its own words. What must
be the same for all of them is here: the permit before the body is read, the bounds and defaults of a call, the caller
who goes away, whose calls are cancelled. `gateway/routes.py` has the same in a form that passes a worker's bytes on
unread; these routes need to look into a result, so each costs a parse more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from gateway.admission import Permit
from gateway.gateway import Gateway
from gateway.reader import CallReader, has_more_parts, read_body, split_batch
from gateway.routes import first_done, send_json, until_gone
from gateway.tenants import Tenant, tenant_of
from sandbox.api_keys import Scope
from sandbox.calls import Base64File, ToolCall, ToolResult, first_error
from sandbox.errors import InvalidCall, SandboxError
from sandbox.grading import Run
from sandbox.settings import CeilingSettings

#: Of a body that a model reads: what is wrong with each is listed at 1 µs, and 1,000 items of 25 fields have as many.
MOST_PARTS = 75_000

#: For how long one request keeps the loop from others.
_TURN_S = 0.005

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Door:
    """A path of a dialect, and what stands behind it."""

    path: str  # with "/" at its end: everything below it, which the application finds as `scope["path"]`
    app: ASGIApp
    methods: tuple[str, ...] = ("POST",)
    scope: Scope | None = "run"  # what a key must be good for; None: nobody needs one
    #: What stands behind it beyond a request, from the application's start to its end.
    running: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


class Answer(NamedTuple):
    """What a request is answered."""

    body: bytes  # JSON
    status: int = 200
    headers: Sequence[tuple[bytes, bytes]] = ()


class Engine:
    """Runs calls in this gateway."""

    def __init__(self, gateway: Gateway, reader: CallReader) -> None:
        self.gateway = gateway
        self.reader = reader

    @property
    def ceilings(self) -> CeilingSettings:
        """The most that a call may ask for."""
        return self.reader.ceilings

    async def run(self, call: ToolCall, tenant: Tenant) -> ToolResult:
        """What came of a call, a fault too. The caller holds a permit for it; cancelled, it cancels the call.

        Raises the SandboxError of a call that is not taken: InvalidCall above a ceiling, Overloaded, Unavailable.
        """
        waiting = self.gateway.submit(self.reader.bounded(call), tenant)
        try:
            # The future may be shared with another request, so it is not awaited itself, which would cancel it.
            await asyncio.wait({waiting.future})
        finally:
            self.gateway.leave(waiting)
        answer = waiting.future.result()
        if isinstance(answer, SandboxError):
            raise answer
        return ToolResult.model_validate_json(answer.raw)

    async def run_alone(self, call: ToolCall, tenant: Tenant) -> ToolResult:
        """The same for who holds no permit. Raises also what admission raises."""
        with self.gateway.admission.enter(tenant) as permit:
            permit.charge(len(call.code) + len(call.stdin))
            return await self.run(call, tenant)


class Exchange:
    """One request: its body, whose it is, and the calls that it takes."""

    def __init__(self, engine: Engine, scope: Connection, body: bytes, permit: Permit) -> None:
        self.engine = engine
        self.scope = scope
        self.body = body
        self.tenant = tenant_of(scope)
        self._permit = permit

    def parse(self, model: type[M], most_parts: int = MOST_PARTS) -> M:
        """The body as one of these, of at most so many parts (`has_more_parts`). Raises InvalidCall."""
        return _parsed(self.body, model, most_parts)

    async def parse_items(self, model: type[M], most_parts: int) -> list[M | InvalidCall]:
        """The items of `{"items": [...]}`, each one of these, or what is wrong with it.

        Raises InvalidCall when the envelope itself is wrong, and CallTooLarge for more items than a batch may have.
        """

        def item(text: bytes) -> M | InvalidCall:
            try:
                return _parsed(text, model, most_parts)
            except InvalidCall as exc:
                return exc

        return await in_turns(map(item, split_batch(self.body, self.engine.reader.max_batch, "items")))

    def widen(self, calls: int) -> None:
        """Hold a permit for so many calls in all. Raises Overloaded or CallTooLarge."""
        self._permit.widen(calls)

    def hold(self, calls: int) -> int:
        """Permits for so many calls at a time, or for as many as there can ever be; their number. Raises Overloaded."""
        most = self.engine.gateway.settings.gateway.max_in_flight
        held = max(1, min(calls, most, self.tenant.max_in_flight or calls))
        self.widen(held)
        return held

    async def run(self, call: ToolCall) -> ToolResult:
        """What came of one call, a fault too. Raises the SandboxError of one that is not taken."""
        return await self.engine.run(call, self.tenant)

    async def run_all(self, calls: Iterable[ToolCall | SandboxError]) -> list[ToolResult | SandboxError]:
        """What came of each, in order; what is an error already stays one. Raises Overloaded or CallTooLarge."""
        asked = list(calls)
        self.widen(sum(isinstance(call, ToolCall) for call in asked))
        return await asyncio.gather(*map(self._run_in_place, asked))

    async def _run_in_place(self, call: ToolCall | SandboxError) -> ToolResult | SandboxError:
        if isinstance(call, SandboxError):
            return call
        try:
            return await self.run(call)
        except SandboxError as exc:
            return exc


def make_call(**fields: object) -> ToolCall:
    """A call of these fields. Raises InvalidCall."""
    try:
        return ToolCall.model_validate(fields)
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc


def make_file(name: str, encoded: str) -> Base64File:
    """A file of a call, from base64. Raises InvalidCall."""
    try:
        return Base64File.model_validate({"base64": encoded})
    except ValidationError as exc:
        raise InvalidCall(f"files.{name[:200]}: Input should be base64") from exc


def _parsed(text: bytes, model: type[M], most_parts: int) -> M:
    if has_more_parts(text, most_parts):
        raise InvalidCall(f"body: it has more than {most_parts} names, texts, brackets and commas")
    try:
        return model.model_validate_json(text)
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc


async def in_turns(work: Iterable[T]) -> list[T]:
    """All of it. After each few milliseconds others have their turn, since a batch may be a second's work."""
    done = []
    now = asyncio.get_running_loop().time
    until = now() + _TURN_S
    for one in work:
        done.append(one)
        if now() > until:
            await asyncio.sleep(0)
            until = now() + _TURN_S
    return done


def at_most(calls: int, run: Run) -> Run:
    """Runs so many at a time."""
    places = asyncio.Semaphore(calls)

    async def run_in_turn(call: ToolCall) -> ToolResult:
        async with places:
            return await run(call)

    return run_in_turn


Handler = Callable[[Exchange], Awaitable[Answer]]


class EngineRoute:
    """An ASGI application of one handler; `refuse` says a SandboxError in the words of its language."""

    def __init__(
        self, engine: Engine, handler: Handler, refuse: Callable[[SandboxError], Answer] | None = None
    ) -> None:
        self._engine = engine
        self._handler = handler
        self._refuse = refuse

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Serve a request. Without `refuse` what is wrong rises as a SandboxError."""
        try:
            answer = await self._answer(scope, receive)
        except SandboxError as exc:
            if self._refuse is None:
                raise
            answer = self._refuse(exc)
        await send_json(send, answer.status, answer.body, answer.headers)

    async def _answer(self, scope: Connection, receive: Receive) -> Answer:
        gateway = self._engine.gateway
        with gateway.admission.enter(tenant_of(scope)) as permit:
            body = await read_body(scope, receive, gateway.settings.gateway.max_body_bytes, permit)
            exchange = Exchange(self._engine, scope, body, permit)
            answering = asyncio.ensure_future(self._handler(exchange))
            try:
                with until_gone(receive) as gone:
                    await first_done(answering, gone)
            finally:
                # Its calls have left before the permit is given back, whatever ended this.
                answering.cancel()
                await asyncio.wait({answering})
            return answering.result()


class Page:
    """An ASGI application for what takes no call, and so no permit: it is answered by a full service, too."""

    def __init__(self, say: Callable[[Connection], Answer]) -> None:
        self._say = say

    async def __call__(self, scope: Connection, _: Receive, send: Send) -> None:
        """Serve a request. Its body is not read."""
        answer = self._say(scope)
        await send_json(send, answer.status, answer.body, answer.headers)
