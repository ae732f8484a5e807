"""A gateway for the tests of its clients: the wire form of what they send, and nothing behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Self

Call = dict[str, Any]


def result(call: Call, **fields: Any) -> Call:
    """The JSON of an `ok` result of this call that printed its own code."""
    return {"id": call["id"], "status": "ok", "exit_code": 0, "stdout": call["code"]} | fields


@dataclass
class Request:
    """One request, and the ways to answer it."""

    method: str
    path: str
    headers: dict[str, str]
    calls: list[Call]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    started: bool = False

    @property
    def handed_over(self) -> int:
        """How many of the last calls are sent by an open request, too."""
        return int(self.headers.get("x-hand-over", "0"))

    async def known(self) -> None:
        """Say that the calls which were handed over are known."""
        await self.chunk(b'{"known":true}\n')

    async def refuse(self, status: int, name: str, message: str = "no", **headers: str) -> None:
        """Answer the whole request with an error in the gateway's words."""
        body = json.dumps({"error": {"name": name, "message": message}}).encode()
        await self.whole(status, body, **headers)

    async def whole(self, status: int, body: bytes, **headers: str) -> None:
        """Answer with any body."""
        lines = [f"HTTP/1.1 {status} Words", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self.writer.drain()

    async def line(self, index: int, item: Call) -> None:
        """Send one line of an NDJSON answer."""
        await self.chunk(json.dumps({"index": index, **item}, ensure_ascii=False).encode() + b"\n")

    async def head(self) -> None:
        """Begin an NDJSON answer."""
        self.started = True
        head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        """Send any bytes of an NDJSON answer."""
        if not self.started:
            await self.head()
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def end(self) -> None:
        """The last chunk."""
        self.writer.write(b"0\r\n\r\n")
        await self.writer.drain()

    async def cut(self) -> None:
        """Wait until the client has broken the connection."""
        assert await self.reader.read() == b""

    async def until(self, event: asyncio.Event) -> None:
        """Wait for an event. Raises ConnectionError when the client breaks the connection before."""
        gone, told = asyncio.ensure_future(self.reader.read(1)), asyncio.ensure_future(event.wait())
        try:
            await asyncio.wait({gone, told}, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                raise ConnectionResetError
        finally:
            gone.cancel()
            told.cancel()

    def drop(self) -> None:
        """Break the connection."""
        self.writer.transport.abort()


async def answer_all(request: Request) -> None:
    """Every call is `ok`."""
    for index, call in enumerate(request.calls):
        await request.line(index, result(call))
    await request.end()


async def confirm(request: Request) -> None:
    """What was asked is done."""
    await request.whole(200, b"{}")


@dataclass
class FakeGateway:
    """Listens on a free port. `answer` is called with each batch, `job` with each question about a job; lists keep them."""

    answer: Callable[[Request], Awaitable[None]] = answer_all
    job: Callable[[Request], Awaitable[None]] = confirm
    status: tuple[int, bytes] = (200, b'{"ready": true}')
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    jobs: list[Request] = field(default_factory=list)
    most_connections: int = 0
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def cancels(self) -> list[str]:
        """The jobs whose end was asked for."""
        return [request.path for request in self.jobs if request.method == "DELETE"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        await self._server.wait_closed()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        self.most_connections = max(self.most_connections, len(self._connections))
        try:
            while head := await _read_head(reader):
                method, path, headers = head
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                asked = json.loads(body) if body else {}
                calls = asked.get("calls", [asked])
                request = Request(method, path, headers, calls, reader, writer)
                if path == "/v1/status":
                    await request.whole(*self.status)
                elif path.startswith("/v1/jobs"):
                    self.jobs.append(request)
                    await self.job(request)
                else:
                    self.requests.append(request)
                    await self.answer(request)
        except (ConnectionError, asyncio.CancelledError):
            return  # the client has gone, or the test is at its end
        finally:
            self._connections.discard(task)
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]] | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
    except asyncio.IncompleteReadError:
        return None
    first, *rest = head.strip().split("\r\n")
    method, path, _ = first.split()
    return method, path, {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
