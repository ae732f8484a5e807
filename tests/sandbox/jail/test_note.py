"""What a result says of the exception that ended a program, and what a program that writes that itself can do by it."""

from __future__ import annotations

import os
import struct
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.calls import ProgramException
from sandbox.jail.note import FETCHED_BYTES, blank, read_files, read_note

from .box import Box, settings_at

GROUP = """\
import asyncio
async def fail():
    raise ValueError('inner')
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(fail())
asyncio.run(main())
"""
#: A program, and the type, message, line and source of its exception.
RAISED: dict[str, tuple[str, tuple[str, str, int | None, str | None]]] = {
    "at the top": ("x = 1\n1 / 0\n", ("ZeroDivisionError", "division by zero", 2, "1 / 0")),
    "nested": (
        "def f():\n    return {}['é']\n\ndef g():\n    f()\n\ng()\n",
        ("KeyError", "'é'", 2, "    return {}['é']"),
    ),
    "in a library": (
        "import json\ndef f(text):\n    json.loads(text)\nf('{')",
        (
            "json.decoder.JSONDecodeError",
            "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            3,
            "    json.loads(text)",
        ),
    ),
    "through a library and back": (
        "def key(x):\n    return 1 / x\nsorted([1, 0], key=key)",
        ("ZeroDivisionError", "division by zero", 2, "    return 1 / x"),
    ),
    "in text that it executes": (
        "exec('\\n\\n\\n1 / 0')",
        ("ZeroDivisionError", "division by zero", 1, "exec('\\n\\n\\n1 / 0')"),
    ),
    "of its own": (
        "class Odd(Exception): pass\nclass A:\n    class B(Odd): pass\nraise A.B('x', 2)",
        ("A.B", "('x', 2)", 4, "raise A.B('x', 2)"),
    ),
    "of a file of its own": (
        "import helper\nhelper.fail()",
        ("helper.Failed", "there", 2, "helper.fail()"),
    ),
    "with a cause": (
        "try:\n    {}['a']\nexcept KeyError as exc:\n    raise ValueError('b') from exc",
        ("ValueError", "b", 4, "    raise ValueError('b') from exc"),
    ),
    "no text": ("raise AssertionError", ("AssertionError", "", 1, "raise AssertionError")),
    "syntax": ("x = 1\ny = (\n", ("SyntaxError", "'(' was never closed (main.py, line 2)", 2, "y = (")),
    "indentation": (
        "if 1:\nx = 2",
        (
            "IndentationError",
            "expected an indented block after 'if' statement on line 1 (main.py, line 2)",
            2,
            "x = 2",
        ),
    ),
    "syntax of other text": (
        "compile('(', 'other.py', 'exec')",
        (
            "SyntaxError",
            "'(' was never closed (other.py, line 1)",
            1,
            "compile('(', 'other.py', 'exec')",
        ),
    ),
    "a group": (
        GROUP,
        (
            "ExceptionGroup",
            "unhandled errors in a TaskGroup (1 sub-exception)",
            5,
            "    async with asyncio.TaskGroup() as group:",
        ),
    ),
    "recursion": (
        "def f():\n    f()\nf()",
        ("RecursionError", "maximum recursion depth exceeded", 2, "    f()"),
    ),
    "old line ends": ("x = 1\r\n1 / 0  \r\n", ("ZeroDivisionError", "division by zero", 2, "1 / 0")),
    "a form feed": ("x = '\f'\n1 / 0", ("ZeroDivisionError", "division by zero", 2, "1 / 0")),
    "no traceback": (
        "import sys\nsys.last = None\nraise ValueError(1).with_traceback(None)",
        ("ValueError", "1", 3, "raise ValueError(1).with_traceback(None)"),
    ),
    "a hook of its own": (
        "import sys\nsys.excepthook = lambda *_: print('hooked')\n1 / 0",
        ("ZeroDivisionError", "division by zero", 3, "1 / 0"),
    ),
    "a hook that exits": (
        "import os, sys\nsys.excepthook = lambda *_: os._exit(7)\n1 / 0",
        ("ZeroDivisionError", "division by zero", 3, "1 / 0"),
    ),
    "no text to be had": (
        "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd",
        ("Odd", "<exception str() failed>", 3, "raise Odd"),
    ),
    "not for UTF-8": (r"raise ValueError('a\udcffb')", ("ValueError", "a?b", 1, r"raise ValueError('a\udcffb')")),
    "another folder, no file": (
        "import os\nos.remove('main.py'); os.chdir('/')\n1 / 0",
        ("ZeroDivisionError", "division by zero", 3, "1 / 0"),
    ),
    "a thread that fails as well": (
        "import threading\nt = threading.Thread(target=lambda: {}['a'])\nt.start(); t.join()\n1 / 0",
        ("ZeroDivisionError", "division by zero", 4, "1 / 0"),
    ),
}  # fmt: skip

#: Programs without an exception of their own to tell, and the status of each.
SILENT = {
    "well": ("print(1)", "ok"),
    "an exit": ("raise SystemExit(3)", "error"),
    "an exit with words": ("import sys\nsys.exit('no')", "error"),
    "an exit while one is handled": ("import sys\ntry: 1 / 0\nexcept ZeroDivisionError: sys.exit(1)", "error"),
    "an exit past the interpreter": ("import os\ntry: 1 / 0\nfinally: os._exit(1)", "error"),
    "another program": ("import os\nos.execv('/bin/false', ['false'])", "error"),
    "Ctrl-C": ("raise KeyboardInterrupt", "signaled"),
    "a signal": ("import os\nos.kill(os.getpid(), 11)", "signaled"),
    "time": ("while True: pass", "timeout"),
    "output": ("print('x' * 100_000)\n1 / 0", "output_limit"),
    "a hook that makes it well": ("import sys\ndef hook(*_): sys.exit(0)\nsys.excepthook = hook\n1 / 0", "ok"),
    "a child's": ("import os, sys\nif not os.fork(): 1 / 0\nos.wait()\nsys.exit(1)", "error"),
    "a thread's": ("import sys, threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join(); sys.exit(1)", "error"),
}  # fmt: skip


@pytest.mark.parametrize("name", RAISED)
def test_what_and_where(box: Box, name: str) -> None:
    """Type, text, line and the line's text are those of the program, wherever it was raised and however shown."""
    code, expected = RAISED[name]
    helper = "class Failed(Exception): pass\n\ndef fail():\n    raise Failed('there')"
    result = box.run(code, files={"helper.py": helper})
    assert result.status == "error"
    assert result.exception is not None
    told = result.exception
    assert (told.type, told.message, told.line, told.source) == expected


def test_also_where_the_last_value_is_shown(box: Box) -> None:
    """With `echo_last_value` lines count as in the program's text, also the last."""
    for code, line in (("1 / 0\n2", 1), ("x = 1\n\nx / 0", 3)):
        told = box.run(code, echo=True).exception
        assert told == ProgramException(
            type="ZeroDivisionError", message="division by zero", line=line, source=code.split("\n")[line - 1]
        )


@pytest.mark.parametrize("name", SILENT)
def test_where_there_is_none(box: Box, name: str) -> None:
    """Only what ended the program itself with `error` is told: no exit, no limit, nothing of a child's or a thread's."""
    code, status = SILENT[name]
    result = box.run(code, wall_s=0.5)
    assert (result.status, result.exception) == (status, None)


def test_at_level_process() -> None:
    """Where there are no namespaces, and the program's file lies elsewhere, it is told just so."""
    with closing(Box(settings=settings_at("process"))) as box:
        for name in ("nested", "syntax", "a hook that exits"):
            code, (kind, message, line, source) = RAISED[name]
            told = ProgramException(type=kind, message=message, line=line, source=source)
            assert box.run(code).exception == told
        assert box.run("raise SystemExit(3)").exception is None


def test_it_is_bounded(box: Box) -> None:
    """Type, message and source of any length are cut, between characters."""
    code = "raise type('🎉' * 5000, (Exception,), {})('🎉' * 100_000)  # " + "語" * 5000
    told = box.run(code, output_bytes=1 << 20).exception
    assert told is not None
    assert (told.type, told.message) == ("🎉" * 200, "🎉" * 1000)
    assert told.source == code[:500]


NOTE_BYTES = os.fstat(blank()).st_size


def note(line: int, *texts: bytes, lengths: tuple[int, ...] | None = None) -> bytes:
    """As forkserver.py writes it, or almost."""
    return struct.pack("=I3H", line, *(lengths or map(len, texts))) + b"".join(texts)


def read_of(written: bytes, code: str = "1\n2\n3") -> ProgramException | None:
    """What is read of a note with these bytes."""
    fd = blank()
    try:
        os.pwrite(fd, written, 0)
        return read_note(fd, code)
    finally:
        os.close(fd)


@given(st.binary(max_size=NOTE_BYTES) | st.builds(note, st.integers(0, 4), *[st.binary(max_size=900)] * 3))
def test_any_bytes_at_all(written: bytes) -> None:
    """Whatever stands in a note is nothing or four bounded values, which go through JSON unharmed."""
    told = read_of(written)
    if told is not None:
        assert len(told.type) <= 200
        assert len(told.message) <= 1000
        assert len(told.source or "") <= 500
        assert told.line in {None, 1, 2, 3}
        assert ProgramException.model_validate_json(told.model_dump_json()) == told


@pytest.mark.parametrize(
    "written",
    [
        b"",
        note(1, b"", b"message", b"source"),
        note(4, b"type", b"", b""),
        note(2**32 - 1, b"type", b"", b""),
        note(1, b"type", b"", b"", lengths=(801, 0, 0)),
        note(1, b"type", b"", b"", lengths=(4, 4001, 0)),
        note(1, b"type", b"", b"", lengths=(4, 0, 0xFFFF)),
    ],
)
def test_what_is_not_to_the_letter_is_nothing(written: bytes) -> None:
    """No type, a line that the program has not, a length that is never written: then nothing is told."""
    assert read_of(written) is None


def test_a_note_has_one_size() -> None:
    """Nobody makes it smaller, under the hands of who writes it, or larger, at the worker's cost."""
    fd = blank()
    try:
        for size in (0, NOTE_BYTES - 1, NOTE_BYTES + 1, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


#: A program, and what comes of the files `a`, `b/c` and `d`: their size, None for no room, and nothing where they are not.
FETCHED: dict[str, tuple[str, dict[str, int | None]]] = {
    "all": ("import os\nos.mkdir('b')\nfor n in ('a', 'b/c', 'd'): open(n, 'w').write(n)", {"a": 1, "b/c": 3, "d": 1}),
    "none": ("print(1)", {}),
    "an empty one": ("open('d', 'w')", {"d": 0}),
    "after an exception": ("open('a', 'w').write('x')\n1 / 0", {"a": 1}),
    "after sys.exit": ("import sys\nopen('a', 'w').write('x')\nsys.exit(3)", {"a": 1}),
    "written at exit": ("import atexit\natexit.register(lambda: open('a', 'w').write('x'))", {"a": 1}),
    "from another folder": ("import os\nopen('a', 'w').write('x')\nos.mkdir('e')\nos.chdir('e')", {"a": 1}),
    "one without room": ("open('a', 'wb').write(bytes((1 << 20) + 1))\nopen('d', 'w').write('x')", {"a": None, "d": 1}),
    "as many as there is room for": (
        "import os\nos.mkdir('b')\nfor n in ('a', 'b/c', 'd'): open(n, 'wb').write(bytes(1 << 19))",
        {"a": 1 << 19, "b/c": 1 << 19, "d": None},
    ),
    "no files": ("import os, socket\nos.mkdir('a')\nos.mkfifo('d')\nos.mkdir('b')\nos.symlink('/dev/zero', 'b/c')", {}),
    "after a bare end": ("import os\nopen('a', 'w').write('x')\nos._exit(0)", {}),
    "with no descriptor left": ("import os\nopen('a', 'w').write('x')\nheld = []\ntry:\n    while True: held.append(os.dup(1))\nexcept OSError: pass", {}),
    "with other functions": ("import os\nopen('a', 'w').write('x')\nos.open = None", {}),
    "of a fork": ("import os\nif os.fork() == 0: open('a', 'w').write('x')\nelse: os.wait()", {"a": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", FETCHED)
def test_files_that_are_wanted(box: Box, name: str) -> None:
    """Regular files that a program has left come back as they are, as long as there is room for them."""
    code, expected = FETCHED[name]
    result = box.run(code, fetch_files=["a", "b/c", "d"])
    assert result.status in {"ok", "error"}, result
    found = {name: None if file is None else len(file.base64) for name, file in result.files.items()}
    assert found == expected


def test_the_bytes_of_a_file_survive_the_wire(box: Box) -> None:
    """Whatever is in a file, its caller gets."""
    result = box.run("open('a', 'wb').write(bytes(range(256)))", fetch_files=["a"])
    again = type(result).model_validate_json(result.model_dump_json())
    assert again == result
    file = again.files["a"]
    assert file is not None
    assert file.base64 == bytes(range(256))


def test_no_files_of_a_program_that_was_ended(box: Box) -> None:
    """Who did not come to an end has left nothing."""
    result = box.run("open('a', 'w').write('x')\nwhile True: pass", fetch_files=["a"], wall_s=0.3)
    assert (result.status, result.files) == ("timeout", {})


@given(st.binary(max_size=200), st.integers(1, 5))
def test_files_of_nonsense(content: bytes, count: int) -> None:
    """Of whatever lies there, no more is taken than there is room for."""
    fd = blank(count)
    try:
        os.pwrite(fd, content, 8192)
        files = read_files(fd, [str(n) for n in range(count)])
        assert sum(len(file.base64) for file in files.values() if file) <= FETCHED_BYTES + 4 * count
    finally:
        os.close(fd)
