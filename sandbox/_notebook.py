"""The program that runs the cells of a notebook one after another, inside of a jail. `cells.py` makes calls of it.

The cells lie beside it as `cell_1.py`, `cell_2.py` and so on, so that a traceback finds their lines. They share a
`__main__` of their own: a cell that calls something `print` or `os` does not touch what stands here.

Protocol of `report`. After each cell both streams get a mark: RS, a word of the notebook's own, a record, RS. A record
is JSON in ASCII, so it holds no RS, and it is the program's word: the cells run in this very process and can write
what they like. On stdout it is `{"cell": 1, "is_last": false}` with `"value"`, what a notebook shows of the cell's last
expression, or with `"error": {"type", "message", "traceback": [line, ...]}`. On stderr it is the number alone.
`is_last` says that no cell runs after this one.
"""

from __future__ import annotations
import __future__

import ast
import atexit
import builtins
import contextlib
import functools
import itertools
import json
import operator
import os
import signal
import sys
import traceback
import types
from collections.abc import Iterator

FUTURE_FLAGS = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


class Notebook:
    """The cells, and what they have made so far."""

    def __init__(self, count: int) -> None:
        self.names = [os.path.abspath(f"cell_{number}.py") for number in range(1, count + 1)]  # noqa: PTH100
        self.sources = [read(name) for name in self.names]  # before a cell can change what lies there
        self.main = sys.modules["__main__"] = types.ModuleType("__main__")
        self.main.__dict__.update({"__builtins__": builtins, "__file__": __file__})
        # What cells leave behind ends as what a script leaves: files are flushed, `__del__` runs.
        atexit.register(self.main.__dict__.clear)
        self.flags = 0
        self.value: str | None = None

    def replay(self) -> None:
        """Run the last cell as the program, after the others in silence. What goes wrong in those is passed over."""
        *earlier, cell = self.sources
        with silence():
            for source, name in zip(earlier, self.names, strict=False):
                with contextlib.suppress(BaseException):
                    self.run(source, name)
        if sys.excepthook is sys.__excepthook__:
            sys.excepthook = show_failure
        # From here on it is the program: tracebacks, `inspect` and spawned processes find it in its usual place.
        with open(__file__, "w", encoding="utf-8", newline="") as file:
            file.write(cell)
        self.run(cell, __file__)

    def report(self, word: str, cell_s: float | None, *, stop_on_error: bool) -> None:
        """Run all cells, each for at most so long, and tell what came of each."""
        signal.signal(signal.SIGALRM, out_of_time)
        sys.displayhook = self.show
        with open(os.dup(1), "wb") as stdout, open(os.dup(2), "wb") as stderr:
            for number, (source, name) in enumerate(zip(self.sources, self.names, strict=True), 1):
                failure = self.attempt(source, name, cell_s)
                is_last = number == len(self.names) or (failure is not None and stop_on_error)
                outcome = {"value": self.value} if failure is None else {"error": described(failure)}
                flush()
                for stream, record in (
                    (stdout, {"cell": number, "is_last": is_last, **outcome}),
                    (stderr, {"cell": number}),
                ):
                    stream.write(f"\x1e{word}{json.dumps(record)}\x1e".encode("ascii"))
                    stream.flush()
                if is_last:
                    return

    def attempt(self, source: str, name: str, cell_s: float | None) -> BaseException | None:
        """Run a cell; what it raised is its outcome."""
        self.value = None
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, cell_s or 0)
                self.run(source, name)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as exc:  # noqa: BLE001 - whatever the cell raised is its outcome
            return exc
        return None

    def run(self, source: str, name: str) -> None:
        """Run a cell, and show the value of an expression on its last line through `sys.displayhook`."""
        tree = compile(source, name, "exec", ast.PyCF_ONLY_AST | self.flags, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        last = tree.body[-1] if tree.body else None
        shown = [tree.body.pop()] if isinstance(last, ast.Expr) and not is_silenced(source, last) else []
        body = compile(tree, name, "exec", self.flags, dont_inherit=True)
        self.flags |= body.co_flags & FUTURE_FLAGS  # `from __future__` holds for the cells that follow
        tail = compile(ast.Interactive(shown), name, "single", self.flags, dont_inherit=True)
        exec(body, self.main.__dict__)  # noqa: S102 - inside of a jail
        exec(tail, self.main.__dict__)  # noqa: S102

    def show(self, value: object) -> None:
        """Keep what a notebook would display."""
        if value is not None:
            builtins.__dict__["_"] = value
            self.value = carried(repr(value))


def read(name: str) -> str:
    """The text of a cell, with its own line ends."""
    with open(name, encoding="utf-8-sig", newline="") as file:
        return file.read()


def is_silenced(source: str, last: ast.Expr) -> bool:
    """True when a semicolon follows the last expression: as in a notebook, its value is then not wanted."""
    assert last.end_lineno is not None
    # The parser counts bytes, and lines as bytes have them. No text can follow, only ) ; and comments.
    line, *rest = source.encode().splitlines()[last.end_lineno - 1 :]
    return any(b";" in each.partition(b"#")[0] for each in (line[last.end_col_offset :], *rest))


def out_of_time(_number: int, _frame: types.FrameType | None) -> None:
    """End a cell at its limit."""
    raise TimeoutError("the cell ran for longer than its limit")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Let both streams lead nowhere, whoever writes to them."""
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    flush()
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    try:
        yield
    finally:
        flush()
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)


def flush() -> None:
    """Write what cells have printed, in whatever stream of theirs it waits."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):  # it may be closed, or no stream at all
            stream.flush()  # type: ignore[union-attr]


def described(failure: BaseException) -> dict[str, object]:
    """An exception as a record has it."""
    kind = type(failure)
    is_known = kind.__module__ in {"__main__", "builtins"}  # a traceback leaves these out
    name = kind.__qualname__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(failure)
    except BaseException:  # noqa: BLE001 - the cell's own class may raise anything
        message = "<exception str() failed>"
    lines = "".join(traceback.format_exception(kind, failure, own_frames(failure))).splitlines()
    return {"type": carried(name), "message": carried(message), "traceback": list(map(carried, lines))}


def carried(text: str) -> str:
    """Text that UTF-8 can carry."""
    return text.encode("utf-8", "backslashreplace").decode()


def own_frames(failure: BaseException) -> types.TracebackType | None:
    """The traceback without the frames of this file."""
    kept: list[types.TracebackType | None] = []
    frames = failure.__traceback__
    while frames is not None:
        if frames.tb_frame.f_globals is not globals():
            kept.append(frames)
        frames = frames.tb_next
    kept.append(None)
    for frame, following in itertools.pairwise(kept):
        assert frame is not None
        frame.tb_next = following
    return kept[0]


def show_failure(kind: type[BaseException], failure: BaseException, _: types.TracebackType | None) -> None:
    """Print what ended the program without the frames of this file."""
    failure.__traceback__ = own_frames(failure)
    sys.__excepthook__(kind, failure, failure.__traceback__)
