"""Whether a model's answer is the reference, as mathematics.

Theory of operation. `prepare` cuts the answer out of the reply (`extract.py`) and looks at it here: no answer, equal
texts and plain numbers (`plain.py`) are decided at once, and so is what the cache knows. The rest is a `Comparison`:
one call each, which runs math-verify in the jail (`math_program.py`). So a comparison that hangs, eats memory or
crashes is ended by limits that hold, and takes no other with it. Equal comparisons make equal calls under equal ids,
and the service runs calls of one id once.

Rules:
1. `correct` is None when we do not know: a limit was reached, the grader broke, the service failed, or the reference
   cannot be read. It is False only when something was read and is not the reference, or nothing could be read.
2. What the program in the jail prints is one of a few words, or it is worth nothing.
3. Only a verdict is kept in the cache, never that there was none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sandbox.calls import CallStatus, Limits, Text, ToolCall, ToolResult, Usage
from sandbox.errors import InvalidCall, SandboxError
from sandbox.grading import Run
from sandbox.grading.cache import VerdictCache
from sandbox.grading.extract import MOST_ANSWER, Extracted, How, extract, last_boxed
from sandbox.grading.plain import compare_numbers, tidy

Reason = Literal[
    "equal_text",
    "equal_number",
    "equivalent",
    "different",
    "no_answer_found",
    "answer_unparsable",
    "gold_unparsable",
    "too_slow",
    "out_of_memory",
    "grader_failed",
    "fault",
    "invalid_task",
]

#: What comes of each reason.
_CORRECT: Mapping[Reason, bool | None] = {
    "equal_text": True,
    "equal_number": True,
    "equivalent": True,
    "different": False,
    "no_answer_found": False,
    "answer_unparsable": False,
    "gold_unparsable": None,
    "too_slow": None,
    "out_of_memory": None,
    "grader_failed": None,
    "fault": None,
    "invalid_task": None,
}
#: What the program in the jail may say.
_WORDS: Mapping[str, Reason] = {
    "equivalent\n": "equivalent",
    "different\n": "different",
    "gold_unparsable\n": "gold_unparsable",
    "answer_unparsable\n": "answer_unparsable",
}

#: The longest that a comparison may take.
MOST_S = 60.0
DEFAULT_S = 5.0
#: A comparison is bounded by its CPU time. Of wall time it gets more, since it shares the worker's cores.
_WALL_PER_CPU = 4


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MathTask(_Frozen):
    """An answer, and what it should be."""

    answer: Text = Field(description="A model's whole reply, or the answer alone.")
    gold: Annotated[str, StringConstraints(min_length=1, max_length=MOST_ANSWER)] = Field(
        description="The reference, as LaTeX or plain text; of one in a box what it holds."
    )
    extract: How | Annotated[tuple[How, ...], Field(min_length=1, max_length=4)] = Field(
        default=("answer_tags", "last_boxed", "last_number"),
        description="How the answer is found in the reply: the first way that finds one. "
        "answer_tags: what stands in the last `<answer>...</answer>`, or the last box in there; "
        r"last_boxed: the last `\boxed{...}`; last_number: the last number; whole: all of it.",
    )
    tolerance: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Numbers are equal, too, which differ by at most this share of the reference.",
    )
    timeout_s: float = Field(
        default=DEFAULT_S,
        gt=0,
        le=MOST_S,
        description="CPU seconds of a comparison; it ends after four times as many by the clock.",
    )


class ErrorWords(_Frozen):
    """An error of the service, as its other routes say it."""

    name: str
    message: str
    retry_after_s: float | None = None


class MathGrade(_Frozen):
    """What came of a task."""

    correct: bool | None = Field(
        description="Null: unknown, through no fault of the answer that we could prove; `reason` says why. Never count "
        "it as wrong."
    )
    reason: Reason = Field(description="Why.")
    extracted: str | None = Field(default=None, description="The answer that was found.")
    method: How | None = Field(default=None, description="The way that found it.")
    cached: bool = Field(default=False, description="Whether the verdict was known from before.")
    usage: Usage = Field(
        default_factory=Usage, description="What the comparison consumed; zeros where none ran."
    )
    error: ErrorWords | None = Field(
        default=None, description="Of a fault, and of what is no task: the service's error."
    )

    @classmethod
    def of_error(cls, error: SandboxError) -> MathGrade:
        """That we failed, or that the task is none."""
        reason: Reason = "invalid_task" if isinstance(error, InvalidCall) else "fault"
        return cls(correct=None, reason=reason, error=ErrorWords.model_validate(error.to_wire()["error"]))


MathCache = VerdictCache[Reason]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What has to be run to know."""

    gold: str
    found: Extracted
    tolerance: float | None
    timeout_s: float

    @property
    def key(self) -> bytes:
        """Names what is compared: a verdict does not depend on the time that it may take."""
        return _digest([self.gold, tidy(self.found.text), self.tolerance])

    def call(self, most_wall_s: float = MOST_S, deadline_s: float | None = None) -> ToolCall:
        """The call that compares, within so much time by the clock. Equal comparisons have equal ones."""
        asked = {"gold": self.gold, "answer": tidy(self.found.text), "tolerance": self.tolerance}
        limits = Limits(
            cpu_s=self.timeout_s,
            wall_s=max(self.timeout_s, min(_WALL_PER_CPU * self.timeout_s, most_wall_s)),
        )
        name = _digest([asked, limits.model_dump(), _program()]).hex()
        return ToolCall(
            id=f"grade-{name}",
            code=_program(),
            stdin=json.dumps(asked),
            limits=limits,
            priority="judge",
            **({} if deadline_s is None else {"deadline_s": deadline_s}),
        )

    def grade(self, reason: Reason, usage: Usage | None = None, *, cached: bool = False) -> MathGrade:
        """The answer to the task."""
        return _grade(reason, self.found, usage or Usage(), cached=cached)


def prepare(task: MathTask, cache: MathCache | None = None) -> MathGrade | Comparison:
    """The grade, where it takes no call, or what has to be compared."""
    ways = (task.extract,) if isinstance(task.extract, str) else task.extract
    found = extract(task.answer, ways)
    if found is None:
        return _grade("no_answer_found", None)
    if len(found.text) > MOST_ANSWER:
        return _grade("answer_unparsable", found)
    gold, answer = tidy(last_boxed(task.gold) or task.gold), tidy(found.text)
    if gold == answer:
        return _grade("equal_text", found)
    same = compare_numbers(gold, answer, task.tolerance)
    if same is not None:
        return _grade("equal_number" if same else "different", found)
    comparison = Comparison(gold, found, task.tolerance, task.timeout_s)
    if cache is not None and (reason := cache.get(comparison.key)) is not None:
        return comparison.grade(reason, cached=True)
    return comparison


async def finish(
    comparison: Comparison,
    run: Run,
    cache: MathCache | None = None,
    most_wall_s: float = MOST_S,
    deadline_s: float | None = None,
) -> MathGrade:
    """Run a comparison. Raises the SandboxError of a fault, and of a call that is not taken."""
    call = comparison.call(most_wall_s, deadline_s)
    result = await run(call)
    if result.status is CallStatus.INTERNAL_ERROR:
        result = await run(call)  # which harms nobody, and was bad luck most of the time
    if (error := result.to_error()) is not None:
        raise error
    reason = _reason(result)
    if cache is not None and _CORRECT[reason] is not None:
        cache.keep(comparison.key, reason)
    return comparison.grade(reason, result.usage)


async def grade_math(task: MathTask, run: Run, cache: MathCache | None = None) -> MathGrade:
    """Whether an answer is the reference. Raises the SandboxError of a fault, and of a call that is not taken."""
    step = prepare(task, cache)
    return step if isinstance(step, MathGrade) else await finish(step, run, cache)


def _reason(result: ToolResult) -> Reason:
    match result.status:
        case CallStatus.OK:
            return _WORDS.get(result.stdout, "grader_failed")
        case CallStatus.TIMEOUT:
            return "too_slow"
        case CallStatus.MEMORY_LIMIT:
            return "out_of_memory"
        case _:
            return "grader_failed"


def _grade(
    reason: Reason, found: Extracted | None, usage: Usage | None = None, *, cached: bool = False
) -> MathGrade:
    return MathGrade(
        correct=_CORRECT[reason],
        reason=reason,
        extracted=found and found.text[:MOST_ANSWER],
        method=found and found.how,
        cached=cached,
        usage=usage or Usage(),
    )


def _digest(content: object) -> bytes:
    return hashlib.sha256(json.dumps(content).encode()).digest()


@cache
def _program() -> str:
    return (Path(__file__).parent / "math_program.py").read_text(encoding="utf-8")
