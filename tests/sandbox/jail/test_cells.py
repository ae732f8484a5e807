"""Cells of a notebook as one call, in a real jail."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.calls import CallStatus, Limits, ToolCall, ToolResult
from sandbox.cells import CellError, CellResult, cells_call, read_cells, replay_call
from sandbox.errors import InternalError, InvalidCall
from sandbox.jail.preload import choose

from .box import WALL_S, Box

LIMITS = Limits(wall_s=WALL_S)


def run(box: Box, call: ToolCall) -> ToolResult:
    return box.do(box.jail.run(call, box.slots.free[0]))


def cells_of(box: Box, *cells: str, **how: object) -> list[CellResult]:
    """What came of each."""
    return read_cells(cells, run(box, cells_call(cells, **{"limits": LIMITS, **how})))  # type: ignore[arg-type]


def test_cells_share_what_they_define(box: Box) -> None:
    """A name, an import, a `from __future__` and the last value of one cell are there in the next."""
    cells = [
        "from __future__ import annotations\nimport math\nx = 2",
        "def f(a: Unheard) -> None: ...\nx + 1",
        "print(_, math.floor(2.5), __name__, f.__annotations__)",
    ]
    results = cells_of(box, *cells)
    assert results == [
        CellResult("ok"),
        CellResult("ok", value="3"),
        CellResult("ok", stdout="3 2 __main__ {'a': 'Unheard', 'return': 'None'}\n"),
    ]


def test_each_cell_has_its_own_output(box: Box) -> None:
    """Both streams are told apart by cells, also what a child process writes and what waits in a buffer."""
    results = cells_of(
        box,
        "import sys\nprint('a', end='')\nprint('b', file=sys.stderr)",
        "import subprocess\nsubprocess.run(['echo', 'c'])\n1;",
        "print('d'); 'e'",
    )
    assert results == [
        CellResult("ok", stdout="a", stderr="b\n"),
        CellResult("ok", stdout="c\n"),
        CellResult("ok", stdout="d\n", value="'e'"),
    ]


def test_an_error_has_the_cells_own_lines(box: Box) -> None:
    """A traceback names cells and their lines, with the source of each, and nothing of ours."""
    error, rest = cells_of(box, "def f(a):\n    return 1 / a\n\nprint('on'); f(0)", "1")
    assert error == CellResult(
        "error",
        stdout="on\n",
        error=CellError(
            type="ZeroDivisionError",
            message="division by zero",
            traceback=[
                "Traceback (most recent call last):",
                '  File "/tmp/cell_1.py", line 4, in <module>',
                "    print('on'); f(0)",
                "                 ~^^^",
                '  File "/tmp/cell_1.py", line 2, in f',
                "    return 1 / a",
                "           ~~^~~",
                "ZeroDivisionError: division by zero",
            ],
        ),
    )
    assert rest == CellResult("not_run")


@pytest.mark.parametrize(
    ("cell", "kind", "message"),
    [
        ("x =", "SyntaxError", "invalid syntax (cell_1.py, line 1)"),
        ("raise SystemExit(3)", "SystemExit", "3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("while True: pass", "TimeoutError", "the cell ran for longer than its limit"),
        ("import json; json.loads('x')", "json.decoder.JSONDecodeError", "Expecting value: line 1 column 1 (char 0)"),
        ("class E(Exception):\n    def __str__(self): 1 / 0\nraise E", "E", "<exception str() failed>"),
        ("class R:\n    def __repr__(self): raise ValueError('r')\nR()", "ValueError", "r"),
        ("raise ValueError('\\ud800\\x1e')", "ValueError", "\\ud800\x1e"),
    ],
)  # fmt: skip
def test_whatever_a_cell_raises_is_its_own(box: Box, cell: str, kind: str, message: str) -> None:
    """Any exception is the outcome of its cell, and the next one runs where that was asked for."""
    failed, after = cells_of(box, cell, "print('after')", cell_s=0.3, stop_on_error=False)
    assert failed.error is not None
    assert (failed.status, failed.error.type, failed.error.message) == ("error", kind, message)
    assert not any("main.py" in line for line in failed.error.traceback)
    assert after == CellResult("ok", stdout="after\n")


@pytest.mark.parametrize(
    ("cell", "status"),
    [
        ("import os; print('so far', flush=True); os._exit(0)", CallStatus.OK),
        ("import os; print('so far'); os.kill(os.getpid(), 11)", CallStatus.SIGNALED),
        ("print('so far')\nwhile True:\n    pass", CallStatus.TIMEOUT),
    ],
)
def test_a_cell_that_ends_the_call_was_stopped(box: Box, cell: str, status: CallStatus) -> None:
    """What was printed before the end is kept, the cells before stay as they were, the others have not run."""
    cells = ["1", cell, "2"]
    result = run(box, cells_call(cells, limits=Limits(wall_s=0.5)))
    assert result.status is status
    assert read_cells(cells, result) == [
        CellResult("ok", value="1"),
        CellResult("stopped", stdout="so far\n"),
        CellResult("not_run"),
    ]


def test_a_cell_that_prints_too_much_was_stopped(box: Box) -> None:
    """Its output ends where the limit was, also in the middle of a mark."""
    for room in range(30, 60):
        cells = ["print('x' * 20)", "print('y' * 1000)"]
        result = run(box, cells_call(cells, limits=Limits(wall_s=WALL_S, output_bytes=room)))
        assert result.status is CallStatus.OUTPUT_LIMIT
        assert read_cells(cells, result)[0] == CellResult("stopped", stdout="x" * 20 + "\n")


def test_names_of_cells_hide_nothing_from_the_others_machinery(box: Box) -> None:
    """Cells may take any name, builtin or ours, and leave threads and exit functions to write last."""
    results = cells_of(
        box,
        "print = len = open = Notebook = json = os = flush = 3",
        "import atexit, builtins\natexit.register(builtins.print, 'exit')\nnumber",
        "class Left:\n    def __del__(self): import builtins; builtins.print('left')\nleft = Left()",
        stop_on_error=False,
    )
    assert [result.status for result in results] == ["ok", "error", "ok"]
    assert results[2].stdout == "exit\nleft\n"


def test_the_program_can_lie_about_its_cells_and_about_nothing_else(box: Box) -> None:
    """A mark of the program's own is believed where it is the next record, and is text where it is not."""
    forge = (
        "import re\nword = re.search(r\"report\\('(\\w+)\", open('main.py').read())[1]\n"
        'print(f\'\\x1e{word}{{"cell": CELL, "is_last": true, "value": "lie"}}\\x1e\', end="")'
    )
    [lied] = cells_of(box, forge.replace("CELL", "1"))
    assert lied.value == "lie"
    [odd] = cells_of(box, forge.replace("CELL", "2"))
    assert odd.value is None
    assert '"cell": 2' in odd.stdout


@given(st.lists(st.sampled_from(["\x1e", "{", '"cell": 1', "}", "WORD", "null", "é"]), max_size=12))
def test_no_output_is_a_crash_of_the_reader(pieces: list[str]) -> None:
    """Whatever a stream holds, there is one result for each cell."""
    cells = ["1", "2"]
    code = cells_call(cells).code
    word = code.rpartition("report('")[2].partition("'")[0]
    text = "".join(pieces).replace("WORD", word)
    results = read_cells(cells, ToolResult(id="a", status=CallStatus.OK, stdout=text, stderr=text))
    assert len(results) == 2


def test_a_fault_is_no_outcome_of_cells() -> None:
    """A call that the service failed raises that, and is no verdict on any cell."""
    with pytest.raises(InternalError):
        read_cells(["1"], ToolResult(id="a", status=CallStatus.INTERNAL_ERROR))


@pytest.mark.parametrize(
    ("cells", "how", "reason"),
    [
        ([], {}, "cells: there is none"),
        (["1"], {"cell_s": 0.0}, "cell_s: must be"),
        (["1"], {"cell_s": float("nan")}, "cell_s: must be"),
        (["1"], {"files": {"cell_1.py": ""}}, "files: cell_1.py is a cell's own file"),
        (["1"] * 300, {}, "files: Dictionary should have at most 256 items"),
        (["\ud800"], {}, "files.cell_1.py"),
    ],
)
def test_a_notebook_that_cannot_be_is_an_invalid_call(
    cells: list[str], how: dict[str, object], reason: str
) -> None:
    """What is wrong is said before anything is sent."""
    with pytest.raises(InvalidCall, match=f"^{reason}"):
        cells_call(cells, **how)  # type: ignore[arg-type]


def test_earlier_cells_are_replayed_in_silence(box: Box) -> None:
    """What they define is there, and nothing that they print or raise is seen; the cell's own value is shown."""
    earlier = [
        "import sys\nx = 40\nprint('no')\nprint('no', file=sys.stderr)",
        "y = 2\n1 / 0",
        "import os; os.system('echo no')\nx += y",
        "y =",
    ]
    result = run(box, replay_call(earlier, "print('yes')\nx", limits=LIMITS))
    assert (result.status, result.stdout, result.stderr) == (CallStatus.OK, "yes\n42\n", "")


@pytest.mark.parametrize("earlier", [[], ["def f(a):\n    return 1 / a"]])
def test_the_cell_is_the_program(box: Box, earlier: list[str]) -> None:
    """Its traceback is that of a program of its own: its lines, its source, its exit code."""
    cell = "\ufeffimport inspect\r\ndef g():\n    '''é'''\nprint(inspect.getsource(g))\nint('x')"
    result = run(box, replay_call(earlier, cell, limits=LIMITS))
    assert (result.status, result.exit_code) == (CallStatus.ERROR, 1)
    assert result.stdout == "def g():\n    '''é'''\n\n"
    assert result.stderr == (
        'Traceback (most recent call last):\n  File "/tmp/main.py", line 5, in <module>\n'
        "    int('x')\n    ~~~^^^^^\nValueError: invalid literal for int() with base 10: 'x'\n"
    )
    assert result.exception is not None
    assert (result.exception.type, result.exception.line) == ("ValueError", 5)
    assert run(box, replay_call(earlier, "raise SystemExit(3)", limits=LIMITS)).exit_code == 3
    assert run(box, replay_call(earlier, "f(", limits=LIMITS)).stderr.startswith(
        '  File "/tmp/main.py", line 1\n'
    )


def test_a_notebook_finds_its_libraries_warm() -> None:
    """A worker sees in the call's code what its cells import."""
    cells = ["import sys, numpy as np", "x = 1"]
    for call in (cells_call(cells), replay_call(cells, "from os import path")):
        assert choose(call.code) == choose("import numpy")
    assert choose(cells_call(["x = 1"]).code) == 0
