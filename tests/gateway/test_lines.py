"""Lines of a batch gather, and none is held back for longer than it should be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message

from gateway.lines import GATHER_BYTES, send_lines
from gateway.reader import CallerGone
from gateway.replies import Reply, Waiting
from sandbox.calls import CallStatus
from sandbox.errors import InvalidCall, SandboxError

LONG_S = 3600.0  # no test waits for that


class Caller:
    """Sends a batch of so many calls, and reads its answer chunk by chunk."""

    def __init__(self, calls: int) -> None:
        loop = asyncio.get_running_loop()
        self.calls = [Waiting(f"r{n}", f"c{n}", loop.create_future(), 0.0) for n in range(calls)]
        self.chunks: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()
        self.gone = asyncio.Event()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.chunks.put_nowait((message["body"], message.get("more_body", False)))

    @asynccontextmanager
    async def answered(
        self, gather_s: float, *more: SandboxError, known: asyncio.Future[None] | None = None
    ) -> AsyncIterator[asyncio.Task[None]]:
        gone = asyncio.create_task(self._wait_for_end())
        answering = asyncio.create_task(send_lines(self.send, [*self.calls, *more], gone, known, gather_s))
        yield answering
        gone.cancel()

    async def _wait_for_end(self) -> None:
        await self.gone.wait()

    def end(self, index: int, text: str = "") -> None:
        """The result of one call is there."""
        self.calls[index].future.set_result(Reply(CallStatus.OK, b'{"id":"%b"}' % (text or "x").encode()))

    async def pause(self) -> None:
        """Whatever can happen without time passing has happened."""
        for _ in range(10):
            await asyncio.sleep(0)


async def test_the_first_line_goes_at_once_and_the_last_waits_for_nobody() -> None:
    """Between them lines gather, and go with the last."""
    caller = Caller(3)
    async with caller.answered(LONG_S) as answering:
        caller.end(1)
        assert await caller.chunks.get() == (b'{"index":1,"id":"x"}\n', True)
        caller.end(0)
        await caller.pause()
        assert caller.chunks.empty()
        caller.end(2)
        assert await caller.chunks.get() == (b'{"index":0,"id":"x"}\n{"index":2,"id":"x"}\n', False)
        await answering
    assert caller.chunks.empty()


async def test_what_is_much_goes_at_once() -> None:
    """Bytes that make a chunk of their own do not wait for more."""
    caller = Caller(3)
    async with caller.answered(LONG_S) as answering:
        caller.end(0)
        await caller.chunks.get()
        caller.end(1, "x" * GATHER_BYTES)
        body, more = await caller.chunks.get()
        assert (len(body) > GATHER_BYTES, more) == (True, True)
        caller.end(2)
        await answering


async def test_a_line_waits_for_others_only_for_a_while() -> None:
    """It goes although the others do not end."""
    caller = Caller(3)
    async with caller.answered(0.001) as answering:
        for index in range(3):
            caller.end(index)
            assert await caller.chunks.get() == (b'{"index":%d,"id":"x"}\n' % index, index < 2)
        await answering


async def test_items_that_are_no_calls_go_with_the_first_line() -> None:
    """What was wrong from the start is told at once, in its place."""
    caller = Caller(1)
    async with caller.answered(LONG_S, InvalidCall("no")) as answering:
        body, more = await caller.chunks.get()
        assert (body.startswith(b'{"index":1,"error":'), more) == (True, True)
        caller.end(0)
        assert await caller.chunks.get() == (b'{"index":0,"id":"x"}\n', False)
        await answering


async def test_what_is_known_is_said_at_once() -> None:
    """Its caller waits for that to cut other requests; what has gathered goes with it."""
    caller = Caller(3)
    known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with caller.answered(LONG_S, known=known) as answering:
        caller.end(0)
        await caller.chunks.get()
        caller.end(1)
        await caller.pause()
        known.set_result(None)
        assert await caller.chunks.get() == (b'{"index":1,"id":"x"}\n{"known":true}\n', True)
        caller.end(2)
        assert await caller.chunks.get() == (b'{"index":2,"id":"x"}\n', False)
        await answering


async def test_a_caller_that_goes_while_lines_gather() -> None:
    """Nothing more is sent, and the request ends."""
    caller = Caller(3)
    async with caller.answered(LONG_S) as answering:
        caller.end(0)
        await caller.chunks.get()
        caller.end(1)
        caller.gone.set()
        with pytest.raises(CallerGone):
            await answering
    assert caller.chunks.empty()


async def test_no_calls_no_lines() -> None:
    """The answer to an empty batch ends."""
    caller = Caller(0)
    async with caller.answered(LONG_S) as answering:
        await answering
    assert await caller.chunks.get() == (b"", False)
