"""Results on their way back to whoever waits for them.

One task reads this process's reply stream in Redis and gives each result to the future of its call's record. The
bytes are passed on as they are. A future always gets an answer, and never an exception, so that one nobody
looks at any more is no error:

- the result, when it comes;
- an error, when the call could not be queued, was stopped by somebody, or the process ends;
- a fault, when the deadline has passed by `LATE_S` and no reply has come. The gateway asks the queue then what it
  knows of the call (`Gateway.overdue`), and answers by itself if that takes too long.

Several callers may wait for one call. Whoever goes away leaves; the last one to leave has the call cancelled. One who
joins with an earlier deadline has a future of its own, which is answered by then.

A caller may hand a call over to us that waits for it at another gateway, and leave there. It must know for that when
the queue has us among those who wait for the call (`known`), or its leaving would cancel it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pydantic import ValidationError

from gateway.deadlines import Deadlines
from gateway.metrics import Metrics
from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.errors import Cancelled, InvalidCall, SandboxError, Unavailable
from sandbox.process import told_within
from sandbox.queue import CallQueue, QueuedCall

log = logging.getLogger(__name__)

#: How long one read waits for replies, and so how long a stop may take; reading nothing four times a second
#: costs nothing.
READ_S = 0.25
#: After a read that brought something, before the next one. A read costs some 100 µs of CPU here and in Redis, whatever
#: it brings, so where replies come one by one and fast, they shall come together. One that comes alone does not wait.
GATHER_S = 0.001
#: Between two tries to read while Redis is away.
BACK_OFF_S = 0.25
#: After a deadline: a worker ends what runs at the deadline, and its result is on its way by now.
LATE_S = 0.4
#: After that, for asking the queue. Both together stay below the second that a caller is promised.
ASKING_S = 0.5

_STATUSES = {status.value.encode(): status for status in CallStatus}


class Reply(NamedTuple):
    """A ToolResult as JSON, with its status beside it."""

    status: CallStatus
    raw: bytes


Answer = Reply | SandboxError


@dataclass(slots=True, eq=False)
class Waiting:
    """A call whose answer is due, and how many wait for it."""

    record: str
    call_id: str
    future: asyncio.Future[Answer]
    since_s: float  # by `time.monotonic`, as `due_s` is
    queued: QueuedCall | None = None  # None: somebody else has put it
    due_s: float = math.inf  # after it no reply is waited for
    callers: int = 1
    is_put: bool = False
    is_overdue: bool = False
    early: Answer | None = None  # came before we knew whether it is this call's; see `_receive`
    joined: Waiting | None = None  # what this one waits for, but not for as long
    when_put: Callable[[], None] | None = None  # called when it is put, or over before that


@dataclass(slots=True)
class ReplyRouter:
    """A future for each call in flight."""

    queue: CallQueue
    gateway: str  # names the reply stream
    metrics: Metrics
    #: Told of a call whose deadline has passed without a reply.
    overdue: Callable[[Waiting], None]
    #: Told of a call that has its answer, or needs none any more.
    over: Callable[[QueuedCall], None]
    _waiting: dict[str, Waiting] = field(default_factory=dict)
    _deadlines: Deadlines[Waiting] = field(init=False)

    def __post_init__(self) -> None:
        self._deadlines = Deadlines(self._is_due)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(list(self._waiting.values()))

    def get(self, record: str) -> Waiting | None:
        """What waits for this record."""
        return self._waiting.get(record)

    def is_wanted(self, record: str) -> bool:
        """Whether somebody waits for it, and not in vain."""
        waiting = self._waiting.get(record)
        return waiting is not None and not waiting.is_overdue

    def wants(self, queued: QueuedCall) -> bool:
        """Whether somebody waits for this very putting of a call."""
        waiting = self._waiting.get(queued.record)
        return waiting is not None and waiting.queued is queued and not waiting.is_overdue

    def join(self, record: str, call: ToolCall) -> Waiting | None:
        """One more caller for a call in flight here, or None. Raises InvalidCall when it is a different call."""
        waiting = self._waiting.get(record)
        if waiting is None or waiting.queued is None:
            return None
        if not call.is_again(waiting.queued.call):
            raise different(call.id)
        waiting.callers += 1
        now_s = time.monotonic()
        if now_s + call.deadline_s + LATE_S >= waiting.due_s:
            return waiting
        future = asyncio.get_running_loop().create_future()
        hasty = Waiting(record, call.id, future, now_s, joined=waiting)
        self._is_due_at(hasty, now_s + call.deadline_s + LATE_S)
        # To the future and not to `hasty`, which holds `waiting`: a call that all leave never gets an answer.
        waiting.future.add_done_callback(partial(self._pass_on, hasty.future))
        return hasty

    def expect(self, queued: QueuedCall) -> Waiting:
        """Wait for a call that is about to be put."""
        waiting = self._waiting.get(queued.record)
        if waiting is None:
            waiting = self._add(queued.record, queued.call.id)
        else:
            waiting.callers += 1  # of a job, whose call is put here now
        waiting.queued = queued
        self._is_due_at(waiting, time.monotonic() + queued.call.deadline_s + LATE_S)
        return waiting

    def watch(self, record: str, call_id: str) -> Waiting:
        """Wait for a call that was put before, by whomever."""
        waiting = self._waiting.get(record)
        if waiting is None:
            return self._add(record, call_id)
        waiting.callers += 1
        return waiting

    def leave(self, waiting: Waiting) -> bool:
        """One caller less; whether nobody waits any more for an answer that has not come."""
        if waiting.joined is not None:
            self._deadlines.remove(waiting, waiting.due_s)
        shared = waiting.joined or waiting
        shared.callers -= 1
        if shared.callers or shared.future.done():
            return False
        self._forget(shared)
        return True

    def leaves(self, queued: QueuedCall) -> None:
        """It is about to be put; so what has come under its name until now is of an earlier run."""
        waiting = self._waiting.get(queued.record)
        if waiting is not None and waiting.queued is queued:
            waiting.early = None

    def was_put(self, waiting: Waiting) -> None:
        """The queue has it, and what comes under its name is its answer; that may have come already."""
        waiting.is_put = True
        self._tell(waiting)
        if waiting.early is not None:
            self.answer(waiting.record, waiting.early)

    def known(self, moved: Iterable[Waiting], waitings: Iterable[Waiting]) -> asyncio.Future[None]:
        """Done when all that moved have been put, or are over. `waitings` are all of the request that brought them.

        What joined another request here need not wait for that.
        """
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        brought = Counter(waiting.record for waiting in waitings)
        unknown = {
            record
            for record in {waiting.record for waiting in moved}
            if (one := self._waiting.get(record)) is not None
            and not one.is_put
            and one.callers == brought[record]
        }

        def tell(record: str) -> None:
            unknown.discard(record)
            if not unknown and not told.done():
                told.set_result(None)

        for record in unknown:
            self._waiting[record].when_put = partial(tell, record)
        if not unknown:
            told.set_result(None)
        return told

    def answer(self, record: str, answer: Answer) -> None:
        """Resolve the call's future; an answer that nobody waits for is dropped and counted."""
        waiting = self._waiting.get(record)
        if waiting is None:
            self.metrics.replies_dropped.inc()
            return
        waiting.future.set_result(answer)  # first, so that it is sent before the word that it is known
        self._forget(waiting)
        if isinstance(answer, Reply):
            self.metrics.by_status[answer.status].inc()
            self.metrics.call_seconds.observe(time.monotonic() - waiting.since_s)

    def fault(self, waiting: Waiting, status: CallStatus, reason: str) -> None:
        """Answer for the service."""
        self.answer(waiting.record, fault_of(waiting.call_id, status, reason))

    def abandon(self, why: str) -> int:
        """Answer everything that still waits with Unavailable; say how many."""
        left = list(self._waiting)
        for record in left:
            self.answer(record, Unavailable(why))
        return len(left)

    async def run(self, stop: asyncio.Event) -> None:
        """Read replies until told to stop."""
        away = False
        while not stop.is_set():
            try:
                replies = await self.queue.replies(self.gateway, READ_S)
            except Unavailable as exc:
                if not away:
                    log.warning("replies cannot be read", extra={"reason": exc.message})
                away = True
                await told_within(stop, BACK_OFF_S)
                continue
            if away:
                log.info("replies are read again")
                away = False
            for record, raw in replies:
                self._receive(record, read_reply(record, raw))
            if replies:
                await asyncio.sleep(GATHER_S)

    def _receive(self, record: str, answer: Answer) -> None:
        """Answer, unless the put will only tell what has this name: ours, or what others have left under it."""
        waiting = self._waiting.get(record)
        if waiting is not None and waiting.queued is not None and not waiting.is_put:
            waiting.early = answer
        else:
            self.answer(record, answer)

    def _add(self, record: str, call_id: str) -> Waiting:
        future = asyncio.get_running_loop().create_future()
        waiting = self._waiting[record] = Waiting(record, call_id, future, time.monotonic())
        return waiting

    def _forget(self, waiting: Waiting) -> None:
        del self._waiting[waiting.record]
        self._tell(waiting)
        if waiting.queued is not None:
            self._deadlines.remove(waiting, waiting.due_s)
            self.over(waiting.queued)

    @staticmethod
    def _tell(waiting: Waiting) -> None:
        if waiting.when_put is not None:
            waiting.when_put()
            waiting.when_put = None

    @staticmethod
    def _pass_on(to: asyncio.Future[Answer], future: asyncio.Future[Answer]) -> None:
        if not to.done():
            to.set_result(future.result())

    @staticmethod
    def _leave_behind(hasty: Waiting) -> None:
        if not hasty.future.done():
            reason = "its deadline passed, and the call that it had joined goes on for others"
            hasty.future.set_result(fault_of(hasty.call_id, CallStatus.QUEUE_TIMEOUT, reason))

    def _is_due_at(self, waiting: Waiting, due_s: float) -> None:
        waiting.due_s = due_s
        self._deadlines.add(waiting, due_s)

    def _is_due(self, waiting: Waiting) -> None:
        if waiting.joined is not None:
            self._leave_behind(waiting)
        elif waiting.is_overdue:
            self._give_up(waiting)
        else:
            waiting.is_overdue = True
            self._is_due_at(waiting, time.monotonic() + ASKING_S)
            self.overdue(waiting)

    def _give_up(self, waiting: Waiting) -> None:
        log.error("a call is lost to us", extra={"call": waiting.call_id})
        self.metrics.replies_lost.inc()
        self.fault(
            waiting, CallStatus.INTERNAL_ERROR, "no answer by its deadline, and the queue does not tell why"
        )


def different(call_id: str) -> InvalidCall:
    """For a call under an id that stands for another one."""
    return InvalidCall(f"id: {call_id} names a different call, which is in flight or ended a short time ago")


def read_reply(record: str, raw: bytes) -> Answer:
    """The reply with its status, which is found without reading the rest.

    A worker's JSON starts with the id and the status, in this order. An id holds no character that JSON
    escapes (see CallId), so equal bytes mean this call's result, and the word that follows is its status.
    JSON that starts in another way is read as a whole; if it is no result of this call, it becomes a fault.
    """
    call_id = record.rpartition("|")[2]
    if not raw:
        return Cancelled("somebody has asked for the end of this call")
    start = b'{"id":"%b","status":"' % call_id.encode()
    if raw.startswith(start):
        status = _STATUSES.get(raw[len(start) : raw.find(b'"', len(start))])
        if status is not None:
            return Reply(status, raw)
    try:
        result = ToolResult.model_validate_json(raw)
    except ValidationError:
        log.exception("a reply is no result", extra={"call": call_id})
        return _unreadable(call_id)
    if result.id != call_id:
        log.error("a reply holds another call's result", extra={"call": call_id, "result": result.id})
        return _unreadable(call_id)
    return Reply(result.status, result.model_dump_json().encode())


def _unreadable(call_id: str) -> Reply:
    return fault_of(call_id, CallStatus.INTERNAL_ERROR, "the worker's reply could not be read")


def fault_of(call_id: str, status: CallStatus, reason: str) -> Reply:
    """An answer that the service gives for itself."""
    result = ToolResult(id=call_id, status=status, reason=reason)
    return Reply(status, result.model_dump_json().encode())
