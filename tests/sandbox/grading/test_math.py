"""Grades, with a `run` of the test's own in place of the service."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from sandbox.calls import CallStatus, ToolCall, ToolResult, Usage
from sandbox.errors import InternalError, QueueTimeout, SandboxError
from sandbox.grading.cache import VerdictCache
from sandbox.grading.extract import MOST_ANSWER
from sandbox.grading.math import Comparison, MathGrade, MathTask, grade_math, prepare

SYMBOLIC = MathTask(answer=r"\boxed{\sqrt{12}}", gold=r"2\sqrt{3}")


class Runs:
    """Runs nothing: answers each call with the next of these results."""

    def __init__(self, *results: ToolResult) -> None:
        self.results = list(results)
        self.calls: list[ToolCall] = []

    async def __call__(self, call: ToolCall) -> ToolResult:
        self.calls.append(call)
        return self.results.pop(0)


def ended(status: CallStatus, stdout: str = "") -> ToolResult:
    return ToolResult(id="x", status=status, stdout=stdout, usage=Usage(cpu_s=0.5))


@pytest.mark.parametrize(
    ("answer", "gold", "correct", "reason"),
    [
        (r"\boxed{5}", "5", True, "equal_text"),
        (r"\boxed{5}", r"\boxed{5}", True, "equal_text"),
        (r"\boxed{ x^2 }", "$x^2$", True, "equal_text"),
        (r"\boxed{6} wait \boxed{5}", "5", True, "equal_text"),
        (r"\boxed{5.0}", "5", True, "equal_number"),
        (r"\boxed{\frac12}", r"\frac12", True, "equal_text"),
        (r"\boxed{4}", "5", False, "different"),
        ("I give up", "5", False, "no_answer_found"),
        ("", "5", False, "no_answer_found"),
        ("<answer>" + "x" * (MOST_ANSWER + 1) + "</answer>", "5", False, "answer_unparsable"),
    ],
)
async def test_what_is_plain_takes_no_call(answer: str, gold: str, correct: bool, reason: str) -> None:
    """Equal texts, plain numbers, and nothing at all."""
    runs = Runs()
    grade = await grade_math(MathTask(answer=answer, gold=gold), runs)
    assert (grade.correct, grade.reason, runs.calls) == (correct, reason, [])


@pytest.mark.parametrize(
    ("result", "correct", "reason"),
    [
        (ended(CallStatus.OK, "equivalent\n"), True, "equivalent"),
        (ended(CallStatus.OK, "different\n"), False, "different"),
        (ended(CallStatus.OK, "answer_unparsable\n"), False, "answer_unparsable"),
        (ended(CallStatus.OK, "gold_unparsable\n"), None, "gold_unparsable"),
        (ended(CallStatus.OK, "equivalent"), None, "grader_failed"),
        (ended(CallStatus.OK, "equivalent\nequivalent\n"), None, "grader_failed"),
        (ended(CallStatus.OK, ""), None, "grader_failed"),
        (ended(CallStatus.OK, "fault\n"), None, "grader_failed"),
        (ended(CallStatus.ERROR, "equivalent\n"), None, "grader_failed"),
        (ended(CallStatus.SIGNALED, "different\n"), None, "grader_failed"),
        (ended(CallStatus.OUTPUT_LIMIT, "different\n"), None, "grader_failed"),
        (ended(CallStatus.TIMEOUT, "different\n"), None, "too_slow"),
        (ended(CallStatus.MEMORY_LIMIT), None, "out_of_memory"),
    ],
)
async def test_only_a_word_of_a_whole_run_is_a_verdict(
    result: ToolResult, correct: bool | None, reason: str
) -> None:
    """Whatever else comes of a comparison is unknown, and never wrong."""
    grade = await grade_math(SYMBOLIC, Runs(result))
    assert (grade.correct, grade.reason) == (correct, reason)
    assert (grade.extracted, grade.method, grade.usage.cpu_s) == (r"\sqrt{12}", "last_boxed", 0.5)


async def test_a_fault_is_tried_once_more() -> None:
    """A jail that broke says nothing of the answer; the second run does."""
    runs = Runs(ended(CallStatus.INTERNAL_ERROR), ended(CallStatus.OK, "equivalent\n"))
    assert (await grade_math(SYMBOLIC, runs)).correct is True
    assert runs.calls[0] == runs.calls[1]


@pytest.mark.parametrize(
    ("results", "error"),
    [
        ([ended(CallStatus.INTERNAL_ERROR)] * 2, InternalError),
        ([ended(CallStatus.QUEUE_TIMEOUT)], QueueTimeout),
    ],
)
async def test_a_fault_is_no_grade(results: list[ToolResult], error: type[SandboxError]) -> None:
    """It rises as what it is, and where it must be a grade it is an unknown one that says so."""
    with pytest.raises(error) as raised:
        await grade_math(SYMBOLIC, Runs(*results))
    grade = MathGrade.of_error(raised.value)
    assert (grade.correct, grade.reason) == (None, "fault")
    assert grade.error is not None
    assert grade.error.name == error.__name__


async def test_a_verdict_is_known_from_then_on() -> None:
    """Also by another reply with the same answer, and with another time limit; but not with another tolerance."""
    cache: VerdictCache = VerdictCache(10)
    runs = Runs(ended(CallStatus.OK, "equivalent\n"), ended(CallStatus.OK, "different\n"))
    first = await grade_math(SYMBOLIC, runs, cache)
    again = SYMBOLIC.model_copy(update={"answer": r"<answer>$\sqrt{12}$</answer>", "timeout_s": 1.0})
    second = await grade_math(again, runs, cache)
    assert (first.cached, second.cached, second.correct, second.usage) == (False, True, True, Usage())
    other = await grade_math(SYMBOLIC.model_copy(update={"tolerance": 0.1}), runs, cache)
    assert (other.cached, other.correct) == (False, False)


@pytest.mark.parametrize("status", [CallStatus.TIMEOUT, CallStatus.MEMORY_LIMIT, CallStatus.ERROR])
async def test_what_is_unknown_is_asked_again(status: CallStatus) -> None:
    """The next time may have more luck."""
    cache: VerdictCache = VerdictCache(10)
    runs = Runs(ended(status), ended(CallStatus.OK, "different\n"))
    await grade_math(SYMBOLIC, runs, cache)
    assert (await grade_math(SYMBOLIC, runs, cache)).correct is False


def test_the_cache_forgets_what_was_asked_for_longest_ago() -> None:
    """It holds so many and no more."""
    cache: VerdictCache = VerdictCache(2)
    cache.keep(b"a", "different")
    cache.keep(b"b", "different")
    assert cache.get(b"a")
    cache.keep(b"c", "different")
    assert [cache.get(key) for key in (b"a", b"b", b"c")] == ["different", None, "different"]


def test_equal_comparisons_are_equal_calls() -> None:
    """So that the service runs them once; anything that changes what is run changes the id."""
    tasks = [
        SYMBOLIC,
        SYMBOLIC.model_copy(update={"answer": r"$\boxed{\sqrt{12}}$"}),
        SYMBOLIC.model_copy(update={"timeout_s": 2.0}),
        SYMBOLIC.model_copy(update={"tolerance": 0.5}),
        SYMBOLIC.model_copy(update={"gold": "x"}),
    ]
    steps = [prepare(task) for task in tasks]
    calls = [step.call() for step in steps if isinstance(step, Comparison)]
    assert calls[0] == calls[1]
    assert len({call.id for call in calls}) == 4
    assert {call.priority for call in calls} == {"judge"}
    assert json.loads(calls[0].stdin) == {"gold": r"2\sqrt{3}", "answer": r"\sqrt{12}", "tolerance": None}


def test_a_call_is_bounded() -> None:
    """By CPU time first; the clock runs longer, as far as the service lets it, and never shorter."""
    step = prepare(SYMBOLIC.model_copy(update={"timeout_s": 3.0}))
    assert isinstance(step, Comparison)
    walls = [step.call(most).limits for most in (60.0, 5.0, 2.0)]
    assert [(limits.cpu_s, limits.wall_s) for limits in walls] == [(3.0, 12.0), (3.0, 5.0), (3.0, 3.0)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"gold": "5"},
        {"answer": "5"},
        {"answer": "5", "gold": ""},
        {"answer": "5", "gold": "x" * (MOST_ANSWER + 1)},
        {"answer": "5", "gold": 5},
        {"answer": "5", "gold": "5", "extract": []},
        {"answer": "5", "gold": "5", "extract": "best"},
        {"answer": "5", "gold": "5", "extract": ["whole"] * 5},
        {"answer": "5", "gold": "5", "tolerance": -0.1},
        {"answer": "5", "gold": "5", "timeout_s": 0},
        {"answer": "5", "gold": "5", "timeout_s": 61},
        {"answer": "5", "gold": "5", "timout_s": 1},
    ],
)
def test_a_wrong_task_is_refused(wrong: dict[str, object]) -> None:
    """Misspelt, missing and out of bounds: an error and never a default."""
    with pytest.raises(ValidationError):
        MathTask.model_validate_json(json.dumps(wrong))
