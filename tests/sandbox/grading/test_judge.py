"""Programs against cases: what each verdict takes, in a real jail, and what a judgement does with its calls."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.errors import InvalidCall, Overloaded, QueueTimeout
from sandbox.grading.judge import WINDOW, judge
from sandbox.grading.task import Judgement, JudgeRequest

from .conftest import Judge

DOUBLE = "print(int(input()) * 2)"
CASES = [{"stdin": "1", "expected": "2"}, {"stdin": "2", "expected": "4"}, {"stdin": "3", "expected": "6"}]
VERDICTS = [
    (DOUBLE, {}, "accepted"),
    ("print(5)", {}, "wrong_answer"),
    ("1 / 0", {}, "runtime_error"),
    ("import os; os.abort()", {}, "runtime_error"),
    ("while True: pass", {"limits": {"wall_s": 0.2}}, "time_limit"),
    ("x = bytearray(1 << 30)", {"limits": {"memory_bytes": 64 << 20}}, "memory_limit"),
    ("print('x' * 3000)", {"limits": {"output_bytes": 1000}}, "output_limit"),
]


@pytest.mark.parametrize(("code", "fields", "verdict"), VERDICTS)
def test_each_verdict_of_a_run(judged: Judge, code: str, fields: dict[str, Any], verdict: str) -> None:
    """How a program ends, and what it prints, is the verdict of its case."""
    judgement = judged(code=code, cases=CASES[:1], **fields)
    assert (judgement.verdict, judgement.tests[0].verdict) == (verdict, verdict)
    assert judgement.score == (1.0 if verdict == "accepted" else 0.0)
    assert judgement.usage.wall_s > 0


def test_the_first_bad_case_is_the_last(judged: Judge) -> None:
    """What comes after it is skipped, and counts as not passed."""
    cases = [CASES[0], {"stdin": "7", "expected": "15"}, *CASES * 2]
    judgement = judged(code=DOUBLE, cases=cases)
    assert [test.verdict for test in judgement.tests] == ["accepted", "wrong_answer", *["skipped"] * 6]
    assert (judgement.verdict, judgement.passed, judgement.total, judgement.score) == (
        "wrong_answer",
        1,
        8,
        1 / 8,
    )
    assert judgement.tests[1].stdout == "14\n"
    assert judgement.tests[2].status is None


def test_a_task_can_want_them_all(judged: Judge) -> None:
    """Then each case has a verdict, and the first bad one is the judgement's."""
    cases = [CASES[0], {"stdin": "x", "expected": ""}, CASES[2]]
    judgement = judged(code=DOUBLE, cases=cases, stop_early=False)
    assert [test.verdict for test in judgement.tests] == ["accepted", "runtime_error", "accepted"]
    assert (judgement.verdict, judgement.passed) == ("runtime_error", 2)
    assert "ValueError" in judgement.tests[1].stderr


def test_files_and_limits_of_a_case_go_before_the_task_s(judged: Judge) -> None:
    """A case may bring files of its own, and bounds of its own, beside those of the task."""
    code = "print(open('a').read() + open('b').read())\nif open('b').read() == 'loop':\n    while True: pass"
    cases = [
        {"expected": "12", "files": {"b": "2"}},
        {"expected": "", "files": {"b": "loop"}, "limits": {"wall_s": 0.2}},
    ]
    judgement = judged(code=code, files={"a": "1", "b": "0"}, limits={"wall_s": 5}, cases=cases)
    assert [test.verdict for test in judgement.tests] == ["accepted", "time_limit"]


def test_a_right_answer_has_room(judged: Judge) -> None:
    """A program may print what is expected of it, also where that is more than a call prints by default."""
    judgement = judged(code="print('x' * 300_000)", cases=[{"expected": "x" * 300_000}])
    assert judgement.verdict == "accepted"
    assert judgement.tests[0].stdout == "x" * 1000


CHECKERS = [
    ("exit(0)", "accepted", None),
    ("print('close, but no'); exit(1)", "wrong_answer", "close, but no"),
    ("exit(2)", "checker_error", "exit code 2"),
    ("while True: pass", "checker_error", "timeout"),
    (
        "print(*(repr(open(f'{name}.txt').read()) for name in ('input', 'output', 'expected'))); exit(1)",
        "wrong_answer",
        "'1' '2\\n' 'more'",
    ),
]


@pytest.mark.parametrize(("checker", "verdict", "reason"), CHECKERS)
def test_a_checker_has_the_say(judged: Judge, checker: str, verdict: str, reason: str | None) -> None:
    """Exit code 0 accepts, 1 rejects, what it prints is the reason; a checker that breaks is told apart, without a score."""
    comparison = {"checker": checker, "limits": {"wall_s": 0.5}}
    judgement = judged(code=DOUBLE, cases=[{"stdin": "1", "expected": "more"}], comparison=comparison)
    assert judgement.verdict == verdict
    assert (judgement.reason or "").find(reason or "") >= 0
    assert judgement.score == {"accepted": 1.0, "wrong_answer": 0.0}.get(verdict)


def test_a_checker_sees_no_program_that_failed(judged: Judge) -> None:
    """What ends badly is not accepted, whatever it printed."""
    judgement = judged(code="print(1); exit(3)", cases=[{"expected": "1"}], comparison={"checker": ""})
    assert (judgement.verdict, judgement.tests[0].exit_code) == ("runtime_error", 3)


# ---- what it does with its calls; here the code of a case says what came of it ----


class Runs:
    """Answers calls, and can be asked what it saw of them."""

    def __init__(self, *, hold: str = "none") -> None:
        self.seen: list[ToolCall] = []
        self.cancelled: list[str] = []
        self.most = self.now = 0
        self.held = asyncio.Event()
        self._hold = hold

    async def __call__(self, call: ToolCall) -> ToolResult:
        self.seen.append(call)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0)
            if call.stdin == self._hold:
                self.held.set()
                await asyncio.Event().wait()
            return self._answer(call)
        except asyncio.CancelledError:
            self.cancelled.append(call.stdin)
            raise
        finally:
            self.now -= 1

    def _answer(self, call: ToolCall) -> ToolResult:
        status = CallStatus.OK
        if call.stdin.startswith("fault") and (call.stdin == "fault" or self._is_first(call)):
            status = CallStatus.QUEUE_TIMEOUT
        return ToolResult(id=call.id, status=status, exit_code=0, stdout=call.stdin, reason="no slot")

    def _is_first(self, call: ToolCall) -> bool:
        return [each.stdin for each in self.seen].count(call.stdin) == 1


def cases_of(*stdins: str) -> Any:
    cases = [{"stdin": stdin, "expected": stdin.removeprefix("bad")} for stdin in stdins]
    return JudgeRequest.model_validate({"code": "", "cases": cases}).root


async def test_few_cases_run_at_a_time() -> None:
    """A judgement of many cases never has more calls in flight than its window, and none of them is a tool's."""
    runs = Runs()
    judgement = await judge(cases_of(*map(str, range(50))), runs)
    assert (judgement.passed, runs.most, len(runs.seen)) == (50, WINDOW, 50)
    assert {call.priority for call in runs.seen} == {"judge"}


async def test_what_ran_ahead_of_a_bad_case_is_cancelled() -> None:
    """Cases behind it that have begun are ended before the judgement is out, and none begins."""
    runs = Runs(hold="ahead")
    judgement = await judge(cases_of("bad", "ahead", "ahead", *"rest" * 9), runs)
    assert judgement.verdict == "wrong_answer"
    assert runs.now == 0
    assert runs.cancelled == ["ahead", "ahead"]
    assert len(runs.seen) <= WINDOW


async def test_a_judgement_that_nobody_waits_for_ends_its_calls() -> None:
    """Cancelled, it has cancelled them all."""
    runs = Runs(hold="hold")
    task = asyncio.create_task(judge(cases_of("hold", "hold"), runs))
    await runs.held.wait()
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert (runs.now, runs.cancelled) == (0, ["hold", "hold"])


async def test_a_fault_is_tried_once_more() -> None:
    """A case that met a fault is run again under another id, and the second result counts."""
    runs = Runs()
    judgement = await judge(cases_of("fault-once", "2"), runs)
    assert (judgement.verdict, len(runs.seen)) == ("accepted", 3)
    assert len({call.id for call in runs.seen}) == 3


async def test_a_fault_that_stays_is_the_judgement() -> None:
    """It has no score, is never a wrong answer, and can be told as the error that it is."""
    judgement = await judge(cases_of("1", "fault", "3"), Runs())
    assert [test.verdict for test in judgement.tests] == ["accepted", "fault", "skipped"]
    assert (judgement.verdict, judgement.score, judgement.reason) == ("fault", None, "no slot")
    assert isinstance(judgement.to_error(), QueueTimeout)


async def test_a_call_that_is_not_taken_is_no_judgement() -> None:
    """What refuses a call rises as it is, and the other calls are ended."""
    runs = Runs(hold="hold")

    async def refuse(call: ToolCall) -> ToolResult:
        if call.stdin == "full":
            await runs.held.wait()
            raise Overloaded("full", retry_after_s=2)
        return await runs(call)

    with pytest.raises(Overloaded):
        await judge(cases_of("full", "hold"), refuse)
    assert (runs.now, runs.cancelled) == (0, ["hold"])


async def test_files_that_cannot_lie_together_are_refused() -> None:
    """A file of a case cannot lie where the task has a folder."""
    task = JudgeRequest.model_validate(
        {"code": "", "files": {"a/b": ""}, "cases": [{"expected": "", "files": {"a": ""}}]}
    ).root
    with pytest.raises(InvalidCall):
        await judge(task, Runs())


async def test_only_limits_that_are_named_go_with_a_call() -> None:
    """What nobody names stays the service's to choose."""
    runs = Runs()
    fields = {"code": "", "limits": {"wall_s": 3}, "cases": [{"expected": "", "limits": {"cpu_s": 1}}]}
    await judge(JudgeRequest.model_validate(fields).root, runs)
    [call] = runs.seen
    assert call.limits.model_fields_set == {"wall_s", "cpu_s"}
    assert "deadline_s" not in call.model_fields_set


def test_a_judgement_is_the_same_as_json() -> None:
    """What is written is what is read."""
    judgement = asyncio.run(judge(cases_of("1", "bad2"), Runs()))
    assert Judgement.model_validate_json(judgement.model_dump_json()) == judgement
