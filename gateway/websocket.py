"""One websocket, as uvicorn speaks it, bounded where no route bounds it.

Its head was read by `connection.py`, within that file's bounds, and its route decides at once whether it is let in.
From then on there is a stranger who may keep it open for hours, so that what it can make us hold or do is bounded here:

- what it sends counts among the bytes that admission bounds until it is answered; a message that began must be whole
  in time, in few parts, and is no longer than a request's body;
- frames that are many and small, such as pings, cost more than they bring, and are few;
- what it does not read is bounded as any answer is, and nothing more is read from it meanwhile: by itself uvicorn
  answers pings without end to somebody who takes none of the answers.

Messages are not compressed: a small one could grow to the largest, and each connection would hold the tables for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode

from gateway.admission import Admission
from gateway.connection import Unread
from gateway.reader import BODY_WITHIN_S, CallerGone
from sandbox.errors import Overloaded

#: What came is looked at in pieces of this length, each in milliseconds also where it is made of the smallest frames.
PIECE_BYTES = 16 * 1024
#: In one piece. A caller sends a message and waits for its answer.
MOST_FRAMES = 64
#: Of one message. Clients send one in one part; some proxies cut it into parts of 4 KiB.
MOST_PARTS = 8192
#: Between pings of ours. Balancers cut what is silent for a minute.
PING_EVERY_S = 30.0
#: For a caller whose event loop is busy meanwhile, as in a training step; who is gone for so long is gone.
PONG_WITHIN_S = 600.0


def websockets_of(admission: Admission) -> type[asyncio.Protocol]:
    """The protocol of the websockets of one gateway, for uvicorn to make instances of."""

    class OfGateway(WebSocket):
        _admission = admission

    return OfGateway


class WebSocket(Unread, WebSocketsSansIOProtocol):
    """uvicorn's, which does the reading."""

    _admission: Admission
    _coming_bytes = 0  # of a message that is not whole
    _message_is_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Nothing has come yet but the head."""
        super().connection_made(transport)
        self._unanswered: deque[int] = deque()  # the bytes of each message that waits for its answer

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will come or go."""
        self._admission.give_back_bytes(self._coming_bytes + sum(self._unanswered))
        self._coming_bytes = 0
        self._unanswered.clear()
        self._stop_clock()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, within the bounds."""
        if not self.handshake_initiated:
            self._read_head(data)
        elif self._hold(len(data)):
            for start in range(0, len(data), PIECE_BYTES):
                if self.transport.is_closing():
                    return
                super().data_received(data[start : start + PIECE_BYTES])
            if self.frames or self.conn.reader.buffer:
                self._start_clock()
            else:
                self._stop_clock()
                self._admission.give_back_bytes(self._coming_bytes)  # of pings, or behind a message's end
                self._coming_bytes = 0

    def send_receive_event_to_app(self) -> None:
        """A message is whole."""
        self._unanswered.append(self._coming_bytes)
        self._coming_bytes = 0
        super().send_receive_event_to_app()

    def handle_events(self) -> None:
        """Look at the frames of a piece, unless they are too many."""
        if len(self.conn.events) > MOST_FRAMES:
            self._fail(CloseCode.POLICY_VIOLATION, f"more than {MOST_FRAMES} frames at once")
            return
        super().handle_events()
        if len(self.frames) > MOST_PARTS:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"a message in more than {MOST_PARTS} parts")

    async def receive(self) -> Any:
        """The next message. Its bytes count until it is answered."""
        message = await super().receive()
        if not self.writable.is_set():
            self.transport.pause_reading()  # which uvicorn has just resumed
        return message

    async def send(self, message: Any) -> None:
        """What a route says. Raises CallerGone.

        uvicorn takes a refusal for a route that forgot to answer, and logs that as an error.
        """
        if message["type"] == "websocket.send" and self._unanswered:
            self._admission.give_back_bytes(self._unanswered.popleft())
        try:
            await super().send(message)
        except ClientDisconnected as exc:
            raise CallerGone from exc
        if message["type"] == "websocket.http.response.body" and not message.get("more_body", False):
            self.handshake_complete = True

    def pause_writing(self) -> None:
        """The caller reads more slowly than we write. Nothing is read from it until it has caught up."""
        super().pause_writing()
        self.transport.pause_reading()
        self._watch_unread()

    def resume_writing(self) -> None:
        """It has."""
        self._stop_watching()
        if not self.read_paused:
            self.transport.resume_reading()
        super().resume_writing()

    def _read_head(self, data: bytes) -> None:
        super().data_received(data)
        if not self.handshake_initiated:
            # `websockets` could not read it. uvicorn would keep the connection without a word.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()

    def _hold(self, size: int) -> bool:
        if self.transport.is_closing():
            return False
        try:
            self._admission.take_bytes(size)
        except Overloaded:
            self._fail(CloseCode.TRY_AGAIN_LATER, "this gateway holds as many bytes of requests as it may")
            return False
        self._coming_bytes += size
        return True

    def _fail(self, code: CloseCode, reason: str) -> None:
        if not self.transport.is_closing():
            self.conn.fail(code, reason)
            self.handle_parser_exception()

    def _start_clock(self) -> None:
        if self._message_is_due is None:
            late = f"a message was not whole within {BODY_WITHIN_S:g} s"
            self._message_is_due = self.loop.call_later(
                BODY_WITHIN_S, self._fail, CloseCode.POLICY_VIOLATION, late
            )

    def _stop_clock(self) -> None:
        if self._message_is_due is not None:
            self._message_is_due.cancel()
            self._message_is_due = None
