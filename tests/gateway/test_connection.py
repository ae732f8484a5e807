"""What strangers can send before a route sees it, on real connections."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from gateway import connection

from .conftest import Serve, listening, until

PIECE = 16 * 1024
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
#: What comes without end, and what goes before it.
ENDLESS = {
    "address": (b"GET /", b"a" * PIECE),
    "header": (HEALTH + b"x: ", b"a" * PIECE),
    "headers": (HEALTH, b"x: %b\r\n" % (b"a" * PIECE)),
    "padding": (b"", b"\r\n" * (PIECE // 2)),
    "trailers": (
        b"POST /v1/run HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n",
        b"x: %b\r\n" % (b"a" * PIECE),
    ),
}


@pytest.fixture
async def address(serve: Serve) -> AsyncIterator[tuple[str, int]]:
    """Where a gateway listens."""
    async with listening(await serve()) as address:
        yield address


async def answer(address: tuple[str, int], *pieces: bytes) -> bytes:
    """All that comes back until the gateway closes the connection."""
    reader, writer = await asyncio.open_connection(*address)
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
    whole = await reader.read()
    writer.close()
    return whole


@pytest.mark.parametrize("kind", ENDLESS)
async def test_what_leads_nowhere_is_bounded(address: tuple[str, int], kind: str) -> None:
    """A head, and what else is no body, is refused when it is far too long, and the connection closed."""
    first, more = ENDLESS[kind]
    _, writer = await asyncio.open_connection(*address)
    writer.write(first)

    async def go_on() -> None:
        for _ in range(1024):  # 16 MiB
            writer.write(more)
            await writer.drain()

    with pytest.raises(ConnectionError):
        await go_on()
    writer.close()


async def test_a_long_head_passes(address: tuple[str, int]) -> None:
    """One of 60 KiB, and a body of any length in any pieces behind it, is taken."""
    body = json.dumps({"code": "echo " + "1" * 1_000_000}).encode()
    head = b"POST /v1/run HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n" % len(body)
    padded = head + b"x: %b\r\n\r\n" % (b"a" * 60_000)
    pieces = [padded[start : start + 10_000] for start in range(0, len(padded), 10_000)]
    pieces += [body[start : start + 100_000] for start in range(0, len(body), 100_000)]
    assert (await answer(address, *pieces)).startswith(b"HTTP/1.1 200 ")


async def test_a_head_that_stalls_is_given_up(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that never finishes its head does not keep its connection."""
    monkeypatch.setattr(connection, "HEAD_WITHIN_S", 0.01)
    refused = await answer(address, HEALTH)
    assert refused.startswith(b"HTTP/1.1 400 ")
    assert refused.endswith(b"was not whole within 0.01 s")


async def test_a_connection_without_a_request_is_closed(serve: Serve) -> None:
    """Who connects and says nothing is let go of like who says nothing more."""
    async with listening(await serve(), keep_alive_s=0) as address:
        assert await answer(address) == b""


async def test_a_body_is_not_lost_in_an_upgrade(address: tuple[str, int]) -> None:
    """A request with a body that asks for another protocol is refused as that, and nothing of it is read as a request."""
    wish = b"connection: upgrade\r\nupgrade: h2c\r\n"
    body = b"GET /healthz HTTP/1.1\r\n\r\n"
    head = b"POST /v1/run HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (wish, len(body))
    for pieces in ([head + body], [head, body]):
        refused = await answer(address, *pieces)
        assert refused.count(b"HTTP/1.1 ") == 1
        assert refused.startswith(b"HTTP/1.1 400 ")
        assert refused.endswith(b"send it without `Upgrade`")


async def test_an_upgrade_without_a_body_is_ignored(address: tuple[str, int]) -> None:
    """A service may ignore the wish for another protocol, so what many clients try at first is answered."""
    wish = b"connection: close, upgrade\r\nupgrade: h2c\r\n\r\n"
    assert (await answer(address, HEALTH + wish)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("wish", [b"", b"connection: close\r\n"])
async def test_an_answer_that_nobody_takes_is_given_up(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch, wish: bytes
) -> None:
    """It does not lie in our memory for as long as its caller likes."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.01)
    body = json.dumps({"code": "echo " + "1" * 8_000_000}).encode()
    head = b"POST /v1/run HTTP/1.1\r\nhost: x\r\n%bcontent-length: %d\r\n\r\n" % (wish, len(body))
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(address)
        caller.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(caller, head + body)
        await until(lambda: _has_connection_to(caller.getsockname()))
        await until(lambda: not _has_connection_to(caller.getsockname()))


class Recorder(asyncio.Transport):
    """Notes what is done with it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str | list[bytes]] = []

    def writelines(self, parts: Iterable[Any]) -> None:
        self.done.append(list(parts))

    def close(self) -> None:
        self.done.append("close")

    def is_closing(self) -> bool:
        return "close" in self.done


async def test_what_is_written_in_one_turn_leaves_together() -> None:
    """Head and body of an answer are one write, and what is much does not wait for the end of the turn."""
    wire = Recorder()
    joined = connection.Joined(wire, asyncio.get_running_loop())
    joined.write(b"head")
    joined.write(b"body")
    assert wire.done == []
    await asyncio.sleep(0)
    assert wire.done == [[b"head", b"body"]]
    much = b"x" * HIGH_WATER_LIMIT
    joined.write(b"head")
    joined.write(much)
    assert wire.done[1:] == [[b"head", much]]


async def test_what_is_written_leaves_before_the_end() -> None:
    """A connection that closes after its answer has sent it, and nothing is written on a closed one."""
    wire = Recorder()
    joined = connection.Joined(wire, asyncio.get_running_loop())
    joined.write(b"answer")
    joined.close()
    joined.write(b"late")
    await asyncio.sleep(0)
    assert wire.done == [[b"answer"], "close"]


async def test_a_route_is_held_back_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may be slower than a route, and is cut off when it is for too long; then the route goes on."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.01)
    cut = asyncio.Event()

    class Transport(asyncio.Transport):
        def abort(self) -> None:
            cut.set()

    flow = connection.Flow(Transport())
    flow.pause_writing()
    draining = asyncio.create_task(flow.drain())
    await cut.wait()
    assert not draining.done()
    flow.resume_writing()  # as a connection that is lost does
    await draining


async def test_a_caller_that_takes_no_lines_leaves_its_calls(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its permits are given back, though one of its calls still runs."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.01)
    service = await serve()
    calls = {"calls": [{"code": "echo " + "1" * 4_000_000}] * 2 + [{"code": "hold"}]}
    body = json.dumps(calls).encode()
    head = b"POST /v1/batch HTTP/1.1\r\nhost: x\r\naccept: application/x-ndjson\r\ncontent-length: %d\r\n\r\n"
    async with listening(service) as address:
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect(address)
            caller.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(caller, head % len(body) + body)
            await service.worker.has_seen(3)
            await until(lambda: service.gateway.admission.held == 0)


def _has_connection_to(peer: tuple[str, int]) -> bool:
    """Whether this process holds the other end of a connection."""
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it was closed meanwhile, or listens
            if str(link.readlink()).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as end:
                    if end.getpeername() == peer:
                        return True
    return False
