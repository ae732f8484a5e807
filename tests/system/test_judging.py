"""Submissions judged by the whole service, as the page shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from .stack import Stack

PAGE = Path(__file__).parents[2] / "sandbox/grading/judge.md"
_BLOCK = re.compile(r"^```json\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TASKS: list[dict[str, Any]] = [
    json.loads(block) for block in _BLOCK.findall(PAGE.read_text(encoding="utf-8"))
]


def judged(stack: Stack, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    response = stack.http.post("/v1/judge/batch", json={"items": tasks})
    results: list[dict[str, Any]] = response.raise_for_status().json()["results"]
    return results


def test_each_task_of_the_page_is_accepted(the_stack: Stack) -> None:
    """All examples are right submissions, judged by real jails."""
    assert len(TASKS) >= 4
    results = judged(the_stack, TASKS)
    assert [result["verdict"] for result in results] == ["accepted"] * len(TASKS)
    assert all(result["score"] == 1 and result["usage"]["cpu_s"] > 0 for result in results)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: next(iter(set(task) - {"code"})))
def test_another_submission_is_not(the_stack: Stack, task: dict[str, Any]) -> None:
    """The same tests refuse a program that does nothing, one that is no Python, and one that exits well at once."""
    for code in ("pass", "no python", "import os; os._exit(0)"):
        answer = the_stack.http.post("/v1/judge", json={**task, "code": code})
        assert answer.status_code == 200
        assert answer.json()["verdict"] in {"wrong_answer", "runtime_error"}
        assert answer.json()["passed"] == 0


def test_many_at_once(the_stack: Stack) -> None:
    """A batch of many tasks of both kinds has each judgement in its place."""
    right = {
        "code": "print(int(input()) * 2)",
        "cases": [{"stdin": str(n), "expected": str(2 * n)} for n in range(5)],
    }
    wrong = {**right, "code": "print(int(input()) ** 2)"}
    function = {"code": "def f(x): return x", "tests": [{"function": "f", "arguments": [1], "expected": 1}]}
    results = judged(the_stack, [right, wrong, function] * 10)
    assert [result["verdict"] for result in results] == ["accepted", "wrong_answer", "accepted"] * 10
    assert {result["passed"] for result in results[1::3]} == {1}
