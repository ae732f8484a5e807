"""Mathematics graded by the whole service: real jails, real hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sandbox.grading
from sandbox import Grader, InvalidCall

from .stack import Stack

RIGHT = [
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\pi}{4}", r"\pi/4"),
    ("x^2+2x+1", "(x+1)^2"),
    ("1/3", "0.333333"),
    (r"\{1,2,3\}", "3, 2, 1"),
    ("(1,2)", "( 1 , 2 )"),
    ("[0, 1)", r"\left[0,1\right)"),
    ("x=5", "5"),
    ("A", r"\text{(A)}"),
    ("5", r"5\text{ cm}"),
    ("1024", "2**10"),
    (r"\frac{1}{2}", r"50\%"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"90^\circ", "90"),
    ("2x+3", "3+2x"),
]
WRONG = [
    (r"2\sqrt{3}", r"\sqrt{13}"),
    ("x^2", "x^3"),
    (r"\pi", "3.1416"),
    ("[0,1]", "(0,1)"),
    (r"\{1,2\}", r"\{1,3\}"),
    ("x>1", "x<1"),
    ("5", "yes, I think"),
]
#: Inputs that hung trainers, of the issues that their users wrote.
HANGS = [
    "10^{10^{10^{10}}}",
    r"(10^{10})!",
    "9^{9^{9^{9}}}",
    r"\frac{1}{" * 60 + "2" + "}" * 60,
    r"\int_0^1 \frac{\sin x}{x^x+e^x}dx",
]
#: What would take over a grader that evaluates text, were there one.
CODE = [
    "__import__('os').write(1,b'equivalent\\n')",
    r"\text{__import__('os')._exit(0)}",
    "(lambda: print('equivalent'))()",
    "equivalent",
    "equivalent\n",
]


def graded(stack: Stack, pairs: list[tuple[str, str]], **options: Any) -> list[dict[str, Any]]:
    """The grades of answers to golds."""
    items = [{"gold": gold, "answer": f"So it is \\boxed{{{answer}}}", **options} for gold, answer in pairs]
    response = stack.http.post("/v1/grade/math/batch", json={"items": items})
    results: list[dict[str, Any]] = response.raise_for_status().json()["results"]
    return results


def test_right_answers_are_right_and_wrong_ones_wrong(the_stack: Stack) -> None:
    """In all the forms that models and data sets write."""
    grades = graded(the_stack, RIGHT + WRONG, timeout_s=20)
    verdicts = [grade["correct"] for grade in grades]
    assert verdicts == [True] * len(RIGHT) + [False] * len(WRONG), grades


def test_known_hangs_are_unknown(the_stack: Stack) -> None:
    """What ran for ever elsewhere ends at the limit here, and is no wrong answer."""
    grades = graded(the_stack, [("7", hang) for hang in HANGS], timeout_s=0.5)
    assert {grade["correct"] for grade in grades} == {None}, grades
    assert {grade["reason"] for grade in grades} <= {"too_slow", "out_of_memory"}


@pytest.mark.parametrize("gold", ["7"])
def test_code_in_an_answer_is_only_text(the_stack: Stack, gold: str) -> None:
    """No answer is right because of what it would do, were it run."""
    grades = graded(the_stack, [(gold, code) for code in CODE], timeout_s=20)
    assert [grade["correct"] for grade in grades] == [False] * len(CODE), grades


def test_a_gold_that_cannot_be_read_is_unknown(the_stack: Stack) -> None:
    """The data set's mistake is not the model's, unless both are the same text."""
    grades = graded(the_stack, [(r"\frac{", "5"), (")(", "5"), ("1/0", "5")], timeout_s=20)
    assert [(grade["correct"], grade["reason"]) for grade in grades] == [(None, "gold_unparsable")] * 3


def test_numbers_near_enough_are_right(the_stack: Stack) -> None:
    """Within the tolerance asked for, whatever form the number has."""
    near = graded(the_stack, [(r"\pi", "3.1416"), (r"\sqrt{2}", "1.5"), ("x", "3")], tolerance=0.001)
    assert [grade["correct"] for grade in near] == [True, False, False]


def test_a_verdict_is_known_the_second_time(the_stack: Stack) -> None:
    """It costs nothing then, and says so."""
    first, second = (graded(the_stack, [("y^2+1", "1+y*y")])[0] for _ in range(2))
    assert (first["correct"], first["cached"], second["correct"], second["cached"]) == (
        True,
        False,
        True,
        True,
    )
    assert first["usage"]["cpu_s"] > second["usage"]["cpu_s"] == 0.0


async def test_a_grader_gives_the_same(the_stack: Stack) -> None:
    """What HTTP answers, from Python: verdicts, what is unknown, and what is no task, each in its place."""
    pairs = [*RIGHT[:3], *WRONG[:2], ("7", HANGS[0]), ("5", "5")]
    tasks = [{"gold": gold, "answer": rf"\boxed{{{answer}}}", "timeout_s": 2} for gold, answer in pairs]
    async with Grader(the_stack.url) as grader:
        ours = await grader.math([*tasks, {"gold": "5"}])
    theirs = the_stack.http.post("/v1/grade/math/batch", json={"items": [*tasks, {"gold": "5"}]}).json()[
        "results"
    ]
    told = ("correct", "reason", "extracted", "method", "error")
    assert [grade.model_dump(mode="json", include=set(told)) for grade in ours] == [
        {name: grade[name] for name in told} for grade in theirs
    ]
    assert (ours[-1].correct, ours[-1].reason) == (None, "invalid_task")


async def test_a_grader_takes_lists() -> None:
    """A single item without its list is a mistake of the caller, and no answer of ours."""
    async with Grader() as grader:
        with pytest.raises(TypeError, match="a list"):
            await grader.math({"answer": "1", "gold": "1"})  # type: ignore[arg-type]


async def test_a_grader_judges_programs(the_stack: Stack) -> None:
    """As `/v1/judge` does; what is no task is an error in its place."""
    async with Grader(the_stack.url) as grader:
        good, bad, wrong = await grader.judge(
            [
                {"code": "print(int(input()) + 1)", "cases": [{"stdin": "1", "expected": "2"}]},
                {"code": "print(3)", "cases": [{"stdin": "1", "expected": "2"}]},
                {"code": "print(3)"},
            ]
        )
    assert not isinstance(good, Exception)
    assert not isinstance(bad, Exception)
    assert (good.score, bad.score) == (1.0, 0.0)
    assert isinstance(wrong, InvalidCall)


def test_the_page_s_example_does_what_it_says(the_stack: Stack) -> None:
    """The block in sandbox/grading/README.md prints what its comments say."""
    page = Path(sandbox.grading.__file__).with_name("README.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    promised = [line.split("  # ")[1] for line in code.splitlines() if "  # " in line]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8000", the_stack.url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout.splitlines(), done.stderr) == (promised, "")
