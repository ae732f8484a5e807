"""The language of code-judge, which rStar2-Agent and others call: batches of programs, and their output compared.

Its callers send again what is answered `queue_timeout`, rStar2's also what is answered with an HTTP error, and show a
model everything else. So what can be sent again is `queue_timeout`, in its item's place. They are soon out of attempts,
though, so what the service has no room for waits here first, under its permit, and is tried again for as long as it may
wait at all. What comes up before the items of a request are known, above all that a gateway holds all it may, is an
HTTP error.

A batch is read item by item, and one that is wrong is `invalid_input` by itself. code_judge.md has what differs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from starlette.types import Receive, Scope, Send

from gateway.dialects import code_judge_words as words
from gateway.engine import MOST_PARTS, Answer, Door, Engine, EngineRoute, Exchange, Handler, Page, in_turns
from gateway.reader import has_more_parts, read_json
from gateway.routes import retry_after, send_json
from sandbox.calls import ToolCall, ToolResult
from sandbox.errors import InvalidCall, QueueTimeout, SandboxError
from sandbox.grading.math import Comparison, MathGrade, finish, prepare

#: How long a program of a short endpoint may wait, beside the time that it may run.
QUEUE_LIFE_S = 4.0
#: A long batch is answered by then. rStar2's client gives up after 60 s, and sends all of it again.
LONG_BATCH_S = 50.0
#: Between two attempts of what was refused.
AGAIN_S = 1.0

T = TypeVar("T")


class _Item(NamedTuple):
    """A submission, as far as it could be read."""

    sub_id: str
    expected: str | None
    work: ToolCall | Comparison | MathGrade | InvalidCall


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
        item = self._item(words.read(words.Submission, _read(exchange)))
        return Answer(self._dump(await self._result(exchange, item, _now())).encode())

    async def many(self, exchange: Exchange) -> Answer:
        """The results of a batch, in its order."""
        since = _now()
        batch = words.read(words.Batch, _read(exchange))
        most = self.engine.reader.max_batch
        if len(batch.submissions) > most:
            raise InvalidCall(
                f"submissions: {len(batch.submissions)} of them, and one request may have {most}"
            )
        items = await in_turns(self._any_item(value) for value in batch.submissions)
        calls = sum(isinstance(item.work, ToolCall | Comparison) for item in items)
        refused = await self._widen(exchange, calls, since)
        results = await asyncio.gather(*(self._result(exchange, item, since, refused) for item in items))
        listed = ",".join(map(self._dump, results))
        return Answer(f'{{"sub_id":{json.dumps(words.name_in(batch))},"results":[{listed}]}}'.encode())

    def _any_item(self, value: object) -> _Item:
        try:
            submission = words.read(words.Submission, value)
        except InvalidCall as exc:
            return _Item(words.name_in(value), None, exc)
        return self._item(submission)

    def _item(self, submission: words.Submission) -> _Item:
        work: ToolCall | Comparison | MathGrade | InvalidCall
        ceilings = self.engine.ceilings
        try:
            if submission.type == "math":
                work = prepare(words.to_task(submission, ceilings))
            else:
                work = words.to_call(submission, ceilings, is_judge=self.is_judge)
        except InvalidCall as exc:
            work = exc
        return _Item(words.name_in(submission), submission.expected_output, work)

    async def _widen(self, exchange: Exchange, calls: int, since: float) -> SandboxError | None:
        """Hold a permit for all, or say why not. Raises CallTooLarge."""

        async def widen() -> None:
            exchange.widen(calls)

        try:
            await _patiently(exchange, self._last_start(since, self.engine.reader.defaults.wall_s), widen)
        except SandboxError as exc:
            if not exc.is_retryable:
                raise
            return exc
        return None

    async def _result(
        self, exchange: Exchange, item: _Item, since: float, refused: SandboxError | None = None
    ) -> words.Result:
        async def run(call: ToolCall) -> ToolResult:
            if refused is not None:
                raise refused
            return await self._run(exchange, call, since)

        try:
            if isinstance(item.work, InvalidCall):
                raise item.work
            if isinstance(item.work, MathGrade):
                return words.graded(item.sub_id, item.work)
            if isinstance(item.work, Comparison):
                grade = await finish(item.work, run, most_wall_s=self.engine.ceilings.wall_s)
                return words.graded(item.sub_id, grade)
            result = await run(item.work)
            if (fault := result.to_error()) is not None:
                raise fault
            return words.verdict(item.sub_id, item.expected, result)
        except SandboxError as exc:
            return words.refusal(item.sub_id, exc, _now() - since)

    async def _run(self, exchange: Exchange, call: ToolCall, since: float) -> ToolResult:
        last_start = self._last_start(since, call.limits.wall_s)

        due = last_start + call.limits.wall_s

        async def run() -> ToolResult:
            return await exchange.run(call.model_copy(update={"deadline_s": due - _now()}))

        result = await _patiently(exchange, last_start, run)
        if (fault := result.to_error()) is not None and _now() >= due:
            # Whoever was not done with it in time had too much to do, and may have less another time.
            raise QueueTimeout(fault.message)
        return result

    def _last_start(self, since: float, wall_s: float) -> float:
        """When the time that a program may wait is over, and its own time is all that is left of its deadline."""
        due_s = max(wall_s + QUEUE_LIFE_S, LONG_BATCH_S if self.is_long else 0.0)
        return since + min(due_s, self.engine.ceilings.deadline_s) - wall_s

    def _dump(self, result: words.Result) -> str:
        return result.model_dump_json(exclude={"stdout", "stderr"} if self.is_judge else None)


async def _patiently(exchange: Exchange, until: float, attempt: Callable[[], Awaitable[T]]) -> T:
    """What comes of something that is tried again until then while it is refused. The last refusal rises."""
    while True:
        try:
            return await attempt()
        except SandboxError as exc:
            if not exc.is_retryable or exchange.engine.gateway.draining or _now() + AGAIN_S > until:
                raise
        await asyncio.sleep(AGAIN_S)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _read(exchange: Exchange) -> object:
    # Not by pydantic: to it the half of a surrogate pair, which Python's own JSON can carry, spoils the whole body.
    if has_more_parts(exchange.body, MOST_PARTS):
        raise InvalidCall(f"it has more than {MOST_PARTS} names, texts, brackets and commas")
    try:
        body: object = read_json(exchange.body)
    except ValueError as exc:
        raise InvalidCall(f"JSON decode error: {exc}") from exc
    return body


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
    detail = words.complaints(error) if isinstance(error, InvalidCall) else error.message
    return Answer(json.dumps({"detail": detail}).encode(), error.http_status, retry_after(error))
