"""Grading mathematics: `POST /v1/grade/math`, `POST /v1/grade/math/batch`.

The first takes one `MathTask` and answers one `MathGrade`; a fault is answered with its error's status, as on
`/v1/run`, so that a client sends it again. The second takes `{"items": [MathTask, ...]}` and answers
`{"results": [MathGrade, ...]}` in order. There a fault is a grade whose `correct` is null, and an item that is no task
is answered `{"error": {"name", "message"}}` in its place.

What was found is kept here, for each tenant alone, so that no tenant learns what another grades.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from gateway.engine import Answer, Door, Engine, EngineRoute, Exchange
from gateway.tenants import Tenant
from sandbox.errors import InvalidCall, SandboxError
from sandbox.grading.math import (
    Comparison,
    MathCache,
    MathGrade,
    MathTask,
    finish,
    prepare,
)

#: Names, texts and brackets of a task: it has at most eleven.
_TASK_PARTS = 32
#: Verdicts that are kept for a tenant: some 20 MB.
_MOST_KEPT = 100_000

_Step = MathGrade | Comparison | InvalidCall


class _Math:
    def __init__(self, engine: Engine) -> None:
        self._ceilings = engine.ceilings
        self._kept: dict[str, MathCache] = {}

    async def one(self, exchange: Exchange) -> Answer:
        """One task, one grade."""
        step = self._prepare(exchange.parse(MathTask, _TASK_PARTS), exchange.tenant)
        if isinstance(step, InvalidCall):
            raise step
        if isinstance(step, Comparison):
            step = await self._finish(step, exchange)
        return Answer(step.model_dump_json().encode())

    async def many(self, exchange: Exchange) -> Answer:
        """Many tasks, as many grades."""
        items = exchange.parse_items(MathTask, _TASK_PARTS)
        steps = [self._prepare(item, exchange.tenant) for item in items]
        exchange.widen(sum(isinstance(step, Comparison) for step in steps))
        answers = await asyncio.gather(*(self._in_place(step, exchange) for step in steps))
        return Answer(b'{"results":[%b]}' % b",".join(answers))

    def _prepare(self, task: MathTask | InvalidCall, tenant: Tenant) -> _Step:
        if isinstance(task, InvalidCall):
            return task
        ceiling_s = self._ceilings.cpu_s
        if task.timeout_s > ceiling_s:
            if "timeout_s" in task.model_fields_set:
                return InvalidCall(
                    f"timeout_s: {task.timeout_s:g} is above this service's ceiling of {ceiling_s:g}"
                )
            task = task.model_copy(update={"timeout_s": ceiling_s})
        return prepare(task, self._cache_of(tenant))

    async def _in_place(self, step: _Step, exchange: Exchange) -> bytes:
        if isinstance(step, InvalidCall):
            return json.dumps(step.to_wire()).encode()
        if isinstance(step, Comparison):
            try:
                step = await self._finish(step, exchange)
            except SandboxError as exc:
                step = MathGrade.of_error(exc)
        return step.model_dump_json().encode()

    async def _finish(self, comparison: Comparison, exchange: Exchange) -> MathGrade:
        kept = self._cache_of(exchange.tenant)
        return await finish(comparison, exchange.run, kept, self._ceilings.wall_s)

    def _cache_of(self, tenant: Tenant) -> MathCache:
        return self._kept.setdefault(tenant.name, MathCache(_MOST_KEPT))


def doors(engine: Engine) -> Sequence[Door]:
    """The routes of graders of mathematics."""
    math = _Math(engine)
    return [
        Door("/v1/grade/math", EngineRoute(engine, math.one)),
        Door("/v1/grade/math/batch", EngineRoute(engine, math.many)),
    ]
