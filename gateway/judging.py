"""Judging as a service: `POST /v1/judge` takes one task and answers one judgement, `/v1/judge/batch` many.

What a task and a judgement are is in `sandbox/grading/task.py`, and what comes of one in `judge.py` there; here is only
the way in and out. A task of many cases is many calls, of which a few are in flight at a time: so many permits its
request holds, and never more than this gateway or the tenant has.

A fault is answered with its error's status, as for `/v1/run`, so that nobody reads it as a verdict. In a batch,
`{"items": [task, ...]}`, it is a judgement in its place with the verdict `fault`; an item that is wrong, or was not
taken, is `{"error": {"name", "message", "retry_after_s"?}}` there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from gateway.engine import MOST_PARTS, Answer, Door, Engine, EngineRoute, Exchange, at_most
from sandbox.errors import CallTooLarge, SandboxError
from sandbox.grading import Run
from sandbox.grading.judge import judge, window_of
from sandbox.grading.task import CaseTask, FunctionTask, JudgeRequest, JudgeTask

#: Calls of one batch that are in flight at a time; more wait for these.
BATCH_WINDOW = 256
#: Each has up to 2,000 characters of output in an answer.
MOST_CASES = 20_000
#: Each has some 180 characters in an answer.
MOST_TESTS = 100_000


def doors(engine: Engine) -> list[Door]:
    """What the service listens to."""
    return [
        Door("/v1/judge", EngineRoute(engine, _judge_one)),
        Door("/v1/judge/batch", EngineRoute(engine, _judge_many)),
    ]


async def _judge_one(exchange: Exchange) -> Answer:
    task = exchange.parse(JudgeRequest).root
    window = exchange.hold(window_of(task))
    judgement = await judge(task, exchange.run, window)
    if error := judgement.to_error():
        raise error
    return Answer(judgement.model_dump_json().encode())


async def _judge_many(exchange: Exchange) -> Answer:
    tasks = await _tasks(exchange)
    window = sum(window_of(task) for task in tasks if not isinstance(task, SandboxError))
    run = at_most(exchange.hold(min(window, BATCH_WINDOW)), exchange.run)
    judgements = await asyncio.gather(*(_judge_in_place(task, run) for task in tasks))
    return Answer(b'{"results":[%b]}' % b",".join(judgements))


async def _tasks(exchange: Exchange) -> Sequence[JudgeTask | SandboxError]:
    """The items of a batch, each a task or what is wrong with it. Raises InvalidCall and CallTooLarge."""
    items = await exchange.parse_items(JudgeRequest, MOST_PARTS)
    tasks = [item.root if isinstance(item, JudgeRequest) else item for item in items]
    cases = sum(len(task.cases) for task in tasks if isinstance(task, CaseTask))
    tests = sum(len(task.tests) for task in tasks if isinstance(task, FunctionTask))
    for number, most, name in ((cases, MOST_CASES, "cases"), (tests, MOST_TESTS, "tests")):
        if number > most:
            raise CallTooLarge(f"items: they have {number} {name} together, and {most} fit into an answer")
    return tasks


async def _judge_in_place(task: JudgeTask | SandboxError, run: Run) -> bytes:
    try:
        if isinstance(task, SandboxError):
            raise task
        return (await judge(task, run)).model_dump_json().encode()
    except SandboxError as exc:
        return json.dumps(exc.to_wire()).encode()
