"""Results on their way back to whoever waits for them.

One task reads this process's reply list in Redis and gives each result to the future of its call id. The
bytes are passed on as they are. A future always gets an answer, and never an exception, so that one nobody
looks at any more is no error:

- the result, when it comes;
- an error, when the call could not be queued or the process ends;
- a fault, when no reply has come by the latest moment at which it could. A program may start just before
  the call's deadline and run for its `wall_s`; the margin on top is a worker's lease, after which a dead
  worker's call is taken up by another one, and the way back.

The reader never cancels a blocking read (a cancelled pop loses what it popped): it ends after the read at
hand.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pydantic import ValidationError

from gateway.metrics import Metrics
from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.errors import InvalidCall, SandboxError, Unavailable
from sandbox.process import told_within

log = logging.getLogger(__name__)

#: How long one read waits for replies, and so how long a stop may take; reading nothing four times a second
#: costs nothing.
READ_S = 0.25
#: Between two tries to read while Redis is away.
BACK_OFF_S = 0.25

_STATUSES = {status.value.encode(): status for status in CallStatus}


class Reply(NamedTuple):
    """A ToolResult as JSON, with its status beside it."""

    status: CallStatus
    raw: bytes


Answer = Reply | SandboxError


class Inbox(Protocol):
    """What this file needs of the queue."""

    async def replies(self, gateway: str, block_s: float = 1.0) -> list[tuple[str, bytes]]:
        """Call ids and results, as many as there are. Raises Unavailable."""


@dataclass(slots=True)
class _Waiting:
    call: ToolCall
    future: asyncio.Future[Answer]
    since: float
    timer: asyncio.TimerHandle


class ReplyRouter:
    """A future for each call in flight."""

    def __init__(self, inbox: Inbox, gateway: str, margin_s: float, metrics: Metrics) -> None:
        """`gateway` names the reply list; `margin_s` is the patience beyond deadline and wall limit."""
        self._inbox = inbox
        self._gateway = gateway
        self._margin_s = margin_s
        self._metrics = metrics
        self._by_status = {status: metrics.calls.labels(status.value) for status in CallStatus}
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, call: ToolCall) -> tuple[asyncio.Future[Answer], bool]:
        """The future of this call's answer, and whether it is new, so that the call must be queued.

        The same call sent again while it is in flight (a caller that lost its connection) shares the first
        one's future. Another call under an id in flight raises InvalidCall.
        """
        waiting = self._waiting.get(call.id)
        if waiting is not None:
            if waiting.call != call:
                raise InvalidCall(f"id: {call.id} names a different call that is in flight")
            return waiting.future, False
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        patience_s = call.deadline_s + call.limits.wall_s + self._margin_s
        timer = loop.call_later(patience_s, self._give_up, call.id, patience_s)
        self._waiting[call.id] = _Waiting(call, future, loop.time(), timer)
        return future, True

    def answer(self, call_id: str, answer: Answer) -> None:
        """Resolve the call's future; an answer that nobody waits for is dropped and counted."""
        waiting = self._waiting.pop(call_id, None)
        if waiting is None:
            self._metrics.replies_dropped.inc()
            return
        waiting.timer.cancel()
        waiting.future.set_result(answer)
        if isinstance(answer, Reply):
            self._by_status[answer.status].inc()
            self._metrics.call_seconds.observe(asyncio.get_running_loop().time() - waiting.since)

    def abandon(self, why: str) -> int:
        """Answer everything that still waits with Unavailable; say how many."""
        left = list(self._waiting)
        for call_id in left:
            self.answer(call_id, Unavailable(why))
        return len(left)

    async def run(self, stop: asyncio.Event) -> None:
        """Read replies until told to stop."""
        away = False
        while not stop.is_set():
            try:
                replies = await self._inbox.replies(self._gateway, READ_S)
            except Unavailable as exc:
                if not away:
                    log.warning("replies cannot be read", extra={"reason": exc.message})
                away = True
                await told_within(stop, BACK_OFF_S)
                continue
            if away:
                log.info("replies are read again")
                away = False
            for call_id, raw in replies:
                self.answer(call_id, read_reply(call_id, raw))

    def _give_up(self, call_id: str, patience_s: float) -> None:
        log.error("a reply is lost", extra={"call": call_id, "waited_s": patience_s})
        self._metrics.replies_lost.inc()
        self.answer(call_id, _fault(call_id, f"no reply came within {patience_s:g} s"))


def read_reply(call_id: str, raw: bytes) -> Reply:
    """The reply with its status, which is found without reading the rest.

    A worker's JSON starts with the id and the status, in this order. An id holds no character that JSON
    escapes (see CallId), so equal bytes mean this call's result, and the word that follows is its status.
    JSON that starts in another way is read as a whole; if it is no result of this call, it becomes a fault.
    """
    start = b'{"id":"%b","status":"' % call_id.encode()
    if raw.startswith(start):
        status = _STATUSES.get(raw[len(start) : raw.find(b'"', len(start))])
        if status is not None:
            return Reply(status, raw)
    try:
        result = ToolResult.model_validate_json(raw)
    except ValidationError:
        log.exception("a reply is no result", extra={"call": call_id})
        return _fault(call_id, "the worker's reply could not be read")
    if result.id != call_id:
        log.error("a reply holds another call's result", extra={"call": call_id, "result": result.id})
        return _fault(call_id, "the worker's reply could not be read")
    return Reply(result.status, result.model_dump_json().encode())


def _fault(call_id: str, reason: str) -> Reply:
    result = ToolResult(id=call_id, status=CallStatus.INTERNAL_ERROR, reason=reason)
    return Reply(result.status, result.model_dump_json().encode())
