"""Services that can be measured. Each is behind a name.

    v1              POST /v1/run          of this service, each call in a request of its own
    client          POST /v1/batch        of this service, by its `SandboxClient`, which joins calls
    code-judge      POST /run/long-batch  of code-judge, one submission in a request
    sandbox-fusion  POST /run_code        of SandboxFusion

Nobody sends a call again. Nothing of an answer is trusted: its length is bounded before it is read, and what has no
known shape is `unreadable`. `adapters.py` knows the APIs; to measure another service is to add one there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp

from loadtest.adapters import ADAPTERS, FAULTS, Adapter, of_result, some_words
from loadtest.openloop import CONNECTION_ERROR, REFUSED, UNREADABLE, Reply, Target
from sandbox import Answer, AnswerLost, Overloaded, SandboxClient, ToolCall, ToolResult, Unavailable
from sandbox.process import use_all_descriptors

#: Every name of a target.
TARGETS = ("v1", "client", "code-judge", "sandbox-fusion")

_CONNECT_S = 10.0
_MAX_REST_BYTES = 64 * 1024  # of an answer beside the program's output, and of one that is an error
_NO_BOUND = 1_000_000  # calls in flight, which no machine reaches


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
            return Reply(CONNECTION_ERROR, why=some_words(f"{type(exc).__name__}: {exc}"))
        except ValueError as exc:
            return Reply(UNREADABLE, why=some_words(str(exc)))


class ClientTarget:
    """Our own service, asked as a training job asks: one `SandboxClient` joins the calls of a moment."""

    def __init__(self, client: SandboxClient) -> None:
        self._client = client

    async def ask(self, call: ToolCall) -> Reply:
        """See `Target`."""
        [answer] = await self._client.run_many([call])
        return _of_answer(answer)


def _of_answer(answer: Answer) -> Reply:
    if isinstance(answer, ToolResult):
        return of_result(answer)
    match answer:
        case Overloaded():
            outcome = REFUSED
        case AnswerLost():
            outcome = CONNECTION_ERROR
        case Unavailable():
            # The client raises the same for no connection, and names its cause then.
            outcome = REFUSED if answer.__cause__ is None else CONNECTION_ERROR
        case _:
            outcome = FAULTS.get(type(answer), f"http_{answer.http_status}")
    return Reply(outcome, why=some_words(answer.message))


@asynccontextmanager
async def open_target(url: str, name: str, api_key: str | None = None) -> AsyncIterator[Target]:
    """A target with as many connections, or calls in flight, as it takes: a bound would make the generator late."""
    use_all_descriptors()
    if name == "client":
        # Without patience, since being told to come back later counts as no attempt.
        async with SandboxClient(
            url, api_key=api_key, attempts=1, patience_s=0.0, max_in_flight=_NO_BOUND
        ) as client:
            yield ClientTarget(client)
    else:
        async with _open_session(api_key) as session:
            yield HttpTarget(session, url, ADAPTERS[name]())


def check_calls(name: str, calls: Iterable[ToolCall]) -> None:
    """Raise ConfigError where one of the calls cannot be said in the API of this target."""
    if name in ADAPTERS:
        adapter = ADAPTERS[name]()
        for call in calls:
            adapter.encode(call)


def _open_session(api_key: str | None) -> aiohttp.ClientSession:
    headers = {"content-type": "application/json", "accept-encoding": "identity"}
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        # The loop has patience, and an end of it.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )


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
