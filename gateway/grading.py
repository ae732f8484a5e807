"""Grading mathematics: `POST /v1/grade/math`, `POST /v1/grade/math/batch`.

The first takes one `MathTask` and answers one `MathGrade`; a fault is answered with its error's status, as on
`/v1/run`, so that a client sends it again. The second takes `{"items": [MathTask, ...]}` and answers
`{"results": [MathGrade, ...]}` in order. There a fault, and an item that is no task, is a grade whose `correct` is
null, with the error beside it: whoever reads rewards reads one thing.

What was found is kept here, for each tenant alone, so that no tenant learns what another grades.
"""

from __future__ import annotations

import asyncio

from gateway.engine import Answer, Door, Engine, EngineRoute, Exchange, at_most, in_turns
from gateway.tenants import Tenant
from sandbox.errors import InvalidCall, SandboxError
from sandbox.grading import Run
from sandbox.grading.math import Comparison, MathCache, MathGrade, MathTask, finish, prepare

#: Names, texts, brackets and commas of a task: it has at most 23.
_TASK_PARTS = 32
#: Comparisons of one batch that are in flight at a time; more wait for these.
_BATCH_WINDOW = 256
#: Rewards are asked for by the thousand, and nobody waits for one alone.
_DEADLINE_S = 600.0
#: Verdicts that are kept for a tenant: some 20 MB.
_MOST_KEPT = 100_000


def doors(engine: Engine) -> list[Door]:
    """What the service listens to."""
    math = _Math(engine)
    return [
        Door("/v1/grade/math", EngineRoute(engine, math.one)),
        Door("/v1/grade/math/batch", EngineRoute(engine, math.many)),
    ]


class _Math:
    """Grades, and what was found."""

    def __init__(self, engine: Engine) -> None:
        self._ceilings = engine.ceilings
        self._kept: dict[str, MathCache] = {}

    async def one(self, exchange: Exchange) -> Answer:
        """One task, one grade."""
        step = self._prepare(exchange.parse(MathTask, _TASK_PARTS), exchange.tenant)
        if isinstance(step, Comparison):
            step = await self._finish(step, exchange.tenant, exchange.run)
        return Answer(step.model_dump_json().encode())

    async def many(self, exchange: Exchange) -> Answer:
        """Many tasks, as many grades."""
        items = await exchange.parse_items(MathTask, _TASK_PARTS)
        steps = await in_turns(self._prepare_in_place(item, exchange.tenant) for item in items)
        window = min(_BATCH_WINDOW, sum(isinstance(step, Comparison) for step in steps))
        run = at_most(exchange.hold(window), exchange.run)
        grades = await asyncio.gather(*(self._finish_in_place(step, exchange.tenant, run) for step in steps))
        listed = await in_turns(grade.model_dump_json().encode() for grade in grades)
        return Answer(b'{"results":[%b]}' % b",".join(listed))

    def _prepare(self, task: MathTask, tenant: Tenant) -> MathGrade | Comparison:
        """The grade, or what has to be run for it. Raises InvalidCall above a ceiling."""
        ceiling_s = self._ceilings.cpu_s
        if task.timeout_s > ceiling_s:
            if "timeout_s" in task.model_fields_set:
                raise InvalidCall(
                    f"timeout_s: {task.timeout_s:g} is above this service's ceiling of {ceiling_s:g}"
                )
            task = task.model_copy(update={"timeout_s": ceiling_s})
        return prepare(task, self._cache_of(tenant))

    def _prepare_in_place(self, task: MathTask | InvalidCall, tenant: Tenant) -> MathGrade | Comparison:
        try:
            if isinstance(task, InvalidCall):
                raise task
            return self._prepare(task, tenant)
        except InvalidCall as exc:
            return MathGrade.of_error(exc)

    async def _finish(self, comparison: Comparison, tenant: Tenant, run: Run) -> MathGrade:
        deadline_s = min(_DEADLINE_S, self._ceilings.deadline_s)
        return await finish(comparison, run, self._cache_of(tenant), self._ceilings.wall_s, deadline_s)

    async def _finish_in_place(self, step: MathGrade | Comparison, tenant: Tenant, run: Run) -> MathGrade:
        if isinstance(step, MathGrade):
            return step
        try:
            return await self._finish(step, tenant, run)
        except SandboxError as exc:
            return MathGrade.of_error(exc)

    def _cache_of(self, tenant: Tenant) -> MathCache:
        return self._kept.setdefault(tenant.name, MathCache(_MOST_KEPT))
