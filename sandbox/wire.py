"""The wire between a client and a gateway: joins calls into few requests, and gives each call its answer.

Theory of operation. A call joins the buffer and waits for its answer. The buffer leaves as one
`POST /v1/batch`, whose answer is read line by line (NDJSON), so that each call is answered when it is done
and a slow one holds none of its batch. A request costs a millisecond of CPU, and a call in it a few
microseconds, so calls are joined, and `sandbox.link` has only few connections.

When does the buffer leave? At the next turn of the loop if no request is open, so a lone call waits for
nobody, and calls that start together leave together. Otherwise when its first call has waited for a time that grows
with each open request, so that batches grow rather than the number of requests: with answers after 0.3 s about nine
requests are open, and a batch leaves every 30 ms. `max_in_flight` calls unanswered are the other bound; then the
buffer waits for an answer.

What if all requests stay open for a few slow calls each? A call is known by its id, and one that is sent again is
joined and not run twice. So when all connections but the last are taken, the next batch goes over that one and takes
along what the smallest of the open requests still wait for. A line says when the service knows that these calls are
waited for by the new request too, which may have reached another gateway (`x-hand-over`, see `gateway/routes.py`).
Only then are the old requests cut, which frees their connections and ends no call. Until then an answer may come over
either; the first one counts. If the new request is refused as a whole, breaks, or that line is late, the old ones stay
as they are; so does one of a call that is refused alone. Requests of like size are taken along together and large ones
left alone, so that a call which runs for long moves only so often as the logarithm of the number of batches that leave
meanwhile.

What may fail: a request that was never sent, or was refused as a whole, did nothing. A request that broke
after it was sent fails exactly the calls that it had not answered and no other request has, with `AnswerLost`: these
may run, or have run. Both may be sent again under the same ids.

Who may leave: a caller that is cancelled. A call that was not sent yet is left out. If nobody waits for any
call of a request, the request is cut, which the gateway notices; else the gateway is told to end the one call
(`DELETE /v1/jobs/{id}`), by a task of its own, since its caller waits for nothing any more. A call that is
just being handed over is ended after that, or it would be queued anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import httpx

from sandbox.calls import MIB, ToolCall, ToolResult
from sandbox.errors import AnswerLost, CallTooLarge, InternalError, Overloaded, SandboxError, Unavailable
from sandbox.link import (
    BATCHES,
    MAX_ERROR_BYTES,
    MAX_STATUS_BYTES,
    PAGE_S,
    ErrorAnswer,
    Link,
    job,
    lines_of,
    refusal,
    words,
)

log = logging.getLogger(__name__)

_MOST_CALLS = 1024  # in a request: a gateway's own default, which takes 30 ms of its loop
_LEAST_BATCH = 128  # beyond this a request's share of a call is below 10 µs
_MAX_BODY_BYTES = 4 * MIB  # of a request with several calls, below the gateway's own bound
_MAX_MOVED_BYTES = 4 * MIB  # that a request takes along beside these
_WINDOW_S, _WINDOW_GROWTH = 0.0002, 1.7  # and its factor for each open request; see the theory of operation
_LONGEST_WINDOW_S = 0.04
_PACE_S = 0.0003  # for each call that was taken along, before the next one is: a tenth of a gateway's time
_KNOWN_S = 10.0  # for the line that calls which were taken along are known
_REFUSED_S = 1.0  # after calls could not be taken along
_CANCEL_S = 5.0  # for telling the gateway that a caller has left
_MAX_CANCELS = 8  # told at one time
_MARGIN_S = 60.0  # beyond deadline and wall limit: a worker's death, and the way back

_INDEX = re.compile(rb'\{\s*"index"\s*:\s*(\d{1,9})\s*,\s*')
_KNOWN = b'{"known":true}'
_PENDING = 202  # of a job without a result

_CLOSED = "the client was closed; the call may have run"

#: What comes of a call: its result, or the error that kept it from having one.
Answer: TypeAlias = ToolResult | SandboxError


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that waits. Its future gets an answer, never an exception."""

    call: ToolCall
    body: bytes
    answer: asyncio.Future[Answer]
    # Open ones that it was sent by; two while it moves.
    requests: list[_Request] = field(default_factory=list)
    is_over: bool = False  # it has what comes of it

    @property
    def is_wanted(self) -> bool:
        """False when its caller was cancelled."""
        return not self.answer.done()


@dataclass(slots=True, eq=False)
class _Request:
    """A request that is open."""

    unanswered: dict[int, _Pending]  # by their place in it: those without a line
    own: int  # so many of the first places are of calls that it sends, and takes along from nobody
    replaces: list[_Request]  # that is, from these
    has_head: bool = False  # the gateway has taken it
    decided: asyncio.Event = field(default_factory=asyncio.Event)  # whether those are to be replaced
    task: asyncio.Task[SandboxError] = field(init=False)

    def left(self) -> Iterator[_Pending]:
        """The calls that somebody waits for, and that have no answer."""
        return (one for one in self.unanswered.values() if not one.is_over and one.is_wanted)


@dataclass
class Wire:
    """Carries calls to one gateway, at most `max_in_flight` at a time; more wait in the buffer."""

    url: str
    max_in_flight: int
    api_key: str | None = field(default=None, repr=False)
    _buffer: deque[_Pending] = field(default_factory=deque)
    _since: float = 0.0  # when the oldest call in the buffer began to wait for the next request
    # Of batches that were too large; they leave first.
    _halves: deque[list[_Pending]] = field(default_factory=deque)
    _in_flight: int = 0
    _requests: set[_Request] = field(default_factory=set)
    _moving: _Request | None = None  # the one that takes calls along, until its head is there
    _move_at: float = 0.0  # no sooner may the next one
    _most_moved: int = _MOST_CALLS
    _askers: dict[str, int] = field(default_factory=dict)  # of each id
    _cancels: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by id
    _few_cancels: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_CANCELS))
    _timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        """Refuse a URL that can be nobody's, and a key that no header can carry."""
        self._link = Link(self.url, self.api_key)
        self.url = self._link.url
        # A burst of all the calls that may be in flight leaves some connections free.
        share = math.ceil(self.max_in_flight / (BATCHES - 2))
        self._most = min(_MOST_CALLS, max(_LEAST_BATCH, share))

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._link.is_open

    def open(self) -> None:
        """Make ready. The first call connects."""
        self._link.open()

    async def close(self) -> None:
        """End all requests. Whoever still waits is told."""
        http = self._link.shut()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = [request.task for request in self._requests]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._cancels.values(), return_exceptions=True)
        for pending in (*self._buffer, *(one for half in self._halves for one in half)):
            if pending.is_wanted:
                pending.answer.set_result(Unavailable("the client was closed before the call was sent"))
        if http is not None:
            await http.aclose()

    async def ask(self, call: ToolCall) -> Answer:
        """Send one call and wait for what comes of it. Raises nothing but the caller's own cancellation."""
        if not self.is_open:
            raise RuntimeError("a SandboxClient works inside of `async with` only")
        name = call.id
        if (cancel := self._cancels.get(name)) is not None:
            await asyncio.wait({cancel})  # or the end of the one that was cancelled would be this one's
        loop = asyncio.get_running_loop()
        pending = _Pending(call, _body(call), loop.create_future())
        if not self._buffer:
            self._since = loop.time()
        self._buffer.append(pending)
        if len(self._buffer) == self._most:
            self._flush()
        elif self._timer is None:
            self._flush_soon()
        self._askers[name] = self._askers.get(name, 0) + 1
        try:
            return await pending.answer
        except asyncio.CancelledError:
            self._left(pending)
            raise
        finally:
            if self._askers[name] == 1:
                del self._askers[name]
            else:
                self._askers[name] -= 1

    async def submit(self, call: ToolCall) -> None:
        """Have a call queued for which nobody waits. Raises what the gateway raised, or `Unavailable`."""
        await self._link.page("POST", "/v1/jobs", content=_body(call))

    async def result(self, call_id: str, wait_s: float) -> ToolResult | None:
        """What came of a call; None when nothing has within `wait_s`, or sooner. Raises as `submit` does."""
        status, body = await self._link.question(call_id, wait_s)
        if status == _PENDING:
            return None
        try:
            return ToolResult.model_validate_json(body)
        except ValueError as exc:
            raise InternalError(f"{self.url} gave a result that this client cannot read") from exc

    async def page(
        self, method: str, path: str, within_s: float = PAGE_S, most: int = MAX_STATUS_BYTES
    ) -> bytes:
        """The body of a page of the gateway, at most so long. Raises what the gateway raised, or `Unavailable`."""
        _, body = await self._link.page(method, path, within_s, most=most)
        return body

    # ---- who leaves ----

    def _left(self, pending: _Pending) -> None:
        """The caller of a call that may be under way was cancelled. It waits for nothing that comes of this."""
        name = pending.call.id
        if not pending.requests or not pending.answer.cancelled() or name in self._cancels:
            return
        self._cancels[name] = task = asyncio.create_task(self._cancel(pending))
        task.add_done_callback(lambda _: self._cancels.pop(name))

    async def _cancel(self, pending: _Pending) -> None:
        """See to it that the gateway does not run a call for nobody. A gateway that cannot be told runs it."""
        async with self._few_cancels:
            if (moving := self._moving) is not None and moving in pending.requests:
                await moving.decided.wait()
            if pending.is_over or pending.call.id in self._askers or not self.is_open:
                return  # or another caller waits for it too
            # Callers that were cancelled together have all left by now.
            if not any(True for request in pending.requests for _ in request.left()):
                for request in pending.requests:
                    request.task.cancel()
                return
            try:
                await self._link.page("DELETE", job(pending.call.id), _CANCEL_S)
            except (SandboxError, ValueError) as exc:
                log.debug("not cancelled", extra={"call": pending.call.id, "reason": str(exc)})

    # ---- what leaves, and when ----

    def _flush_soon(self) -> None:
        """At the time that the number of open requests gives, or at once if that has passed."""
        if not (self._buffer or self._halves) or not self.is_open:
            return
        if self._timer is not None:
            self._timer.cancel()
        window_s = min(_LONGEST_WINDOW_S, _WINDOW_S * _WINDOW_GROWTH ** len(self._requests))
        due = self._since + (window_s if self._requests else 0.0)
        self._timer = asyncio.get_running_loop().call_at(due, self._flush)

    def _flush(self) -> None:
        """Send what waits, as far as the bounds allow. An answer and the end of a request call this again."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (self._buffer or self._halves) and self._in_flight < self.max_in_flight:
            along: list[_Request] = []
            if len(self._requests) >= BATCHES - 1:
                if self._moving is not None or len(self._requests) == BATCHES:
                    return  # until its head is there, and those that it replaces have ended
                if loop.time() < self._move_at:
                    self._timer = loop.call_at(self._move_at, self._flush)
                    return
                along = self._smallest()
                if not along and self._most_moved:
                    break
            moved = list(dict.fromkeys(pending for old in along for pending in old.left()))
            if batch := self._take_batch(_MOST_CALLS - len(moved)):
                self._start(batch, moved, along)
        self._since = loop.time()

    def _take_batch(self, most: int) -> list[_Pending]:
        """The oldest calls that fit into one request, and no more than so many."""
        most = min(most, self._most, self.max_in_flight - self._in_flight)
        if self._halves:
            half = [pending for pending in self._halves.popleft() if pending.is_wanted]
            if len(half) > most:
                self._halves.appendleft(half[most:])
            return half[:most]
        batch: list[_Pending] = []
        size = 0
        while self._buffer and len(batch) < most:
            size += len(self._buffer[0].body)
            if batch and size > _MAX_BODY_BYTES:
                break
            pending = self._buffer.popleft()
            if pending.is_wanted:
                batch.append(pending)
        return batch

    def _smallest(self) -> list[_Request]:
        """The open requests whose calls the next one takes along: the one with the fewest, and those of like size."""
        open_ones = [(request, list(request.left())) for request in self._requests if request.has_head]
        open_ones.sort(key=lambda one: len(one[1]))
        own = min(len(self._halves[0]) if self._halves else len(self._buffer), self._most)
        chosen: list[_Request] = []
        calls = size = 0
        for request, left in open_ones:
            size += sum(len(pending.body) for pending in left)
            most = _MOST_CALLS - own if chosen else _MOST_CALLS - 1
            is_larger = calls > 0 and len(left) > 2 * calls
            calls += len(left)
            if is_larger or calls > min(most, self._most_moved) or size > _MAX_MOVED_BYTES:
                break
            chosen.append(request)
        return chosen

    def _start(self, batch: list[_Pending], moved: list[_Pending], along: list[_Request]) -> None:
        self._in_flight += len(batch)
        request = _Request(dict(enumerate([*batch, *moved])), len(batch), along)
        for pending in request.unanswered.values():
            pending.requests.append(request)
        if along:
            self._moving = request
            loop = asyncio.get_running_loop()
            self._move_at = loop.time() + len(moved) * _PACE_S
            loop.call_later(_KNOWN_S, self._is_not_known, request)
        self._requests.add(request)
        request.task = asyncio.create_task(self._send(request))
        request.task.add_done_callback(lambda task: self._ended(request, task))

    def _has_head(self, request: _Request) -> None:
        """The gateway has all calls of a request, though the queue may not."""
        request.has_head = True
        if not request.replaces:
            self._most_moved = max(1, self._most_moved)  # what could not be sent with others may have left
        elif len(request.unanswered) == request.own:
            self._is_known(request)  # nobody waits any more for any call of those that it replaces
        self._flush_soon()

    def _is_known(self, request: _Request) -> None:
        """All calls that a request takes along are waited for by it; those that it replaces have done their part."""
        if self._moving is request:
            self._moving = None
            self._most_moved = min(_MOST_CALLS, 2 * self._most_moved)
        for old in request.replaces:
            if all(request in pending.requests for pending in old.left()):
                old.task.cancel()
        request.replaces = []  # or each would keep all before it
        request.decided.set()

    def _is_not_known(self, request: _Request) -> None:
        """Not in time: it goes on beside the old ones, until the line comes after all."""
        if self._moving is request:
            self._moved_nothing(request)
            self._flush_soon()

    def _ended(self, request: _Request, task: asyncio.Task[SandboxError]) -> None:
        """Nobody whose call was in it waits for it any longer. Runs also if it was cut before its first step."""
        self._requests.discard(request)
        request.replaces = []
        failure = AnswerLost(_CLOSED) if task.cancelled() else task.result()
        lost: list[_Pending] = []
        for place, pending in request.unanswered.items():
            if pending.is_over:
                continue
            pending.requests.remove(request)
            if pending.requests:
                continue  # another request has it
            if self._moving is request and place >= request.own:
                self._settle(pending, AnswerLost(f"{self.url}: the connection broke; the call may have run"))
            else:
                lost.append(pending)
        if self._moving is request:
            self._moved_nothing(request)
            if isinstance(failure, CallTooLarge | Overloaded):
                self._most_moved = (len(request.unanswered) - request.own) // 2
            if isinstance(failure, CallTooLarge):
                self._move_at = 0.0  # or one that is too large alone would hold up all others
        if isinstance(failure, CallTooLarge) and len(request.unanswered) > 1 and self.is_open:
            # Refused as a whole, so nothing has run, and in a smaller request each may pass.
            self._in_flight -= len(lost)
            half = len(lost) // 2
            self._halves.extend(part for part in (lost[:half], lost[half:]) if part)
        else:
            for pending in lost:
                self._settle(pending, _copy(failure))
        self._flush_soon()

    def _moved_nothing(self, request: _Request) -> None:
        """What a request was to take along stays where it was."""
        self._moving = None
        self._move_at = asyncio.get_running_loop().time() + _REFUSED_S
        request.decided.set()

    def _heard(self, request: _Request, pending: _Pending, answer: Answer) -> None:
        """The line of a call. An error counts only where no older request has it: another gateway may not know it."""
        if isinstance(answer, SandboxError) and pending.requests and pending.requests[0] is not request:
            pending.requests.remove(request)
        else:
            self._settle(pending, answer)

    def _settle(self, pending: _Pending, answer: Answer) -> None:
        if pending.is_over:
            return  # it was handed over, and answered on both ways
        pending.is_over = True
        pending.requests.clear()
        self._in_flight -= 1
        if not pending.answer.done():
            pending.answer.set_result(answer)
        if self._timer is None:
            self._flush_soon()

    # ---- a request ----

    async def _send(self, request: _Request) -> SandboxError:
        """Send, and settle each call as its line arrives. Returns what becomes of those without a line."""
        calls = [pending.call for pending in request.unanswered.values()]
        longest_s = max(call.deadline_s + call.limits.wall_s for call in calls) + _MARGIN_S
        # Two outputs, of which JSON makes at most six bytes from each byte, and the rest of a result.
        longest_line = 12 * max(call.limits.output_bytes for call in calls) + MAX_ERROR_BYTES
        body = b'{"calls":[' + b",".join(pending.body for pending in request.unanswered.values()) + b"]}"
        try:
            async with (
                asyncio.timeout(longest_s),
                self._link.batch(body, len(calls) - request.own) as response,
            ):
                if response.status_code != 200:
                    return await refusal(response)
                self._has_head(request)
                async for line in lines_of(response, longest_line):
                    if line == _KNOWN:
                        self._is_known(request)
                    else:
                        self._heard(request, *_read_line(line, request.unanswered))
        except Exception as exc:  # noqa: BLE001 - a request's boundary: whoever waits must learn of its end
            return _caused(exc, self._meaning(exc))
        return AnswerLost(f"{self.url}: the answer ended early; the call may have run")

    def _meaning(self, exc: Exception) -> SandboxError:
        """What a request that ended with this exception means for its calls."""
        match exc:
            case httpx.ConnectError() | httpx.ConnectTimeout():
                return Unavailable(f"cannot connect to {self.url}: {words(exc)}; is a gateway up there?")
            case httpx.TransportError() | TimeoutError():
                return AnswerLost(f"{self.url}: {words(exc)}; the call may have run")
            case ValueError():
                return InternalError(f"{self.url} gave an answer that this client cannot read: {exc}")
        log.error("request failed", exc_info=exc)
        return InternalError(f"the client failed: {words(exc)}")


def _body(call: ToolCall) -> bytes:
    """What the caller left out stays out, so that the server's defaults hold. Both must know the id."""
    body = call.model_dump_json(exclude_unset=True).encode()
    if "id" in call.model_fields_set:
        return body
    return b'{"id":"%b",%b' % (
        call.id.encode(),
        body[1:],
    )  # JSON escapes no character of an id, and code is set


def _read_line(line: bytes, unanswered: dict[int, _Pending]) -> tuple[_Pending, Answer]:
    """Takes the call out of `unanswered` that this line of an answer is about."""
    start = _INDEX.match(line)
    index = int(start[1]) if start else None
    if start is None or index not in unanswered:
        raise ValueError(f"a line about call {index!r}, which waits for none")
    item = b"{" + line[start.end() :]
    answer: Answer
    if item.startswith(b'{"error"'):
        answer = ErrorAnswer.model_validate_json(item).to_error()
    else:
        answer = ToolResult.model_validate_json(item)
        if answer.id != unanswered[index].call.id:
            raise ValueError(f"the result of {answer.id} in the place of {unanswered[index].call.id}")
    return unanswered.pop(index), answer


def _copy(error: SandboxError) -> SandboxError:
    """One for each caller: an exception that many raise would collect all their tracebacks."""
    return _caused(error.__cause__, type(error)(error.message, retry_after_s=error.retry_after_s))


def _caused(cause: BaseException | None, error: SandboxError) -> SandboxError:
    error.__cause__ = cause
    return error
