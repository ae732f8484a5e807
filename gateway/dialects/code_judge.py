"""The language of code-judge, which rStar2-Agent and others call: batches of programs, and their output compared.

Its callers send again what is answered `queue_timeout`, rStar2's also what is answered with an HTTP error, and show a
model everything else. So what can be sent again is `queue_timeout`, in its item's place. What comes up before the
items of a request are known, above all that a gateway holds all it may, is an HTTP error.

A batch is read item by item, and one that is wrong is `invalid_input` by itself. code_judge.md has what differs.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import uuid4

from pydantic import BaseModel, Field, ValidationError
from starlette.types import Receive, Scope, Send

from gateway.engine import MOST_PARTS, Answer, Door, Engine, EngineRoute, Exchange, Handler, Page
from gateway.reader import has_more_parts
from gateway.routes import send_json
from sandbox.calls import MIB, CallStatus, Limits, Text, ToolCall, ToolResult, first_error
from sandbox.errors import InvalidCall, Overloaded, SandboxError

#: Of stdout, and again of stderr.
SHOWN_CHARACTERS = 1000
#: So that the head of what is kept, one half, has so many characters, of at most four bytes each.
KEPT_BYTES = 2 * 4 * SHOWN_CHARACTERS
#: How long a program of a short endpoint may wait, beside the time that it may run.
QUEUE_LIFE_S = 4.0
#: A long batch is answered by then. rStar2's client gives up after 60 s, and sends all of it again.
LONG_BATCH_S = 50.0
#: Their `JudgeClient` sends again what was refused at once and without end, so a refusal takes a moment.
PAUSE_S = 1.0
#: Of what is wrong with a request.
MOST_COMPLAINTS = 100

M = TypeVar("M", bound=BaseModel)


class Submission(BaseModel):
    """One program; with what a fork of code-judge adds: `timeout`, `memory_limit`, `cpu_core`, and the type `lean`."""

    sub_id: Text | None = None
    type: Literal["python", "cpp", "math", "lean"]
    options: dict[str, str] | None = None
    solution: Text
    input: Text | None = None
    expected_output: Text | None = None
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False, description="Seconds.")
    memory_limit: int | None = Field(default=None, gt=0, description="MB, of 1024 * 1024 bytes.")
    cpu_core: int | None = Field(default=None, ge=1)


class _Batch(BaseModel):
    """Many of them, none of which is read yet."""

    sub_id: Text | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Any] = Field(min_length=1)


class _Named(BaseModel):
    """As much of a submission as names it, whatever else is wrong."""

    sub_id: Text | None = None


class _Item(NamedTuple):
    """A submission, as far as it could be read."""

    sub_id: str
    expected: str | None
    call: ToolCall | InvalidCall


class _Result(BaseModel):
    """What came of a submission."""

    sub_id: str
    success: bool = False
    run_success: bool = False
    cost: float = 0.0
    stdout: str | None = None
    stderr: str | None = None
    reason: Literal["", "internal_error", "worker_timeout", "queue_timeout", "invalid_input"] = ""


def doors(engine: Engine) -> list[Door]:
    """Their paths."""

    def door(path: str, handler: Handler) -> Door:
        return Door(path, EngineRoute(engine, handler, _refuse))

    return [
        door("/run", _Endpoint(engine).one),
        door("/run/batch", _Endpoint(engine).many),
        door("/run/long-batch", _Endpoint(engine, is_long=True).many),
        door("/judge", _Endpoint(engine, is_judge=True).one),
        door("/judge/batch", _Endpoint(engine, is_judge=True).many),
        door("/judge/long-batch", _Endpoint(engine, is_judge=True, is_long=True).many),
        Door("/ping", Page(lambda _: Answer(b'"pong"')), ("GET",), None),
        Door("/status", _Status(engine), ("GET",)),
    ]


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """Runs submissions. `judge` leaves out what they print, `long` lets them wait."""

    engine: Engine
    is_judge: bool = False
    is_long: bool = False

    async def one(self, exchange: Exchange) -> Answer:
        """The result of the submission in the body."""
        submission = _validate(Submission, _read(exchange))
        [result] = await _results(exchange, [self._item(submission)])
        return Answer(self._dump(result).encode())

    async def many(self, exchange: Exchange) -> Answer:
        """The results of a batch, in its order."""
        batch = _validate(_Batch, _read(exchange))
        most = self.engine.reader.max_batch
        if len(batch.submissions) > most:
            raise InvalidCall(
                f"submissions: {len(batch.submissions)} of them, and one request may have {most}"
            )
        results = await _results(exchange, [self._any_item(value) for value in batch.submissions])
        listed = ",".join(map(self._dump, results))
        return Answer(f'{{"sub_id":{json.dumps(_name(batch.sub_id))},"results":[{listed}]}}'.encode())

    def _any_item(self, value: object) -> _Item:
        try:
            submission = _validate(Submission, value)
        except InvalidCall as exc:
            return _Item(_name_in(value), None, exc)
        return self._item(submission)

    def _item(self, submission: Submission) -> _Item:
        call: ToolCall | InvalidCall
        try:
            call = self._call(submission)
        except InvalidCall as exc:
            call = exc
        return _Item(_name(submission.sub_id), submission.expected_output, call)

    def _call(self, submission: Submission) -> ToolCall:
        if submission.type != "python":
            raise InvalidCall(f"type: {submission.type} is not run here, only python")
        ceilings = self.engine.ceilings
        wall_s = submission.timeout or self.engine.reader.defaults.wall_s
        # Theirs bounds the CPU time of each process by itself.
        cpu_s = min(ceilings.cpu_s, wall_s * (submission.cpu_core or 1))
        limits: dict[str, float] = {"cpu_s": cpu_s, "output_bytes": ceilings.output_bytes}
        if submission.timeout is not None:
            limits["wall_s"] = wall_s
        if submission.memory_limit is not None:
            limits["memory_bytes"] = submission.memory_limit * MIB
        due_s = wall_s + QUEUE_LIFE_S
        return ToolCall(
            code=submission.solution,
            stdin=submission.input or "",
            limits=_validate(Limits, limits),
            deadline_s=min(ceilings.deadline_s, max(due_s, LONG_BATCH_S) if self.is_long else due_s),
            priority="judge" if self.is_judge else "tool",
            # What is compared is needed whole.
            keep_bytes=KEPT_BYTES if submission.expected_output is None else None,
        )

    def _dump(self, result: _Result) -> str:
        return result.model_dump_json(exclude={"stdout", "stderr"} if self.is_judge else None)


def _read(exchange: Exchange) -> object:
    # Not by pydantic: to it the half of a surrogate pair, which Python's own JSON can carry, spoils the whole body.
    if has_more_parts(exchange.body, MOST_PARTS):
        raise InvalidCall(f"it has more than {MOST_PARTS} names, texts and brackets")
    try:
        body: object = json.loads(exchange.body)
    except (ValueError, RecursionError) as exc:
        raise InvalidCall(f"JSON decode error: {exc}") from exc
    return body


def _validate(model: type[M], value: object) -> M:
    """The value as one of these. Raises InvalidCall, whose cause has all that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc


def _name(sub_id: str | None) -> str:
    return sub_id or str(uuid4())


def _name_in(value: object) -> str:
    try:
        return _name(_Named.model_validate(value).sub_id)
    except ValidationError:
        return _name(None)


async def _results(exchange: Exchange, items: list[_Item]) -> list[_Result]:
    started = time.monotonic()
    try:
        outcomes = await exchange.run_all(item.call for item in items)
    except Overloaded as exc:
        await asyncio.sleep(PAUSE_S)
        outcomes = [item.call if isinstance(item.call, InvalidCall) else exc for item in items]
    waited_s = time.monotonic() - started
    return [_result(item, outcome, waited_s) for item, outcome in zip(items, outcomes, strict=True)]


def _result(item: _Item, outcome: ToolResult | SandboxError, waited_s: float) -> _Result:
    if isinstance(outcome, ToolResult):
        fault = outcome.to_error()
        if fault is None:
            return _verdict(item, outcome)
        outcome = fault
    if isinstance(outcome, InvalidCall):
        return _Result(
            sub_id=item.sub_id, reason="invalid_input", stderr=f"error: {_in_their_words(outcome)}"
        )
    if outcome.is_retryable:
        return _Result(sub_id=item.sub_id, reason="queue_timeout", cost=waited_s, stderr=outcome.message)
    return _Result(sub_id=item.sub_id, reason="internal_error", stderr=outcome.message)


def _in_their_words(error: InvalidCall) -> str:
    field, colon, rule = error.message.partition(":")
    words = {"wall_s": "timeout", "memory_bytes": "memory_limit in bytes"}
    field = field.removeprefix("limits.")
    return words.get(field, field) + colon + rule


def _verdict(item: _Item, result: ToolResult) -> _Result:
    ran = result.status is CallStatus.OK
    is_right = item.expected is None or result.stdout.strip() == item.expected.strip()
    return _Result(
        sub_id=item.sub_id,
        success=ran and is_right,
        run_success=ran,
        cost=result.usage.wall_s,
        stdout=result.stdout[:SHOWN_CHARACTERS],
        stderr=_with_end(result.stderr, _end_of(result)),
        reason="worker_timeout" if result.status is CallStatus.TIMEOUT else "",
    )


def _end_of(result: ToolResult) -> str:
    """What a program that was ended could not say itself, in words by which rStar2 knows that it failed."""
    match result.status:
        case CallStatus.TIMEOUT:
            return f"TimeoutError: ended after {result.usage.wall_s:.1f} s"
        case CallStatus.MEMORY_LIMIT:
            return "MemoryError: ended for taking more memory than it may"
        case CallStatus.OUTPUT_LIMIT:
            return "OutputError: ended for printing more than it may"
        case CallStatus.SIGNALED:
            return f"error: ended by signal {result.signal}"
        case _:
            return ""


def _with_end(stderr: str, end: str) -> str:
    """The first characters, with room for a last line of ours."""
    if not end:
        return stderr[:SHOWN_CHARACTERS]
    head = stderr[: SHOWN_CHARACTERS - len(end) - 1]
    return f"{head}\n{end}" if head and not head.endswith("\n") else head + end


class _Status:
    """How many programs wait, and how many can run at a time, which is what one worker of theirs stands for."""

    def __init__(self, engine: Engine) -> None:
        self._gateway = engine.gateway

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            waiting = (await self._gateway.queue.backlog()).waiting
        except SandboxError as exc:
            answer = _refuse(exc)
        else:
            status = {"queue": waiting, "num_workers": self._gateway.readiness.slots}
            answer = Answer(json.dumps(status).encode())
        await send_json(send, answer.status, answer.body, answer.headers)


def _refuse(error: SandboxError) -> Answer:
    """An error in the shape that FastAPI gives it."""
    headers = []
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
    detail = _complaints(error) if isinstance(error, InvalidCall) else error.message
    return Answer(json.dumps({"detail": detail}).encode(), error.http_status, headers)


def _complaints(error: InvalidCall) -> list[dict[str, Any]]:
    """What is wrong with a request, without what it has there, which may be large."""
    if not isinstance(error.__cause__, ValidationError):
        return [{"type": "value_error", "loc": ["body"], "msg": error.message}]
    listed = error.__cause__.errors(include_url=False, include_context=False, include_input=False)
    return [{**one, "loc": ["body", *one["loc"]]} for one in listed[:MOST_COMPLAINTS]]
