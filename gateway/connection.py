"""One HTTP connection, as uvicorn reads it, bounded where no route bounds it.

That is before a request's head is whole, and after its answer is written.

No key has been looked at before a head is whole, so that is open to whoever reaches the port. uvicorn by itself takes
a head however long it is and comes, which fills the memory at the speed of the line, and keeps a connection on which
nothing ever comes. What is refused here gets a 400 in plain text, and the connection closes. Bytes that neither end a
head nor belong to a body are a head, what stands between the chunks of a body and behind them, or padding; all of
these have the same bound.

A route that answers waits here until its caller has taken most of what is here already, though not without end. Once
it has handed over the last part, the answer may lie here as a whole, 12 MiB of it, and closing a connection waits for
its reader without end.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

#: Beyond the read in which a head begins (256 KiB at most). Common servers and proxies take less.
MOST_HEAD_BYTES = 64 * 1024
#: From the first of such bytes. As long as a body may take.
HEAD_WITHIN_S = 30.0
#: A caller that takes nothing of its answer for so long is gone; it would hold its permits, or our memory, for ever.
UNREAD_S = 60.0


class Flow(FlowControl):
    """uvicorn's, which holds routes back while their caller is slower than they are."""

    async def drain(self) -> None:
        """Wait until the caller has taken most of what is here. One that takes too long is cut off."""
        try:
            async with asyncio.timeout(UNREAD_S):
                await super().drain()
        except TimeoutError:
            self._transport.abort()
            await super().drain()  # until the connection is lost, of which the route hears as of any other


class Joined(asyncio.Transport):
    """A transport by which what is written in one turn of the loop leaves together.

    uvicorn writes the head and the body of an answer apart, and uvloop makes a system call of each.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:  # type: ignore[override]  # bytes are all that uvicorn writes
        """Let it leave at the end of this turn; or at once where much has gathered: only then a slow caller shows."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size >= HIGH_WATER_LIMIT:
            self._flush()

    def close(self) -> None:
        """Close once all that was written has left."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether it is closed, or about to be."""
        return self._transport.is_closing()

    def get_write_buffer_size(self) -> int:
        """Bytes that the caller has not taken yet."""
        return self._transport.get_write_buffer_size()

    def alone(self) -> asyncio.Transport:
        """The transport itself, with all that was written here on its way."""
        self._flush()
        return self._transport

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.writelines(parts)


class Unread:
    """Of a protocol: cuts a caller who takes nothing of what was written for it, from `_watch_unread` on."""

    loop: asyncio.AbstractEventLoop
    transport: Any
    _unread_is_due: asyncio.TimerHandle | None = None

    def _watch_unread(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._unread_is_due = self.loop.call_later(UNREAD_S, self._cut_unless_below, left)

    def _cut_unless_below(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._watch_unread()
        else:
            self.transport.abort()

    def _stop_watching(self) -> None:
        if self._unread_is_due is not None:
            self._unread_is_due.cancel()
            self._unread_is_due = None


class Connection(Unread, HttpToolsProtocol):
    """uvicorn's, which does the reading."""

    _advanced = False  # whether the read that is looked at ended a head, or brought something of a body
    _head_bytes = 0
    _head_is_due: asyncio.TimerHandle | None = None
    _refusal: str | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for a first request as long as for a further one."""
        super().connection_made(transport)
        self.flow = Flow(transport)
        self.transport = Joined(transport, self.loop)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come or go."""
        self._stop_clock()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and count what leads nowhere yet."""
        self._advanced = False
        super().data_received(data)
        if self._advanced:
            self._head_bytes = 0
            self._stop_clock()
        elif not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(f"the head of a request is longer than {MOST_HEAD_BYTES} bytes")
            elif self._head_is_due is None:
                late = f"the head of a request was not whole within {HEAD_WITHIN_S:g} s"
                self._head_is_due = self.loop.call_later(HEAD_WITHIN_S, self._refuse, late)

    def on_headers_complete(self) -> None:
        """Refuse what would lose its body: httptools reads none behind a head that asks for another protocol."""
        self._advanced = True
        if self.parser.should_upgrade() and any(
            name in _ANNOUNCE_A_BODY and value != b"0" for name, value in self.headers
        ):
            self._refusal = "a request with a body cannot ask for another protocol; send it without `Upgrade`"
            raise ValueError(self._refusal)  # which httptools passes on as a parser's error
        super().on_headers_complete()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection over to `websocket.py`. A caller has nothing to say before that has answered."""
        self._stop_clock()
        self._stop_watching()
        assert isinstance(self.transport, Joined)
        self.transport = self.transport.alone()
        super().handle_websocket_upgrade()

    def _should_upgrade(self) -> bool:
        """Not where an answer is still due: two protocols would write at the same time. The wish is ignored then."""
        return super()._should_upgrade() and (self.cycle is None or self.cycle.response_complete)

    def on_body(self, body: bytes) -> None:
        """A part of a body; routes bound these."""
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The end of a request."""
        self._advanced = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The caller is slower than we are. Nothing is written until it has taken most of what is here."""
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        """It has."""
        self._stop_watching()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """In our words, where we have any."""
        super().send_400_response(self._refusal or msg)

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: the request is answered as if it had not asked, and uvicorn would advise a package."""

    def _refuse(self, why: str) -> None:
        if not self.transport.is_closing():
            self.send_400_response(why)

    def _stop_clock(self) -> None:
        if self._head_is_due is not None:
            self._head_is_due.cancel()
            self._head_is_due = None


_ANNOUNCE_A_BODY = {b"content-length", b"transfer-encoding"}
