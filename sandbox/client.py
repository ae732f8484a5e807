"""The client: `SandboxClient`, for one event loop with thousands of calls in flight.

Every way to send calls asks again where that can help and can do no harm (`_Retry`). How calls become requests
is the business of `sandbox.wire`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, Self, TypedDict, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import JsonValue, TypeAdapter, ValidationError

from sandbox.calls import (
    MAX_WAIT_S,
    Base64File,
    CallStatus,
    Limits,
    Network,
    ToolCall,
    ToolResult,
    first_error,
)
from sandbox.errors import InternalError, InvalidCall, Overloaded, SandboxError
from sandbox.wire import Answer, Wire

DEFAULT_URL = "http://127.0.0.1:8000"

_BACKOFF_S = 0.2  # before the second attempt at most; doubles with every further one
_MAX_BACKOFF_S = 10.0
T = TypeVar("T")
_STATUS = TypeAdapter(dict[str, JsonValue])


class CallFields(TypedDict, total=False):
    """The fields of a `ToolCall` beside its code."""

    id: str
    stdin: str
    files: dict[str, str | Base64File]
    fetch_files: list[str]
    limits: Limits
    deadline_s: float
    priority: Literal["tool", "judge"]
    network: Network
    echo_last_value: bool
    keep_bytes: int | None
    hash_seed: Literal[0] | None
    random_seed: int | None


class ClientOptions(TypedDict, total=False):
    """The options of a `SandboxClient` beside its URL."""

    api_key: str | None
    max_in_flight: int
    attempts: int
    patience_s: float


class SandboxClient:
    """Sends calls to a gateway.

        async with SandboxClient("http://127.0.0.1:8000") as client:
            result = await client.run("print(1)")

    `api_key` is shown with every request, where the service has keys; without a good one `Unauthorized` is raised.
    There are at most 16 connections, and a slow call holds up no fast one. `max_in_flight` bounds the calls that
    are sent and not yet answered, some 11,000 at most; more wait their turn. A call that could not be taken (429,
    503, no connection), was not started in time (`queue_timeout`) or lost its connection is sent again under its
    id, at most `attempts` times in all, not counting 429, and for at most `patience_s` seconds after its first
    failure: what it waited before that, for its turn or for an answer, is no lost try. A caller that is cancelled
    ends its call at the gateway too, as far as that can be told.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        max_in_flight: int = 4096,
        attempts: int = 10,
        patience_s: float = 120.0,
    ) -> None:
        self._wire = Wire(url, max_in_flight, api_key)
        self._attempts = attempts
        self._patience_s = patience_s

    async def __aenter__(self) -> Self:
        """Make ready; the first call connects."""
        self._wire.open()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close all connections. Calls that still wait end with `Unavailable`, or `AnswerLost` if sent."""
        await self._wire.close()

    async def run(self, call: ToolCall | str, **fields: Unpack[CallFields]) -> ToolResult:
        """Run one program: a `ToolCall`, or its code with the other fields of one by keyword.

        Every verdict on the program is a result. Raises what the gateway raised, `QueueTimeout` and
        `InternalError` for the two faults, `Unavailable` where there is no gateway, and `AnswerLost` when the
        connection broke after the call was sent, in the last of its attempts.
        """
        answer = await self._answer(_as_call(call, fields))
        if isinstance(answer, SandboxError):
            raise answer
        return _verdict(answer)

    async def run_many(
        self,
        calls: Iterable[ToolCall | str],
        on_result: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """Run many programs; the answers come in the order of the calls.

        Nothing that happens to one call loses another: a fault is a `ToolResult` whose `status.is_fault` is
        true, and a call that got no result has its `SandboxError` in its place. `on_result` is called with
        the index and the answer of each call when it is done.
        """
        asked = list(calls)
        answers: dict[int, Answer] = {}
        waiting = enumerate(asked)

        async def take() -> None:
            for index, call in waiting:
                answers[index] = await self._answer_in_place(call)
                if on_result is not None:
                    on_result(index, answers[index])

        async with asyncio.TaskGroup() as group:
            for _ in range(min(self._wire.max_in_flight, len(asked))):
                group.create_task(take())
        return [answers[index] for index in range(len(asked))]

    async def submit(self, call: ToolCall | str, **fields: Unpack[CallFields]) -> str:
        """Queue one program and do not wait for it; its id, by which `result` asks for what came of it.

        It is sent again as `run` does, and raises the same, but for what the program alone can bring.
        """
        job = _as_call(call, fields)
        await self._asked(lambda: self._wire.submit(job))
        return job.id

    async def result(self, call_id: str, wait_s: float = 0.0) -> ToolResult | None:
        """The result of a submitted program; None when it has none within `wait_s` seconds.

        Raises as `run` does, and `NotFound` for an id that the service does not know, or not any more: it keeps
        results for some minutes.
        """
        clock = asyncio.get_running_loop().time
        end = clock() + wait_s
        while True:
            left_s = max(0.0, end - clock())
            result = await self._asked(partial(self._wire.result, call_id, min(left_s, MAX_WAIT_S)))
            if result is not None:
                return _verdict(result)
            if clock() >= end:
                return None

    async def status(self) -> dict[str, JsonValue]:
        """What the gateway says of the service (`GET /v1/status`). Raises `Unavailable` if there is none."""
        try:
            return _STATUS.validate_json(await self._wire.page("GET", "/v1/status"))
        except ValueError as exc:
            raise InternalError(f"{self._wire.url} gave a status that this client cannot read") from exc

    @classmethod
    @contextmanager
    def blocking(cls, url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> Iterator[BlockingClient]:
        """The same client for code without an event loop, and for many threads at a time.

        with SandboxClient.blocking("http://127.0.0.1:8000") as client:
            result = client.run("print(1)")
        """
        client = cls(url, **options)
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(client):
            yield BlockingClient(client, portal)

    async def _answer_in_place(self, call: ToolCall | str) -> Answer:
        try:
            return await self._answer(_as_call(call, {}))
        except SandboxError as exc:
            return exc

    async def _answer(self, call: ToolCall) -> Answer:
        """Ask until there is an answer that asking again would not change, or patience is at its end."""
        retry = self._retry()
        while True:
            answer = await self._wire.ask(call)
            if not _is_retryable(answer) or not await retry.again(answer):
                return answer

    async def _asked(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The same for what raises its errors."""
        retry = self._retry()
        while True:
            try:
                return await ask()
            except SandboxError as exc:
                if not exc.is_retryable or not await retry.again(exc):
                    raise

    def _retry(self) -> _Retry:
        return _Retry(self._wire, self._attempts, self._patience_s)


@dataclass(slots=True)
class _Retry:
    """The attempts of one call."""

    wire: Wire
    tries_left: int
    patience_s: float
    failures: int = 0
    give_up_at: float | None = None

    async def again(self, answer: Answer) -> bool:
        """Wait after an answer that a further attempt can help; whether there is one."""
        self.failures += 1
        # Being told to come back later, however often, is no failed try.
        self.tries_left -= not isinstance(answer, Overloaded)
        if self.tries_left <= 0 or not self.wire.is_open:
            return False
        now = asyncio.get_running_loop().time()
        if self.give_up_at is None:
            self.give_up_at = now + self.patience_s
        delay_s = _backoff_s(self.failures, answer)
        if now + delay_s > self.give_up_at:
            return False
        await asyncio.sleep(delay_s)
        return self.wire.is_open


class BlockingClient:
    """What `SandboxClient.blocking` lends: the client's methods, waited for. Any thread may call them."""

    def __init__(self, client: SandboxClient, portal: BlockingPortal) -> None:
        self._client = client
        self._portal = portal

    def run(self, call: ToolCall | str, **fields: Unpack[CallFields]) -> ToolResult:
        """See `SandboxClient.run`."""
        return self._portal.call(partial(self._client.run, call, **fields))

    def run_many(
        self,
        calls: Iterable[ToolCall | str],
        on_result: Callable[[int, Answer], None] | None = None,
    ) -> list[Answer]:
        """See `SandboxClient.run_many`; `on_result` is called in the client's own thread."""
        return self._portal.call(self._client.run_many, calls, on_result)

    def submit(self, call: ToolCall | str, **fields: Unpack[CallFields]) -> str:
        """See `SandboxClient.submit`."""
        return self._portal.call(partial(self._client.submit, call, **fields))

    def result(self, call_id: str, wait_s: float = 0.0) -> ToolResult | None:
        """See `SandboxClient.result`."""
        return self._portal.call(self._client.result, call_id, wait_s)

    def status(self) -> dict[str, JsonValue]:
        """See `SandboxClient.status`."""
        return self._portal.call(self._client.status)


def _as_call(call: ToolCall | str, fields: CallFields) -> ToolCall:
    if isinstance(call, ToolCall):
        if fields:
            raise InvalidCall(f"{', '.join(fields)}: belongs into the ToolCall that was given")
        return call
    try:
        return ToolCall.model_validate({"code": call, **fields})
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc


def _verdict(result: ToolResult) -> ToolResult:
    """The result, unless it is a fault."""
    if (error := result.to_error()) is not None:
        raise error
    return result


def _is_retryable(answer: Answer) -> bool:
    if isinstance(answer, SandboxError):
        return answer.is_retryable
    return answer.status is CallStatus.QUEUE_TIMEOUT


def _backoff_s(attempt: int, answer: Answer) -> float:
    """Full jitter, so that calls which were refused together do not come back together."""
    asked_for = answer.retry_after_s if isinstance(answer, SandboxError) else None
    return (asked_for or 0.0) + random.uniform(0, min(_MAX_BACKOFF_S, _BACKOFF_S * 2 ** (attempt - 1)))
