"""Services that can be measured, each behind an adapter that speaks its API and puts its answers into our words.

    v1              POST /v1/run                of this service

An adapter makes the body of a request from a call and reads the answer; `HttpTarget` does the rest for all of them.
Nothing of an answer is trusted: its length is bounded before it is read, and what has no known shape is `unreadable`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import aiohttp
from pydantic_core import from_json

from loadtest.openloop import CONNECTION_ERROR, REFUSED, UNREADABLE, Reply, Target
from sandbox import CallStatus, ToolCall, ToolResult
from sandbox.process import use_all_descriptors

_CONNECT_S = 10.0
_MAX_REST_BYTES = 64 * 1024  # of an answer beside the program's output, and of one that is an error
_MAX_WHY = 200  # characters of a service's own words that are kept

#: Faults that this service answers with an error, by the error's name.
_FAULTS = {"QueueTimeout": CallStatus.QUEUE_TIMEOUT.value, "InternalError": CallStatus.INTERNAL_ERROR.value}


class Adapter(Protocol):
    """What is particular to one API."""

    path: str

    def encode(self, call: ToolCall) -> bytes:
        """The body that asks for this call."""
        ...

    def read(self, status: int, body: bytes) -> Reply:
        """What the answer says. Raises ValueError for one that has not the shape of the API."""
        ...


class V1:
    """One call, one request: https://…/docs of any gateway describes it."""

    path = "/v1/run"

    def encode(self, call: ToolCall) -> bytes:
        """What the kind leaves out stays out, so that the server's defaults hold."""
        return call.model_copy(update={"id": call.id}).model_dump_json(exclude_unset=True).encode()

    def read(self, status: int, body: bytes) -> Reply:
        """A verdict is a result; a fault is an error with a name."""
        if status != 200:
            return _v1_error(status, body)
        result = ToolResult.model_validate_json(body)
        return Reply(
            result.status.value,
            result.stdout,
            cpu_s=result.usage.cpu_s,
            wall_s=result.usage.wall_s,
            queue_s=result.usage.queue_s,
        )


def _v1_error(status: int, body: bytes) -> Reply:
    refusal = _http_error(status, body)
    try:
        name = from_json(body)["error"]["name"]
    except (ValueError, TypeError, KeyError):
        return refusal  # it is not the gateway that answered
    return Reply(
        _FAULTS.get(name, refusal.outcome) if isinstance(name, str) else refusal.outcome, why=refusal.why
    )


def _http_error(status: int, body: bytes) -> Reply:
    outcome = REFUSED if status in {429, 503} else f"http_{status}"
    return Reply(outcome, why=body[: 4 * _MAX_WHY].decode(errors="replace")[:_MAX_WHY])


class HttpTarget:
    """A service that answers each call in a request of its own. `open_target` makes one."""

    def __init__(self, session: aiohttp.ClientSession, url: str, adapter: Adapter) -> None:
        self._session = session
        self._url = url.rstrip("/") + adapter.path
        self._adapter = adapter

    async def ask(self, call: ToolCall) -> Reply:
        """See `Target`."""
        body = self._adapter.encode(call)
        try:
            async with self._session.post(self._url, data=body, allow_redirects=False) as response:
                answer = await _read(response, _longest(call))
            return self._adapter.read(response.status, answer)
        except (aiohttp.ClientError, OSError) as exc:
            return Reply(CONNECTION_ERROR, why=f"{type(exc).__name__}: {exc}"[:_MAX_WHY])
        except ValueError as exc:
            return Reply(UNREADABLE, why=str(exc)[:_MAX_WHY])


@asynccontextmanager
async def open_target(url: str, adapter: Adapter, api_key: str | None = None) -> AsyncIterator[Target]:
    """A target with as many connections as it needs at a time: a bound would make the generator late."""
    use_all_descriptors()
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),  # the loop is patient, or not
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    ) as session:
        yield HttpTarget(session, url, adapter)


def _longest(call: ToolCall) -> int:
    """Two outputs, of which JSON makes at most six bytes from each byte, and the rest of an answer."""
    return 12 * call.limits.output_bytes + _MAX_REST_BYTES


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole answer. Raises ValueError if it is longer than that."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > most:
            raise ValueError(f"the answer is longer than the {most} bytes that the call's limits allow")
    return bytes(body)
