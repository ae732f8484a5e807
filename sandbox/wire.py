"""The wire between a client and a gateway: joins calls into few requests, and gives each call its answer.

Theory of operation. A call joins the buffer and waits for its answer. The buffer leaves as one
`POST /v1/batch`, whose answer is read line by line (NDJSON), so that each call is answered when it is done
and a slow one holds none of its batch. Calls are joined because httpx collapses under many parallel
requests: 100 at once cost 20 ms of CPU each, and 1,000 did not finish in a minute.

When does the buffer leave? At the next turn of the loop if no request is open, so a lone call waits for
nobody, and calls that start together leave together. Otherwise after `_WINDOW_S` for each open request. That
balances itself: if answers take H seconds, the number of open requests settles at sqrt(H / window), e.g. 39
requests and 8 ms at 0.3 s. When `_MAX_REQUESTS` are open or `max_in_flight` calls unanswered, the buffer
waits for the next end or answer. Requests are spread over several httpx clients of few connections each.

What may fail: a request that was never sent, or was refused as a whole, did nothing. A request that broke
after it was sent fails exactly the calls that it had not answered, with `AnswerLost`: these may run, or have
run. Both may be sent again under the same ids, for a call that is known by its id is joined and not run twice.

Who may leave: a caller that is cancelled. A call that was not sent yet is left out. If nobody waits for any
call of a request, the request is cut, which the gateway notices; else the gateway is told to end the one call
(`DELETE /v1/jobs/{id}`), by a task of its own, since its caller waits for nothing any more.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import ssl
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TypeAlias
from urllib.parse import quote

import httpx
from pydantic import BaseModel
from pydantic_core import from_json

from sandbox.calls import MIB, ToolCall, ToolResult
from sandbox.errors import (
    AnswerLost,
    CallTooLarge,
    ConfigError,
    Forbidden,
    InternalError,
    Overloaded,
    SandboxError,
    Unauthorized,
    Unavailable,
    from_wire,
)

log = logging.getLogger(__name__)

_MAX_BATCH = 128  # calls in a request: beyond this httpx's share of a call is below 10 µs
_MAX_BODY_BYTES = 4 * MIB  # of a request with several calls, below the gateway's own bound
_WINDOW_S = 0.0002  # for each open request; see the theory of operation
_MAX_REQUESTS = 256  # open at one time
_MAX_CONNECTIONS = 16  # of one httpx client, which searches them all for every request
_IDLE_S = 30.0  # an idle connection is dropped before the gateway (75 s) or a proxy (60 s) does so
_CONNECT_S = 5.0
_PAGE_S = 10.0  # for an answer that waits for no program
_CANCEL_S = 5.0  # for telling the gateway that a caller has left
_MAX_CANCELS = 8  # told at one time
_MARGIN_S = 60.0  # beyond deadline and wall limit: a worker's death, and the way back
_MAX_ERROR_BYTES = 64 * 1024  # of an answer that is an error, and of a line beside its two outputs
_MAX_STATUS_BYTES = 4 * MIB  # of `/v1/status`, which lists every worker
MAX_RESULT_BYTES = 64 * MIB  # of a job's result or a dead letter, whose limits we need not know
_HEADERS = {"accept-encoding": "identity"}  # each line as soon as it is written, with no decoder in between
_BATCH_HEADERS = {**_HEADERS, "accept": "application/x-ndjson", "content-type": "application/json"}

_KEY = re.compile(r"[!-~]+")

_PENDING = 202  # of a job without a result

_CLOSED = "the client was closed; the call may have run"

#: What comes of a call: its result, or the error that kept it from having one.
Answer: TypeAlias = ToolResult | SandboxError


@dataclass(slots=True)
class _Pending:
    """A call that waits. Its future gets an answer, never an exception."""

    call: ToolCall
    body: bytes
    answer: asyncio.Future[Answer]
    request: asyncio.Task[SandboxError] | None = None  # None: it is still in the buffer

    @property
    def is_wanted(self) -> bool:
        """False when its caller was cancelled."""
        return not self.answer.done()


#: The calls of one request that have no answer yet, by their place in it.
_Unanswered: TypeAlias = dict[int, _Pending]


@dataclass(slots=True)
class _Lane:
    """One httpx client and the number of requests that it carries."""

    http: httpx.AsyncClient
    open: int = 0


@dataclass
class Wire:
    """Carries calls to one gateway, at most `max_in_flight` at a time; more wait in the buffer."""

    url: str
    max_in_flight: int
    api_key: str | None = field(default=None, repr=False)
    _buffer: deque[_Pending] = field(default_factory=deque)
    _in_flight: int = 0
    _requests: dict[asyncio.Task[SandboxError], _Unanswered] = field(default_factory=dict)
    _askers: Counter[str] = field(default_factory=Counter)  # of each id
    _cancels: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by id
    _few_cancels: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_CANCELS))
    _lanes: list[_Lane] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None
    _tls: ssl.SSLContext | None = None  # None: not open

    def __post_init__(self) -> None:
        """Refuse a URL that can be nobody's, and a key that no header can carry."""
        self.url = self.url.rstrip("/")
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as exc:
            raise ConfigError(f"{self.url!r} is no URL of a gateway: {exc}") from exc
        if url.scheme not in {"http", "https"} or not url.host:
            raise ConfigError(f"{self.url!r} is no URL of a gateway; write http://HOST:PORT")
        if self.api_key is not None and not _KEY.fullmatch(self.api_key):
            # Or httpx would quote it when it refuses the header.
            raise ConfigError("the API key is empty, or has spaces, line ends or characters beyond ASCII")
        if self.api_key is not None and url.userinfo:
            raise ConfigError(
                "a URL with a user takes the header that the API key needs; leave one of them out"
            )
        self._may_use_proxy = not _is_this_machine(url.host)

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._tls is not None

    def open(self) -> None:
        """Make ready. The first call connects."""
        self._tls = httpx.create_ssl_context()  # 20 ms, so once for all lanes

    async def close(self) -> None:
        """End all requests. Whoever still waits is told."""
        self._tls = None
        if self._timer is not None:
            self._timer.cancel()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, *self._cancels.values(), return_exceptions=True)
        for pending in self._buffer:
            if pending.is_wanted:
                pending.answer.set_result(Unavailable("the client was closed before the call was sent"))
        for lane in self._lanes:
            await lane.http.aclose()

    async def ask(self, call: ToolCall) -> Answer:
        """Send one call and wait for what comes of it. Raises nothing but the caller's own cancellation."""
        if not self.is_open:
            raise RuntimeError("a SandboxClient works inside of `async with` only")
        if (cancel := self._cancels.get(call.id)) is not None:
            await asyncio.wait({cancel})  # or the end of the one that was cancelled would be this one's
        pending = _Pending(call, _body(call), asyncio.get_running_loop().create_future())
        self._buffer.append(pending)
        if len(self._buffer) == _MAX_BATCH:
            self._flush()
        else:
            self._flush_soon()
        self._askers[call.id] += 1
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._left(pending)
            raise
        finally:
            self._askers[call.id] -= 1
            if not self._askers[call.id]:
                del self._askers[call.id]

    async def submit(self, call: ToolCall) -> None:
        """Have a call queued for which nobody waits. Raises what the gateway raised, or `Unavailable`."""
        await self._page("POST", "/v1/jobs", _PAGE_S, _body(call))

    async def result(self, call_id: str, wait_s: float) -> ToolResult | None:
        """What came of a call; None when nothing has within `wait_s`, at most MAX_WAIT_S. Raises as `submit` does."""
        path = f"{_job(call_id)}?wait={wait_s:g}"
        status, body = await self._page("GET", path, wait_s + _PAGE_S, most=MAX_RESULT_BYTES)
        if status == _PENDING:
            return None
        try:
            return ToolResult.model_validate_json(body)
        except ValueError as exc:
            raise InternalError(f"{self.url} gave a result that this client cannot read") from exc

    async def page(
        self, method: str, path: str, within_s: float = _PAGE_S, most: int = _MAX_STATUS_BYTES
    ) -> bytes:
        """The body of a page of the gateway, at most so long. Raises what the gateway raised, or `Unavailable`."""
        _, body = await self._page(method, path, within_s, most=most)
        return body

    async def _page(
        self,
        method: str,
        path: str,
        within_s: float,
        content: bytes | None = None,
        most: int = _MAX_STATUS_BYTES,
    ) -> tuple[int, bytes]:
        lane = self._free_lane()
        lane.open += 1
        try:
            async with (
                asyncio.timeout(within_s),
                lane.http.stream(method, self.url + path, content=content, headers=_HEADERS) as response,
            ):
                if not response.is_success:
                    raise await _refusal(response)
                return response.status_code, await _read(response, most=most)
        except (httpx.TransportError, TimeoutError) as exc:
            raise Unavailable(f"{self.url} does not answer: {_words(exc)}") from exc
        finally:
            lane.open -= 1

    def _left(self, pending: _Pending) -> None:
        """The caller of a call that may be under way was cancelled. It waits for nothing that comes of this."""
        name = pending.call.id
        if pending.request is None or not pending.answer.cancelled() or name in self._cancels:
            return
        self._cancels[name] = task = asyncio.create_task(self._cancel(pending, pending.request))
        task.add_done_callback(lambda _: self._cancels.pop(name))

    async def _cancel(self, pending: _Pending, request: asyncio.Task[SandboxError]) -> None:
        """See to it that the gateway does not run a call for nobody. A gateway that cannot be told runs it."""
        async with self._few_cancels:
            unanswered = self._requests.get(request)
            if unanswered is None or pending.call.id in self._askers or not self.is_open:
                return  # it was answered or cut, or another caller waits for it too
            # Callers that were cancelled together have all left by now.
            if not any(other.is_wanted for other in unanswered.values()):
                request.cancel()
                return
            try:
                await self._page("DELETE", _job(pending.call.id), _CANCEL_S)
            except (SandboxError, ValueError) as exc:
                log.debug("not cancelled", extra={"call": pending.call.id, "reason": str(exc)})

    def _flush_soon(self) -> None:
        if self._buffer and self._timer is None and self.is_open:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_WINDOW_S * len(self._requests), self._flush)

    def _flush(self) -> None:
        """Send what waits, as far as the bounds allow. An answer and the end of a request call this again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._buffer and self._in_flight < self.max_in_flight and len(self._requests) < _MAX_REQUESTS:
            if batch := self._take_batch():
                self._start(batch)

    def _take_batch(self) -> list[_Pending]:
        """The oldest calls that fit into one request."""
        batch: list[_Pending] = []
        most = min(_MAX_BATCH, self.max_in_flight - self._in_flight)
        size = 0
        while self._buffer and len(batch) < most:
            size += len(self._buffer[0].body)
            if batch and size > _MAX_BODY_BYTES:
                break
            pending = self._buffer.popleft()
            if pending.is_wanted:
                batch.append(pending)
        return batch

    def _start(self, batch: list[_Pending]) -> None:
        self._in_flight += len(batch)
        unanswered = dict(enumerate(batch))
        request = asyncio.create_task(self._send(unanswered))
        self._requests[request] = unanswered
        for pending in batch:
            pending.request = request
        request.add_done_callback(self._ended)

    def _ended(self, request: asyncio.Task[SandboxError]) -> None:
        """Nobody whose call was in this request waits any longer. Runs also if it was cut before its first step."""
        rest = list(self._requests.pop(request).values())
        failure = AnswerLost(_CLOSED) if request.cancelled() else request.result()
        if isinstance(failure, CallTooLarge) and len(rest) > 1 and self.is_open:
            # Refused as a whole, so nothing has run, and in a smaller request each may pass.
            self._in_flight -= len(rest)
            self._start(rest[: len(rest) // 2])
            self._start(rest[len(rest) // 2 :])
        else:
            for pending in rest:
                self._settle(pending, _copy(failure))
        self._flush_soon()

    def _settle(self, pending: _Pending, answer: Answer) -> None:
        self._in_flight -= 1
        if pending.is_wanted:
            pending.answer.set_result(answer)
        self._flush_soon()

    def _free_lane(self) -> _Lane:
        """The first with room, so that few connections stay warm and the others idle out."""
        if self._tls is None:
            raise RuntimeError("a SandboxClient works inside of `async with` only")
        for lane in self._lanes:
            if lane.open < _MAX_CONNECTIONS:
                return lane
        limits = httpx.Limits(max_connections=_MAX_CONNECTIONS, keepalive_expiry=_IDLE_S)
        timeout = httpx.Timeout(
            None, connect=_CONNECT_S
        )  # the rest is bounded by one deadline for the request
        http = httpx.AsyncClient(
            verify=self._tls,
            limits=limits,
            timeout=timeout,
            trust_env=self._may_use_proxy,
            headers={"authorization": f"Bearer {self.api_key}"} if self.api_key is not None else None,
        )
        self._lanes.append(_Lane(http))
        return self._lanes[-1]

    async def _send(self, unanswered: _Unanswered) -> SandboxError:
        """One request. Returns what becomes of its calls that it leaves unanswered."""
        lane = self._free_lane()
        lane.open += 1
        try:
            return await self._exchange(lane.http, unanswered)
        finally:
            lane.open -= 1

    async def _exchange(self, http: httpx.AsyncClient, unanswered: _Unanswered) -> SandboxError:
        """Send, and settle each call as its line arrives. Returns what becomes of those without a line."""
        calls = [pending.call for pending in unanswered.values()]
        longest_s = max(call.deadline_s + call.limits.wall_s for call in calls) + _MARGIN_S
        body = b'{"calls":[' + b",".join(pending.body for pending in unanswered.values()) + b"]}"
        try:
            async with (
                asyncio.timeout(longest_s),
                http.stream("POST", f"{self.url}/v1/batch", content=body, headers=_BATCH_HEADERS) as response,
            ):
                if response.status_code != 200:
                    return await _refusal(response)
                async for line in _lines(response, _longest_line(calls)):
                    self._settle(*_read_line(line, unanswered))
        except Exception as exc:  # noqa: BLE001 - a request's boundary: whoever waits must learn of its end
            return _caused(exc, self._meaning(exc))
        return AnswerLost(f"{self.url}: the answer ended early; the call may have run")

    def _meaning(self, exc: Exception) -> SandboxError:
        """What a request that ended with this exception means for its calls."""
        match exc:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                return Unavailable(f"cannot connect to {self.url}: {_words(exc)}; is a gateway up there?")
            case httpx.TransportError() | TimeoutError():
                return AnswerLost(f"{self.url}: {_words(exc)}; the call may have run")
            case ValueError():
                return InternalError(f"{self.url} gave an answer that this client cannot read: {exc}")
        log.error("request failed", exc_info=exc)
        return InternalError(f"the client failed: {_words(exc)}")


def _body(call: ToolCall) -> bytes:
    """What the caller left out stays out, so that the server's defaults hold. Both must know the id."""
    return call.model_copy(update={"id": call.id}).model_dump_json(exclude_unset=True).encode()


def _job(call_id: str) -> str:
    return f"/v1/jobs/{quote(call_id, safe='')}"


class _ErrorBody(BaseModel):
    name: str
    message: str
    retry_after_s: float | None = None


class _ErrorAnswer(BaseModel):
    error: _ErrorBody

    def to_error(self, retry_after_s: float | None = None) -> SandboxError:
        """The exception that the gateway raised."""
        return from_wire(self.error.name, self.error.message, self.error.retry_after_s or retry_after_s)


#: What an answer means that a proxy made. Behind 502 and 504 the gateway may have the calls.
_BY_STATUS: dict[int, type[SandboxError]] = {
    413: CallTooLarge,
    401: Unauthorized,
    403: Forbidden,
    429: Overloaded,
    502: AnswerLost,
    503: Unavailable,
    504: AnswerLost,
}


async def _refusal(response: httpx.Response) -> SandboxError:
    """The exception behind an answer that is not 200: the gateway's own, or what a proxy's status means."""
    header = response.headers.get("retry-after", "")
    retry_after_s = float(header) if header.isdecimal() else None
    try:
        answer = _ErrorAnswer.model_validate_json(await _read(response, _MAX_ERROR_BYTES))
    except ValueError:
        cls = _BY_STATUS.get(response.status_code, InternalError)
        what = f"{response.url} answered {response.status_code} {response.reason_phrase}"
        return cls(f"{what}, and not in the words of a gateway", retry_after_s=retry_after_s)
    return answer.to_error(retry_after_s)


def _read_line(line: bytes, unanswered: _Unanswered) -> tuple[_Pending, Answer]:
    """Takes the call out of `unanswered` that this line of an answer is about."""
    fields = from_json(line)
    index = fields.pop("index", None) if isinstance(fields, dict) else None
    if not isinstance(index, int) or index not in unanswered:
        raise ValueError(f"a line about call {index!r}, which waits for none")
    if "error" in fields:
        answer: Answer = _ErrorAnswer.model_validate(fields).to_error()
    else:
        answer = ToolResult.model_validate(fields)
        if answer.id != unanswered[index].call.id:
            raise ValueError(f"the result of {answer.id} in the place of {unanswered[index].call.id}")
    return unanswered.pop(index), answer


def _is_this_machine(host: str) -> bool:
    """A proxy that the environment names leads to other machines, and knows nothing of ours."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _longest_line(calls: list[ToolCall]) -> int:
    """Two outputs, of which JSON makes at most six bytes from each byte, and the rest of a result."""
    return 12 * max(call.limits.output_bytes for call in calls) + _MAX_ERROR_BYTES


async def _lines(response: httpx.Response, longest: int) -> AsyncIterator[bytes]:
    """Whole lines only. httpx's own splitter also cuts at U+2028 and its like, which JSON lets stand."""
    buffer = bytearray()
    async for chunk in response.aiter_raw():
        buffer += chunk
        if b"\n" in chunk:
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                yield bytes(line)
        if len(buffer) > longest:
            raise ValueError(f"a line is longer than the {longest} bytes that the limits allow")


async def _read(response: httpx.Response, most: int) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > most:
            raise ValueError(f"an answer longer than {most} bytes")
    return bytes(body)


def _copy(error: SandboxError) -> SandboxError:
    """One for each caller: an exception that many raise would collect all their tracebacks."""
    return _caused(error.__cause__, type(error)(error.message, retry_after_s=error.retry_after_s))


def _caused(cause: BaseException | None, error: SandboxError) -> SandboxError:
    error.__cause__ = cause
    return error


def _words(exc: Exception) -> str:
    """What happened, also for the exceptions that carry no words."""
    return str(exc) or type(exc).__name__
