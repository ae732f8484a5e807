"""Judging a program: one submission, against what it should print or return.

`judge` makes calls of a task, has `run` run them, and says what came of it. A task of `cases` is one call for each
case, and one more where a checker has the say; a task of `tests` (functional.py) is one call for all of them.

Cases run a few at a time and are told in order. The first that is not accepted ends the judgement, unless the task
wants them all, and what was started ahead of it is cancelled. A fault of ours is tried once more; if it stays, the
whole judgement is a fault, since a case that was not run says nothing about the submission. A checker that breaks is
told apart from one that says no.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TypeVar
from uuid import uuid4

from sandbox.calls import CallStatus, Limits, ToolCall, ToolResult
from sandbox.grading import Run
from sandbox.grading.compare import matches
from sandbox.grading.functional import functional_call, read_letters
from sandbox.grading.task import (
    Case,
    CaseTask,
    Checker,
    FunctionTask,
    Judgement,
    JudgeTask,
    Outcome,
    Verdict,
)

#: Cases of one judgement that run at a time. Those ahead of the first bad one are run for nothing.
WINDOW = 4

#: Above so many characters a comparison would keep the loop from others.
_LONG = 100_000

_VERDICTS = {
    CallStatus.ERROR: Verdict.RUNTIME_ERROR,
    CallStatus.SIGNALED: Verdict.RUNTIME_ERROR,
    CallStatus.TIMEOUT: Verdict.TIME_LIMIT,
    CallStatus.MEMORY_LIMIT: Verdict.MEMORY_LIMIT,
    CallStatus.OUTPUT_LIMIT: Verdict.OUTPUT_LIMIT,
    CallStatus.QUEUE_TIMEOUT: Verdict.FAULT,
    CallStatus.INTERNAL_ERROR: Verdict.FAULT,
}

#: One thread for all: each more would take its turn before the loop has its own.
_COMPARING = ThreadPoolExecutor(1, "comparing")

T = TypeVar("T")


def window_of(task: JudgeTask) -> int:
    """How many of its calls are in flight at a time."""
    return min(WINDOW, len(task.cases)) if isinstance(task, CaseTask) else 1


async def judge(task: JudgeTask, run: Run, window: int = WINDOW) -> Judgement:
    """What a submission is worth. Cancelled, it ends its calls.

    Raises the SandboxError of a call that was not taken; then nothing is said about the submission.
    """
    if isinstance(task, FunctionTask):
        return await _judge_functions(task, run)

    async def judge_case(case: Case) -> Outcome:
        return await _judge_case(task, case, run)

    def is_last(result: Outcome) -> bool:
        return result.verdict is Verdict.FAULT or (task.stop_early and result.verdict is not Verdict.ACCEPTED)

    results = await _in_order(task.cases, judge_case, is_last, window)
    skipped = [Outcome(verdict=Verdict.SKIPPED)] * (len(task.cases) - len(results))
    return Judgement.of([*results, *skipped])


async def _in_order(
    items: Sequence[T],
    start: Callable[[T], Awaitable[Outcome]],
    is_last: Callable[[Outcome], bool],
    window: int,
) -> list[Outcome]:
    """Results in order, up to one that is the last; what was started beyond it is cancelled, and has ended."""
    left = iter(items)
    started = deque(asyncio.ensure_future(start(item)) for item in islice(left, window))
    results: list[Outcome] = []
    try:
        while started:
            results.append(await started[0])
            started.popleft()
            if is_last(results[-1]):
                break
            started.extend(asyncio.ensure_future(start(item)) for item in islice(left, 1))
    finally:
        for ahead in started:
            ahead.cancel()
        await asyncio.gather(*started, return_exceptions=True)
    return results


async def _judge_case(task: CaseTask, case: Case, run: Run) -> Outcome:
    call = task.to_call(
        code=task.code,
        stdin=case.stdin,
        files={**task.files, **case.files},
        limits=_limits(task.limits, case),
    )
    result = await run_again(call, run)
    if result.status is not CallStatus.OK:
        return Outcome.of(result, _VERDICTS[result.status], reason=_reason(result))
    if isinstance(task.comparison, Checker):
        return await _check(task.comparison, task, case, result, run)
    compare = partial(matches, result.stdout, case.expected, task.comparison)
    is_long = len(result.stdout) + len(case.expected) > _LONG
    accepted = await _in_thread(compare) if is_long else compare()
    return Outcome.of(result, Verdict.ACCEPTED if accepted else Verdict.WRONG_ANSWER)


async def _in_thread(compare: Callable[[], bool]) -> bool:
    return await asyncio.get_running_loop().run_in_executor(_COMPARING, compare)


def _reason(result: ToolResult) -> str | None:
    raised = result.exception
    return f"{raised.type}: {raised.message}" if raised else result.reason


def _limits(limits: Limits, case: Case) -> Limits:
    """What the case names, else what the task does. What is to be printed has room where neither says how much."""
    named = {**limits.model_dump(exclude_unset=True), **case.limits.model_dump(exclude_unset=True)}
    usual = Limits().output_bytes
    if "output_bytes" not in named and len(case.expected) * 4 > usual:
        named["output_bytes"] = max(usual, len(case.expected.encode()) + usual // 2)
    return Limits.model_validate(named)


async def run_again(call: ToolCall, run: Run) -> ToolResult:
    """What came of a call, or of the same one under another id where the first met a fault of ours."""
    result = await run(call)
    if result.status.is_fault:
        result = await run(call.model_copy(update={"id": uuid4().hex}))
    return result


async def _check(checker: Checker, task: CaseTask, case: Case, result: ToolResult, run: Run) -> Outcome:
    """Ask the task's own program. It says yes by exit code 0 and no by 1, and why on stdout."""
    call = task.to_call(
        code=checker.checker,
        files={"input.txt": case.stdin, "output.txt": result.stdout, "expected.txt": case.expected},
        limits=checker.limits,
    )
    said = await run_again(call, run)
    return Outcome.of(result, _verdict_of_checker(said), reason=_reason_of_checker(said))


def _verdict_of_checker(said: ToolResult) -> Verdict:
    if said.status is CallStatus.OK:
        return Verdict.ACCEPTED
    if said.status is CallStatus.ERROR and said.exit_code == 1:
        return Verdict.WRONG_ANSWER
    return Verdict.FAULT if said.status.is_fault else Verdict.CHECKER_ERROR


def _reason_of_checker(said: ToolResult) -> str | None:
    if said.status.is_fault:
        return said.reason
    if said.exception is not None:
        return f"the checker raised {said.exception.type}: {said.exception.message}"
    if _verdict_of_checker(said) is Verdict.CHECKER_ERROR:
        return f"the checker ended as {said.status}, exit code {said.exit_code}: {said.stderr}"
    return said.stdout.strip() or None


async def _judge_functions(task: FunctionTask, run: Run) -> Judgement:
    result = await run_again(functional_call(task), run)
    verdicts = read_letters(task, result, _VERDICTS.get(result.status))
    return Judgement.of([Outcome(verdict=verdict) for verdict in verdicts], result)
