"""What a model sees of programs that really ran."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox.calls import Limits
from sandbox.tools import render, to_call

from .box import WALL_S, Box


def seen(box: Box, name: str, arguments: dict[str, str], *, most: int = 8192, **fields: Any) -> list[str]:
    """The lines of a tool's answer, without the last, which is a time."""
    call = to_call(name, arguments, **{"limits": Limits(wall_s=WALL_S), **fields})
    *lines, last = render(box.do(box.jail.run(call, box.slots.free[0])), max_bytes=most).split("\n")
    assert last.startswith("execution time: ")
    return lines


@pytest.mark.parametrize(
    "name", ["python_code_with_standard_io", "execute_python_code_with_standard_io", "python", "jupyter_code"]
)
def test_each_tool_shows_the_last_value(box: Box, name: str) -> None:
    """As a notebook does."""
    assert seen(box, name, {"code": "x = 6\nx * 7"}) == ["Tool call success", "stdout: 42"]


def test_input_is_what_the_program_reads(box: Box) -> None:
    """And without any it reads the end."""
    code = "print(input())"
    assert seen(box, "python_code_with_standard_io", {"code": code, "input": "a"}) == [
        "Tool call success",
        "stdout: a",
    ]
    assert (
        seen(box, "python_code_with_standard_io", {"code": code})[-1] == "EOFError: EOF when reading a line"
    )


def test_a_notebook_goes_on_where_it_was(box: Box) -> None:
    """A cell finds what those before it made, and its own failure alone is seen."""
    lines = seen(box, "jupyter_code", {"code": "print(x)\n\ny"}, earlier=["x = 1; print('no')", "1 / 0"])
    assert lines == [
        "Tool call failure",
        "reason: the program failed with exit code 1",
        "stdout: 1",
        "stderr: Traceback (most recent call last):",
        '  File "/tmp/main.py", line 3, in <module>',
        "    y",
        "NameError: name 'y' is not defined",
    ]


@pytest.mark.parametrize("fields", [{}, {"keep_bytes": 100}])
def test_a_long_output_has_its_true_length(box: Box, fields: dict[str, Any]) -> None:
    """Also where the service itself has left the middle out."""
    lines = seen(box, "python", {"code": "print('a' * 10_000 + 'z' * 9_999)"}, most=10, **fields)
    assert lines == ["Tool call success", "stdout: aaaaa", "… 19,990 of 20,000 bytes left out …", "zzzz"]


@pytest.mark.parametrize(
    ("code", "limits", "reason"),
    [
        ("while True: pass", {"wall_s": 0.3}, "reason: timeout: the program was stopped after "),
        ("while True: print('x' * 99)", {"output_bytes": 1000}, "reason: output limit: the program was stopped after it had printed "),
        ("import os; os.abort()", {}, "reason: the program was ended by signal 6 (SIGABRT)"),
    ],
)  # fmt: skip
def test_a_limit_is_named(box: Box, code: str, limits: dict[str, Any], reason: str) -> None:
    """With its number."""
    lines = seen(box, "python", {"code": code}, limits=Limits(**{"wall_s": WALL_S, **limits}))
    assert lines[0] == "Tool call failure"
    assert lines[1].startswith(reason)
