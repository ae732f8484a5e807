"""The connections of a client to its gateway: what goes over them as HTTP, and how many there are.

One httpx client with `CONNECTIONS` connections, which batches and pages share out beforehand, so that neither ever
waits for the other: `BATCHES` for the requests that carry calls, which may stay open for as long as a program
runs, and the rest for pages, which are answered soon. Pages that wait for a job's result, up to `LONGEST_WAIT_S`, may
have all but two of these: to end a call or to queue one must not take long, however many results are waited for.
Where more questions wait than have a connection, each one waits for less, so that all have their turn within
about `_ROUND_S`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from sandbox.calls import MIB
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

CONNECTIONS = 16  # a gateway's share of a host's, and httpx searches them all for every request
BATCHES = 12  # of them
_PAGES = CONNECTIONS - BATCHES
_QUESTIONS = _PAGES - 2
LONGEST_WAIT_S = 5.0  # of one question for a job's result: for so long another one may have no connection
_ROUND_S = 2.0
_IDLE_S = 30.0  # an idle connection is dropped before the gateway (75 s) or a proxy (60 s) does so
_CONNECT_S = 5.0
PAGE_S = 10.0  # for an answer that waits for no program
MAX_ERROR_BYTES = 64 * 1024  # of an answer that is an error, and of a line beside its two outputs
MAX_STATUS_BYTES = 4 * MIB  # of `/v1/status`, which lists every worker
MAX_RESULT_BYTES = 64 * MIB  # of a job's result or a dead letter, whose limits we need not know
_HEADERS = {"accept-encoding": "identity"}  # each line as soon as it is written, with no decoder in between
_BATCH_HEADERS = {**_HEADERS, "accept": "application/x-ndjson", "content-type": "application/json"}

_KEY = re.compile(r"[!-~]+")


@dataclass
class Link:
    """The connections to one gateway."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    _http: httpx.AsyncClient | None = None  # None: not open
    _few_pages: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_PAGES))
    _few_questions: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_QUESTIONS))
    _questions: int = 0  # asked, or waiting for their turn

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
        return self._http is not None

    def open(self) -> None:
        """Make ready. The first request connects."""
        self._http = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=_IDLE_S),
            # The rest is bounded by one deadline for the request.
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=self._may_use_proxy,
            headers={"authorization": f"Bearer {self.api_key}"} if self.api_key is not None else None,
        )

    def shut(self) -> httpx.AsyncClient | None:
        """Take no further requests; what has to be closed when those at hand have ended."""
        http, self._http = self._http, None
        return http

    @asynccontextmanager
    async def batch(self, content: bytes, handed_over: int) -> AsyncIterator[httpx.Response]:
        """POST calls, the last of which may be handed over; the response when its head is there.

        Whoever asks keeps to `BATCHES`. Raises what httpx does.
        """
        headers = _BATCH_HEADERS | ({"x-hand-over": str(handed_over)} if handed_over else {})
        http = self._opened()
        async with http.stream("POST", f"{self.url}/v1/batch", content=content, headers=headers) as response:
            yield response

    async def question(self, call_id: str, wait_s: float) -> tuple[int, bytes]:
        """What the gateway says of a job, after at most `wait_s`, or less where many ask. Raises as `page` does."""
        self._opened()
        self._questions += 1
        try:
            async with self._few_questions:
                self._still_opened()
                if self._questions > _QUESTIONS:
                    wait_s = min(wait_s, _ROUND_S * _QUESTIONS / self._questions)
                wait_s = min(wait_s, LONGEST_WAIT_S)
                path = f"{job(call_id)}?wait={wait_s:g}"
                return await self.page("GET", path, wait_s + PAGE_S, most=MAX_RESULT_BYTES)
        finally:
            self._questions -= 1

    async def page(
        self,
        method: str,
        path: str,
        within_s: float = PAGE_S,
        content: bytes | None = None,
        most: int = MAX_STATUS_BYTES,
    ) -> tuple[int, bytes]:
        """Status and body of a page, at most so long, so soon after its turn has come.

        Raises what the gateway raised, or `Unavailable`.
        """
        self._opened()
        async with self._few_pages:
            http = self._still_opened()
            try:
                async with (
                    asyncio.timeout(within_s),
                    http.stream(method, self.url + path, content=content, headers=_HEADERS) as response,
                ):
                    if not response.is_success:
                        raise await refusal(response)
                    return response.status_code, await _read(response, most=most)
            except (httpx.TransportError, TimeoutError) as exc:
                raise Unavailable(f"{self.url} does not answer: {words(exc)}") from exc

    def _opened(self) -> httpx.AsyncClient:
        if self._http is None:
            raise RuntimeError("a SandboxClient works inside of `async with` only")
        return self._http

    def _still_opened(self) -> httpx.AsyncClient:
        """For what has waited for its turn. Raises Unavailable."""
        if self._http is None:
            raise Unavailable("the client was closed before this was asked")
        return self._http


def job(call_id: str) -> str:
    """The path of a job."""
    return f"/v1/jobs/{quote(call_id, safe='')}"


class _ErrorBody(BaseModel):
    name: str
    message: str
    retry_after_s: float | None = None


class ErrorAnswer(BaseModel):
    """An error as a gateway says it."""

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


async def refusal(response: httpx.Response) -> SandboxError:
    """The exception behind an answer that is not 200: the gateway's own, or what a proxy's status means."""
    header = response.headers.get("retry-after", "")
    retry_after_s = float(header) if header.isdecimal() else None
    try:
        answer = ErrorAnswer.model_validate_json(await _read(response, MAX_ERROR_BYTES))
    except ValueError:
        cls = _BY_STATUS.get(response.status_code, InternalError)
        what = f"{response.url} answered {response.status_code} {response.reason_phrase}"
        return cls(f"{what}, and not in the words of a gateway", retry_after_s=retry_after_s)
    return answer.to_error(retry_after_s)


async def lines_of(response: httpx.Response, longest: int) -> AsyncIterator[bytes]:
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


def _is_this_machine(host: str) -> bool:
    """A proxy that the environment names leads to other machines, and knows nothing of ours."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def words(exc: Exception) -> str:
    """What happened, also for the exceptions that carry no words."""
    return str(exc) or type(exc).__name__
