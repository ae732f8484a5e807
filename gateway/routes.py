"""The routes that calls come by, as plain ASGI applications: bytes in, bytes out.

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

`POST /v1/jobs` takes one ToolCall and answers 202 as soon as it is queued, for callers behind proxies that cut what is
silent for long. `GET /v1/jobs/ID?wait=SECONDS` answers its ToolResult, also a fault, or 202 when it is not done within
that time; `DELETE /v1/jobs/ID` ends it. Both know every call by its id, however it came.

The header `x-deadline-ms` says how long the caller still waits: the deadline of calls that name none, and a bound on
that of the others.

The header `x-hand-over: N` with a batch says that its last N calls are under way, and that the caller wants to cut the
requests by which it waits for them now. Beside the others it gets a line `{"known": true}` as soon as the service knows
that they are waited for by this request too, so that the cut ends none of them.

Calls under one id, in flight or ended a short time ago, must be the same call. They share one run and its result; a
different call under that id is an InvalidCall. A caller that goes away leaves its calls, and what nobody waits for is
cancelled.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from gateway.gateway import Gateway
from gateway.lines import NDJSON, send_lines, to_item
from gateway.reader import CallerGone, CallReader, read_body
from gateway.replies import Waiting
from gateway.tenants import Tenant, tenant_of
from sandbox.calls import MAX_WAIT_S, ToolCall, ToolResult, is_call_id
from sandbox.errors import InvalidCall, NotFound, SandboxError


class _Route:
    def __init__(self, gateway: Gateway, reader: CallReader) -> None:
        self._gateway = gateway
        self._reader = reader
        self._max_body_bytes = gateway.settings.gateway.max_body_bytes


class RunRoute(_Route):
    """One call, one result."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; what is wrong rises as a SandboxError."""
        tenant = tenant_of(scope)
        with self._gateway.admission.enter(tenant) as permit:
            body = await read_body(scope, receive, self._max_body_bytes, permit)
            waiting = self._gateway.submit(self._reader.one(body, _deadline_s(scope)), tenant)
            try:
                with until_gone(receive) as gone:
                    await first_done(waiting.future, gone)
            finally:
                self._gateway.leave(waiting)
            answer = waiting.future.result()
            if isinstance(answer, SandboxError):
                raise answer
            if answer.status.is_fault and (error := ToolResult.model_validate_json(answer.raw).to_error()):
                raise error
            await send_json(send, 200, answer.raw)


class BatchRoute(_Route):
    """Many calls, as many results."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; what is wrong with the whole of it rises as a SandboxError."""
        tenant = tenant_of(scope)
        with self._gateway.admission.enter(tenant) as permit:
            body = await read_body(scope, receive, self._max_body_bytes, permit)
            items = self._reader.many(body, _deadline_s(scope))
            permit.widen(sum(isinstance(item, ToolCall) for item in items))
            self._gateway.metrics.batch_calls.observe(len(items))
            answers = [self._submit(item, tenant) for item in items]
            try:
                with until_gone(receive) as gone:
                    if _wants_lines(scope):
                        handed_over = _handed_over(scope)
                        known = self._known(answers, handed_over) if handed_over else None
                        await send_lines(send, answers, gone, known)
                    else:
                        await _send_results(send, answers, gone)
            finally:
                for answer in answers:
                    if isinstance(answer, Waiting):
                        self._gateway.leave(answer)

    def _known(self, answers: Sequence[Waiting | SandboxError], handed_over: int) -> asyncio.Future[None]:
        own = max(0, len(answers) - handed_over)
        return self._gateway.replies.known(_waitings(answers[own:]), _waitings(answers))

    def _submit(self, item: ToolCall | InvalidCall, tenant: Tenant) -> Waiting | SandboxError:
        if isinstance(item, InvalidCall):
            return item
        try:
            return self._gateway.submit(item, tenant)
        except SandboxError as exc:
            return exc


class JobsRoute(_Route):
    """A call whose result is asked for later."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; what is wrong rises as a SandboxError."""
        tenant = tenant_of(scope)
        with ExitStack() as stack:
            permit = stack.enter_context(self._gateway.admission.enter(tenant))
            body = await read_body(scope, receive, self._max_body_bytes, permit)
            call = self._reader.one(body, _deadline_s(scope))
            job = await self._gateway.submit_job(call, tenant)
            self._gateway.keep(job, stack.pop_all())
        await _send_pending(send, call.id)


class JobRoute(_Route):
    """What came of a call that was sent before, and its end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request; what is wrong rises as a SandboxError."""
        tenant = tenant_of(scope)
        call_id = scope["path_params"]["call_id"]
        if not is_call_id(call_id):
            raise NotFound(f"no call can have the id {call_id[:200]}")
        if scope["method"] == "DELETE":
            cancelled = await self._gateway.stop_job(call_id, tenant)
            await send_json(send, 200, json.dumps({"id": call_id, "cancelled": cancelled}).encode())
            return
        wait_s = _wait_s(scope)
        with self._gateway.admission.enter(tenant), until_gone(receive) as gone:
            result = asyncio.ensure_future(self._gateway.result_of_job(call_id, tenant, wait_s))
            try:
                await first_done(result, gone)
            finally:
                result.cancel()
            answer = await result
        if answer is None:
            await _send_pending(send, call_id)
        elif isinstance(answer, SandboxError):
            raise answer
        else:
            await send_json(send, 200, answer.raw)


async def first_done(awaited: asyncio.Future[Any], gone: asyncio.Task[None]) -> None:
    """Return when what is awaited is done, and cancel nothing. Raises CallerGone when there is nobody to tell."""
    # By hand, since every request passes here and `asyncio.wait` costs four times as much.
    either = asyncio.get_running_loop().create_future()

    def wake(_: asyncio.Future[Any]) -> None:
        if not either.done():
            either.set_result(None)

    awaited.add_done_callback(wake)
    gone.add_done_callback(wake)
    await either
    if not awaited.done():
        raise CallerGone


async def _send_pending(send: Send, call_id: str) -> None:
    await send_json(send, 202, json.dumps({"id": call_id, "status": "pending"}).encode())


def _wait_s(scope: Scope) -> float:
    text = parse_qs(scope["query_string"].decode("latin-1")).get("wait", ["0"])[-1]
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0 <= wait_s < float("inf"):
        raise InvalidCall("wait: must be a number of seconds, 0 or more")
    return min(wait_s, MAX_WAIT_S)


def _deadline_s(scope: Scope) -> float | None:
    """What the header says. Raises InvalidCall."""
    for name, value in scope["headers"]:
        if name == b"x-deadline-ms":
            if not value.isdigit() or len(value) > 9 or int(value) == 0:
                raise InvalidCall("x-deadline-ms: must be a whole number of milliseconds above 0")
            return int(value) / 1000
    return None


def _handed_over(scope: Scope) -> int:
    """How many of the last calls. Raises InvalidCall."""
    for name, value in scope["headers"]:
        if name == b"x-hand-over":
            if not value.isdigit() or len(value) > 9:
                raise InvalidCall("x-hand-over: must be a number of calls")
            return int(value)
    return 0


@contextmanager
def until_gone(receive: Receive) -> Iterator[asyncio.Task[None]]:
    """A task that ends when the caller goes away, for the length of the block. The body has been read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(gone())
    try:
        yield task
    finally:
        task.cancel()  # it ends in the next turn of the loop


def retry_after(error: SandboxError) -> list[tuple[bytes, bytes]]:
    """The header that says when to send a request again, where an error knows."""
    if error.retry_after_s is None:
        return []
    return [(b"retry-after", b"%d" % math.ceil(error.retry_after_s))]


async def send_json(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Answer a request as a whole."""
    length = (b"content-length", b"%d" % len(body))
    head = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _waitings(answers: Iterable[Waiting | SandboxError]) -> Iterator[Waiting]:
    return (answer for answer in answers if isinstance(answer, Waiting))


def _wants_lines(scope: Scope) -> bool:
    return any(name == b"accept" and NDJSON in value for name, value in scope["headers"])


async def _send_results(
    send: Send, answers: Sequence[Waiting | SandboxError], gone: asyncio.Task[None]
) -> None:
    # Neither `gather` nor awaiting one by one: both would cancel futures that another request may share.
    if futures := {answer.future for answer in answers if isinstance(answer, Waiting)}:
        all_done = asyncio.ensure_future(asyncio.wait(futures))
        try:
            await first_done(all_done, gone)
        finally:
            all_done.cancel()
    done = (answer.future.result() if isinstance(answer, Waiting) else answer for answer in answers)
    items = b",".join(map(to_item, done))
    await send_json(send, 200, b'{"results":[%b]}' % items)
