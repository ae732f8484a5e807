"""Functional tests as one call: `harness.py` is the program, the submission a file of it, the tests its stdin.

The harness lies in the runtime, and every jail has it warm: to compile it took half of the time of such a call.

What the call prints is the harness's: one letter for each test. It is read in that form only, and whatever else comes
is no acceptance. Letters that are missing were not judged, and the status of the call says why.
"""

from __future__ import annotations

import re

from pydantic_core import PydanticSerializationError

from sandbox.calls import CallStatus, Limits, ToolCall, ToolResult
from sandbox.errors import InvalidCall
from sandbox.grading.task import SUBMISSION, FunctionTask, Verdict

#: The guard is for processes that a submission spawns: they import the main module again.
_PROGRAM = "if __name__ == '__main__':\n    import roc_harness\n    roc_harness.main()\n"
_TESTS = {"setup", "tests", "names", "tolerance", "test_wall_s", "stop_early"}
#: The jail that holds these warm is chosen by the program's own imports, and the program is ours.
_WARM = re.compile(r"\b(?:numpy|sympy|mpmath|scipy|pandas|networkx)\b")
_LETTERS = {
    "A": Verdict.ACCEPTED,
    "W": Verdict.WRONG_ANSWER,
    "R": Verdict.RUNTIME_ERROR,
    "T": Verdict.TIME_LIMIT,
    "E": Verdict.CHECKER_ERROR,
}


def functional_call(task: FunctionTask) -> ToolCall:
    """The call that runs the tests of a task. Raises InvalidCall."""
    wanted = sorted(set(_WARM.findall(task.code)))
    imports = f"if False:\n    import {', '.join(wanted)}\n" if wanted else ""
    return task.to_call(
        code=_PROGRAM + imports,
        files={**task.files, SUBMISSION: task.code},
        stdin=_stdin(task),
        limits=_limits(task.limits),
    )


def _stdin(task: FunctionTask) -> str:
    try:
        return task.model_dump_json(include=_TESTS)
    except PydanticSerializationError as exc:
        raise InvalidCall(f"tests: {exc}") from exc


def _limits(limits: Limits) -> Limits:
    """Two processes are the least that there are."""
    return limits.model_copy(update={"processes": 2}) if limits.processes < 2 else limits


def read_letters(task: FunctionTask, result: ToolResult, ended: Verdict | None) -> list[Verdict]:
    """The verdict of each test. `ended` is what is said of the test at which the call ended before its time."""
    if result.status.is_fault:
        return _filled([Verdict.FAULT], task, Verdict.SKIPPED)
    letters = result.stdout if set(result.stdout) <= _LETTERS.keys() else ""
    verdicts = [_LETTERS[letter] for letter in letters[: len(task.tests)]]
    bad = next((verdict for verdict in verdicts if verdict is not Verdict.ACCEPTED), None)
    if result.status is CallStatus.OK and (len(letters) == len(task.tests) or (bad and task.stop_early)):
        return _filled(verdicts, task, Verdict.SKIPPED)
    ended = ended or Verdict.RUNTIME_ERROR
    verdicts = [*verdicts[: len(task.tests) - 1], ended]
    return _filled(verdicts, task, Verdict.SKIPPED if task.stop_early else ended)


def _filled(verdicts: list[Verdict], task: FunctionTask, rest: Verdict) -> list[Verdict]:
    return [*verdicts, *[rest] * (len(task.tests) - len(verdicts))]
