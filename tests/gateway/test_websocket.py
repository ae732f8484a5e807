"""What a stranger on a websocket can make a gateway hold or do, on real connections."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from websockets.frames import Frame, Opcode

from gateway import connection, websocket

from .conftest import Serve, Service, listening, until

HANDSHAKE = (
    b"GET /openenv/ws HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
)
STATE = json.dumps({"type": "state"}).encode()


def frame(data: bytes, opcode: Opcode = Opcode.TEXT, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


@asynccontextmanager
async def opened(service: Service) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A websocket that was let in."""
    async with listening(service) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(HANDSHAKE + b"\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
        yield reader, writer
        writer.close()


async def end(service: Service, *pieces: bytes) -> tuple[int, str]:
    """Why a websocket is closed on which this comes."""
    async with opened(service) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
        said = await reader.read()
        start = said.rindex(b"\x88")
    await until(lambda: service.gateway.admission.held_bytes == 0)
    return int.from_bytes(said[start + 2 : start + 4]), said[start + 4 :].decode()


@pytest.fixture
async def service(serve: Serve) -> Service:
    """With bounds that are met soon."""
    return await serve(gateway={"max_body_bytes": 65_536, "max_in_flight_bytes": 100_000})


async def test_many_small_frames_end_a_websocket(service: Service) -> None:
    """Pings cost more to answer than to send."""
    flood = frame(b"", Opcode.PING) * 1000
    assert await end(service, flood) == (1008, "more than 64 frames at once")


async def test_a_few_pings_are_answered(service: Service) -> None:
    """And so is the message behind them, whose bytes are nobody's from then on."""
    async with opened(service) as (reader, writer):
        writer.write(frame(b"a", Opcode.PING) * 10 + frame(STATE))
        assert await reader.readexactly(30) == b"\x8a\x01a" * 10
        assert (await reader.readuntil(b"}}")).endswith(b'"last_exit_code": 0}}')
        await until(lambda: service.gateway.admission.held_bytes == 0)


async def test_a_message_is_as_short_as_a_body(service: Service) -> None:
    """It is refused at its first byte, whether it comes in one part or in many."""
    code, _ = await end(service, frame(b" " * 65_537)[:100])
    assert code == 1009
    parts = frame(b" " * 40_000, fin=False) + frame(b" " * 40_000, Opcode.CONT)[:100]
    code, _ = await end(service, parts)
    assert code == 1009


async def test_a_message_comes_in_few_parts(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty parts would fill a list of ours without end."""
    monkeypatch.setattr(websocket, "MOST_PARTS", 20)
    parts = frame(b"", fin=False) + frame(b"", Opcode.CONT, fin=False) * 20
    assert await end(service, parts) == (1009, "a message in more than 20 parts")


@pytest.mark.parametrize("begun", [frame(STATE)[:7], frame(STATE, fin=False)])
async def test_a_message_that_stalls_is_given_up(
    service: Service, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """In the middle of a part as between two."""
    monkeypatch.setattr(websocket, "BODY_WITHIN_S", 0.01)
    assert await end(service, begun) == (1008, "a message was not whole within 0.01 s")


async def test_bytes_of_messages_count_with_those_of_requests(service: Service) -> None:
    """What has come of unfinished messages is held against the gateway's bound on bytes, and given back."""
    async with opened(service) as (_, writer):
        writer.write(frame(b" " * 60_000)[:-1])
        await until(lambda: service.gateway.admission.held_bytes > 60_000)
        code, reason = await end_beside(service, frame(b" " * 60_000))
    assert (code, reason) == (1013, "this gateway holds as many bytes of requests as it may")
    await until(lambda: service.gateway.admission.held_bytes == 0)


async def end_beside(service: Service, piece: bytes) -> tuple[int, str]:
    async with opened(service) as (reader, writer):
        writer.write(piece)
        said = await reader.read()
        start = said.rindex(b"\x88")
        return int.from_bytes(said[start + 2 : start + 4]), said[start + 4 :].decode()


STEP = json.dumps({"type": "step", "data": {"code": "echo " + "1" * 60_000}}).encode()


@pytest.mark.parametrize("said", [frame(STEP), frame(b"a" * 125, Opcode.PING) * 500], ids=["steps", "pings"])
async def test_answers_that_nobody_takes_are_given_up(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    """A caller who reads nothing does not fill our memory with answers for as long as it likes."""
    monkeypatch.setattr(connection, "UNREAD_S", 0.01)
    monkeypatch.setattr(websocket, "MOST_FRAMES", 1_000_000)
    service = await serve()
    async with listening(service) as address:
        with socket.socket() as caller:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            caller.connect(address)
            caller.setblocking(False)
            with pytest.raises(ConnectionError):
                await say_for_ever(caller, said)
    await until(lambda: service.gateway.admission.held_bytes == 0)


async def say_for_ever(caller: socket.socket, said: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(caller, HANDSHAKE + b"\r\n")
    while True:
        await loop.sock_sendall(caller, said)


async def test_a_head_that_is_no_handshake_is_refused(service: Service) -> None:
    """With a word, and the connection is closed: one with too long a line, and one without a key."""
    long = HANDSHAKE + b"x: " + b"a" * 9000 + b"\r\n\r\n"
    assert (await refused(service, long)).startswith(b"HTTP/1.1 431 ")
    keyless = HANDSHAKE.replace(b"sec-websocket-key", b"x") + b"\r\n"
    assert (await refused(service, keyless)).startswith(b"HTTP/1.1 400 ")


async def refused(service: Service, head: bytes) -> bytes:
    async with listening(service) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(head)
        said = await reader.read()
        writer.close()
        return said


async def test_a_websocket_waits_for_no_answer(service: Service) -> None:
    """Behind a request that is not answered yet the wish for one is ignored, and two answers come in order."""
    body = b'{"code": "hold 1"}'
    run = b"POST /v1/run HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with listening(service) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(run + HANDSHAKE + b"\r\n")
        await service.worker.has_seen(1)
        service.worker.released.set()
        said = await reader.readuntil(b"Not Found")
        writer.close()
    assert said.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 404 " in said


async def test_there_is_no_websocket_elsewhere(service: Service) -> None:
    """Other paths refuse one, and it is counted."""
    elsewhere = HANDSHAKE.replace(b"/openenv/ws", b"/v1/run") + b"\r\n"
    assert (await refused(service, elsewhere)).startswith(b"HTTP/1.1 403 ")
    count = service.gateway.metrics.requests.labels("/v1/run", 403)
    assert count._value.get() == 1


async def test_without_a_dialect_that_needs_them_there_are_no_websockets(serve: Serve) -> None:
    """The wish for one is ignored."""
    service = await serve(gateway={"dialects": "code_judge"})
    assert (
        await refused(service, HANDSHAKE.replace(b"upgrade\r", b"close, upgrade\r") + b"\r\n")
    ).startswith(b"HTTP/1.1 404 ")
