"""The words of judging: what is asked, and what is answered. The same JSON in HTTP and in the library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    RootModel,
    StringConstraints,
    Tag,
    ValidationError,
)

from sandbox.calls import (
    Base64File,
    CallStatus,
    FileName,
    Limits,
    Text,
    ToolCall,
    ToolResult,
    Usage,
    first_error,
)
from sandbox.errors import InternalError, InvalidCall, QueueTimeout, SandboxError
from sandbox.grading.compare import Comparison, Numbers

#: Characters of each stream, and of a reason, that a judgement hands on.
KEPT = 1000
#: The file that a submission of a task of tests lies in.
SUBMISSION = "submission.py"


class Verdict(StrEnum):
    """What a test says of a submission; the last three say nothing of it."""

    ACCEPTED = "accepted"
    WRONG_ANSWER = "wrong_answer"
    RUNTIME_ERROR = "runtime_error"
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    CHECKER_ERROR = "checker_error"  # the checker, or the text of a test, is broken
    FAULT = "fault"  # we failed, twice
    SKIPPED = "skipped"  # the judgement was over before


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Case(_Frozen):
    """One run of the submission."""

    stdin: Text = ""
    expected: Text = Field(description="What it should print, or what the checker should know.")
    files: dict[FileName, Text | Base64File] = Field(
        default_factory=dict, max_length=128, description="Beside the files of the task, and before them."
    )
    limits: Limits = Field(default_factory=Limits, description="What is named here is not the task's.")


class Checker(_Frozen):
    """A program of the task that has the say: it finds `input.txt`, `output.txt` and `expected.txt`."""

    checker: Text = Field(
        description="Python source. Exit code 0 accepts and 1, also by an exception, rejects; what it prints is the "
        "reason. However else it ends, that is a `checker_error`."
    )
    limits: Limits = Field(default_factory=Limits)


class _Task(_Frozen):
    code: Text = Field(description="The submission, Python source.")
    files: dict[FileName, Text | Base64File] = Field(
        default_factory=dict,
        max_length=128,
        description="Files that lie in the working directory at the start.",
    )
    limits: Limits = Field(default_factory=Limits, description="Bounds on each run.")
    deadline_s: float = Field(
        default=60.0, gt=0, le=86_400, description="Seconds from the acceptance of each run until it is due."
    )
    stop_early: bool = Field(
        default=True, description="End with the first test that is not accepted; the others are `skipped`."
    )

    def to_call(self, **fields: Any) -> ToolCall:
        """A call of this task. Raises InvalidCall."""
        if "deadline_s" in self.model_fields_set:
            fields["deadline_s"] = self.deadline_s
        try:
            return ToolCall(priority="judge", **fields)
        except ValidationError as exc:
            raise InvalidCall(first_error(exc)) from exc


class CaseTask(_Task):
    """A program that reads and prints."""

    cases: list[Case] = Field(min_length=1, max_length=1000)
    comparison: Comparison | Checker = Field(
        default="stripped", description="How an output is held against what was expected."
    )


def _check_submission(name: str) -> str:
    if name == SUBMISSION:
        raise ValueError("is the submission's own file; give that as `code`")
    return name


class FunctionTest(_Frozen):
    """One call of a function of the submission."""

    function: Annotated[str, StringConstraints(min_length=1, max_length=200)] = Field(
        description="Its name, or that of a method of a class `Solution`."
    )
    arguments: list[JsonValue] = Field(default_factory=list)
    expected: JsonValue = Field(description="What it should return; a tuple is as good as a list.")


class FunctionTask(_Task):
    """Functions that are called. The submission runs in a process of its own and knows none of the tests."""

    # NaN is null otherwise, so that None would be right where NaN is expected.
    model_config = ConfigDict(ser_json_inf_nan="constants")

    files: dict[Annotated[FileName, AfterValidator(_check_submission)], Text | Base64File] = Field(
        default_factory=dict,
        max_length=128,
        description="Files that lie in the working directory at the start.",
    )
    tests: list[Text | FunctionTest] = Field(
        min_length=1,
        max_length=1000,
        description="Statements such as `assert f(1) == 2`, or calls and what they should return.",
    )
    setup: Text = Field(
        default="",
        description="Python source that the tests begin with, such as `def check(candidate): ...`.",
    )
    names: list[Text] = Field(
        default_factory=list,
        max_length=100,
        description="Builtins that tests mean the submission's own of, such as `sum`.",
    )
    tolerance: Numbers | None = Field(
        default=None, description="For numbers in what a function returns; without it they must be equal."
    )
    test_wall_s: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="Seconds for each test; `limits.wall_s` is for all of them together.",
    )


def _kind(task: Any) -> str:
    has_tests = "tests" in task if isinstance(task, dict) else isinstance(task, FunctionTask)
    return "tests" if has_tests else "cases"


JudgeTask: TypeAlias = CaseTask | FunctionTask


class JudgeRequest(
    RootModel[
        Annotated[
            Annotated[CaseTask, Tag("cases")] | Annotated[FunctionTask, Tag("tests")],
            Discriminator(_kind),
        ]
    ]
):
    """A task of either kind, told apart by whether it has `cases` or `tests`."""


class Outcome(_Frozen):
    """What came of one test. Of tests that share a run the judgement has what the run printed and used."""

    verdict: Verdict
    status: CallStatus | None = Field(
        default=None, description="How its run ended, if it had one of its own."
    )
    reason: str | None = Field(
        default=None,
        description="Of a checker, of a fault, or the exception that the program says it ended by.",
    )
    stdout: str = Field(default="", description=f"Its first {KEPT} characters.")
    stderr: str = Field(default="", description=f"Its first {KEPT} characters.")
    exit_code: int | None = None
    signal: int | None = None
    usage: Usage = Field(default_factory=Usage)

    @classmethod
    def of(cls, result: ToolResult, verdict: Verdict, reason: str | None = None) -> Outcome:
        """A verdict on a run."""
        return cls(
            verdict=verdict,
            status=result.status,
            reason=reason and reason[:KEPT],
            stdout=result.stdout[:KEPT],
            stderr=result.stderr[:KEPT],
            exit_code=result.exit_code,
            signal=result.signal,
            usage=result.usage,
        )


class Judgement(_Frozen):
    """What a submission is worth. Without a score it is worth nothing to a trainer: nobody knows."""

    verdict: Verdict = Field(description="That of the first test that was not accepted, else `accepted`.")
    passed: int = Field(ge=0, description="Tests that were accepted.")
    total: int = Field(ge=1)
    score: float | None = Field(
        description="Passed of total. Null for `fault` and `checker_error`, which say nothing of the submission."
    )
    tests: list[Outcome] = Field(description="One for each test, in order.")
    status: CallStatus | None = Field(default=None, description="How the run that all tests shared ended.")
    reason: str | None = Field(default=None, description="Of the test that decided.")
    stderr: str = Field(
        default="", description=f"First {KEPT} characters of all that the shared run printed."
    )
    usage: Usage = Field(description="Of all runs together; the memory of the largest.")

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], run: ToolResult | None = None) -> Judgement:
        """The sum of what came of the tests, and of the run that they shared."""
        passed = sum(outcome.verdict is Verdict.ACCEPTED for outcome in outcomes)
        decisive = _decisive(outcomes)
        return cls(
            verdict=decisive.verdict,
            passed=passed,
            total=len(outcomes),
            score=None if decisive.verdict in _UNSCORED else passed / len(outcomes),
            tests=list(outcomes),
            status=run.status if run else None,
            reason=decisive.reason if run is None else run.reason,
            stderr=run.stderr[:KEPT] if run else "",
            usage=run.usage if run else _sum(outcome.usage for outcome in outcomes),
        )

    def to_error(self) -> SandboxError | None:
        """What a fault is where an answer has no place for it; None for all that is not our fault."""
        if self.verdict is not Verdict.FAULT:
            return None
        statuses = {self.status, *(test.status for test in self.tests if test.verdict is Verdict.FAULT)}
        kind = QueueTimeout if CallStatus.QUEUE_TIMEOUT in statuses else InternalError
        return kind(self.reason or "the service failed while it judged")


_UNSCORED = {Verdict.FAULT, Verdict.CHECKER_ERROR}


def _decisive(outcomes: Sequence[Outcome]) -> Outcome:
    """A fault or a broken checker before anything else: what is not known cannot be a wrong answer."""
    undone = (outcome for outcome in outcomes if outcome.verdict in _UNSCORED)
    bad = (outcome for outcome in outcomes if outcome.verdict is not Verdict.ACCEPTED)
    return next(undone, None) or next(bad, None) or outcomes[0]


def _sum(usages: Iterable[Usage]) -> Usage:
    each = list(usages)
    return Usage(
        wall_s=sum(usage.wall_s for usage in each),
        cpu_s=sum(usage.cpu_s for usage in each),
        memory_peak_bytes=max(usage.memory_peak_bytes for usage in each),
        queue_s=sum(usage.queue_s for usage in each),
    )
