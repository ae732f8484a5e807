"""The words of code-judge: what a submission asks for, and what is said of what came of it."""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal, TypeVar
from uuid import uuid4

from pydantic import BaseModel, Field, ValidationError

from sandbox.calls import MIB, CallStatus, Limits, Text, ToolCall, ToolResult, first_error
from sandbox.errors import InvalidCall, SandboxError
from sandbox.grading.math import DEFAULT_S, MathGrade, MathTask
from sandbox.settings import CeilingSettings

#: Of stdout, and again of stderr.
SHOWN_CHARACTERS = 1000
#: So that the head of what is kept, one half, has so many characters, of at most four bytes each.
KEPT_BYTES = 2 * 4 * SHOWN_CHARACTERS
#: Of what is wrong with a request.
MOST_COMPLAINTS = 100

#: What rStar2-Agent's reward programs import, under its own name and under that of verl's recipe.
REWARD = "fused_compute_score"
_SOURCES = {"__init__": REWARD} | {name: name for name in ("extract", "plain", "math_program")}
_REWARD_FILES = {
    f"recipe/rstar2_agent/{REWARD}.py": f"from {REWARD} import compute_score\n",
    **{
        f"{REWARD}/{name}.py": files("sandbox.grading").joinpath(f"{source}.py").read_text(encoding="utf-8")
        for name, source in _SOURCES.items()
    },
}

#: What a limit is called here; the CPU time is named only where somebody asks for a comparison's.
_THEIR_WORDS = {
    "wall_s": "timeout",
    "cpu_s": "timeout",
    "timeout_s": "timeout",
    "gold": "expected_output",
    "memory_bytes": "memory_limit in bytes",
}

Reason = Literal["", "internal_error", "worker_timeout", "queue_timeout", "invalid_input"]
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
    cpu_core: int | None = Field(default=None, ge=1, le=1024)


class Batch(BaseModel):
    """Many of them, none of which is read yet."""

    sub_id: Text | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Any] = Field(min_length=1)


class Result(BaseModel):
    """What came of a submission."""

    sub_id: str
    success: bool = False
    run_success: bool = False
    cost: float = 0.0
    stdout: str | None = None
    stderr: str | None = None
    reason: Reason = ""


class _Named(BaseModel):
    """As much of a submission as names it, whatever else is wrong."""

    sub_id: Text | None = None


def read(model: type[M], value: object) -> M:
    """The value as one of these. Raises InvalidCall, whose cause has all that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc


def name_in(value: object) -> str:
    """The name of a batch or a submission, however wrong the rest of it; a new one where it has none."""
    try:
        sub_id = _Named.model_validate(value, from_attributes=True).sub_id
    except ValidationError:
        sub_id = None
    return sub_id or str(uuid4())


def complaints(error: InvalidCall) -> list[dict[str, Any]]:
    """What is wrong with a request, as FastAPI lists it, but without what it has there, which may be large."""
    if not isinstance(error.__cause__, ValidationError):
        return [{"type": "value_error", "loc": ["body"], "msg": error.message}]
    listed = error.__cause__.errors(include_url=False, include_context=False, include_input=False)
    return [{**one, "loc": ["body", *one["loc"]]} for one in listed[:MOST_COMPLAINTS]]


def to_call(submission: Submission, ceilings: CeilingSettings, *, is_judge: bool) -> ToolCall:
    """The program, within its limits. Raises InvalidCall."""
    if submission.type != "python":
        raise InvalidCall(f"type: {submission.type} is not run here, only python")
    wall_s = submission.timeout or ceilings.defaults().wall_s
    # Theirs bounds the CPU time of each process by itself.
    cpu_s = min(ceilings.cpu_s, wall_s * (submission.cpu_core or 1))
    limits: dict[str, float] = {"cpu_s": cpu_s, "output_bytes": ceilings.output_bytes, "wall_s": wall_s}
    if submission.memory_limit is not None:
        limits["memory_bytes"] = submission.memory_limit * MIB
    return ToolCall(
        code=submission.solution,
        stdin=submission.input or "",
        files=_REWARD_FILES if REWARD in submission.solution else {},
        limits=read(Limits, limits),
        priority="judge" if is_judge else "tool",
        # What is compared is needed whole.
        keep_bytes=KEPT_BYTES if submission.expected_output is None else None,
    )


def to_task(submission: Submission, ceilings: CeilingSettings) -> MathTask:
    """What a submission of the type `math` asks: whether its solution is the expected output. Raises InvalidCall."""
    if not submission.expected_output:
        raise InvalidCall("expected_output: of the type math it is the reference, and needed")
    timeout_s = submission.timeout or min(DEFAULT_S, ceilings.cpu_s)
    task = {"answer": submission.solution, "gold": submission.expected_output, "timeout_s": timeout_s}
    return read(MathTask, task | {"extract": ("answer_tags", "whole")})


def verdict(sub_id: str, expected: str | None, result: ToolResult) -> Result:
    """What came of a program that was run."""
    ran = result.status is CallStatus.OK
    is_right = expected is None or result.stdout.strip() == expected.strip()
    return Result(
        sub_id=sub_id,
        success=ran and is_right,
        run_success=ran,
        cost=result.usage.wall_s,
        stdout=result.stdout[:SHOWN_CHARACTERS],
        stderr=with_end(result.stderr, _end_of(result)),
        reason="worker_timeout" if result.status is CallStatus.TIMEOUT else "",
    )


def graded(sub_id: str, grade: MathGrade) -> Result:
    """What came of a comparison. That nobody knows is never said to be wrong: then it did not run well."""
    reasons: dict[str, Reason] = {"too_slow": "worker_timeout", "gold_unparsable": "invalid_input"}
    return Result(
        sub_id=sub_id,
        success=bool(grade.correct),
        run_success=grade.correct is not None,
        cost=grade.usage.wall_s,
        stdout=(grade.extracted or "")[:SHOWN_CHARACTERS],
        stderr="" if grade.correct is not None else f"error: {grade.reason}",
        reason="" if grade.correct is not None else reasons.get(grade.reason, "internal_error"),
    )


def refusal(sub_id: str, error: SandboxError, waited_s: float) -> Result:
    """What is said where nothing ran, or we failed."""
    if isinstance(error, InvalidCall):
        return Result(sub_id=sub_id, reason="invalid_input", stderr=f"error: {_in_their_words(error)}")
    if error.is_retryable:
        return Result(sub_id=sub_id, reason="queue_timeout", cost=waited_s, stderr=error.message)
    return Result(sub_id=sub_id, reason="internal_error", stderr=error.message)


def _in_their_words(error: InvalidCall) -> str:
    field, colon, rule = error.message.partition(":")
    return _THEIR_WORDS.get(field.removeprefix("limits."), field) + colon + rule


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


def with_end(stderr: str, end: str) -> str:
    """The first characters, with room for a last line of ours."""
    if not end:
        return stderr[:SHOWN_CHARACTERS]
    head = stderr[: SHOWN_CHARACTERS - len(end) - 1]
    return f"{head}\n{end}" if head and not head.endswith("\n") else head + end
