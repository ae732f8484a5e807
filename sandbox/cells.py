"""The cells of a notebook as one call: `cells_call` makes it, `read_cells` reads what came of each.

Cells share what they define, as in a notebook, and nothing outlives the call. There is no kernel behind them: no magics
(`%time`, `!ls`), no `display`, no `await` outside of a function, and of a value its `repr` alone.

`_notebook.py` is the program that runs them, and has the protocol. What it reports is the program's word: cells run in
the same process and can say of themselves what they like. The call's own status is not theirs to choose.
"""

from __future__ import annotations

import hashlib
import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Unpack

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox.calls import ToolCall, ToolResult, first_error
from sandbox.client import CallFields
from sandbox.errors import InvalidCall

#: `stopped`: it was running when the call ended, by a limit, a signal or an exit of its own.
CellStatus = Literal["ok", "error", "stopped", "not_run"]


class CellError(BaseModel):
    """The exception that ended a cell."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: str  # as a traceback has it, with its module unless that is builtins or the cells' own
    message: str
    traceback: list[str]  # lines


@dataclass(frozen=True, slots=True)
class CellResult:
    """What came of one cell."""

    status: CellStatus
    stdout: str = ""
    stderr: str = ""
    value: str | None = None  # of an expression on its last line
    error: CellError | None = None


def cells_call(
    cells: Sequence[str],
    *,
    cell_s: float | None = None,
    stop_on_error: bool = True,
    **fields: Unpack[CallFields],
) -> ToolCall:
    """One call that runs all cells, each for at most `cell_s` seconds, and with `stop_on_error` none after a failure.

    A cell can ignore `cell_s`; `limits.wall_s`, which bounds all of them together, it cannot. Raises InvalidCall.
    """
    if cell_s is not None and not 0 < cell_s < float("inf"):
        raise InvalidCall("cell_s: must be a number of seconds above 0")
    arguments = f"{_word(cells)!r}, {cell_s!r}, stop_on_error={bool(stop_on_error)}"
    return _notebook(cells, f"report({arguments})", fields)


def replay_call(earlier: Sequence[str], cell: str, **fields: Unpack[CallFields]) -> ToolCall:
    """A call of one cell in a notebook of which earlier cells ran before.

    They run again, in silence, and what goes wrong in them is passed over; they take their share of the limits. The
    cell itself is the program: its output, its exit code, its traceback and the value of its last expression are the
    call's. Raises InvalidCall.
    """
    if not earlier:
        return make_call(cell, {"echo_last_value": True, **fields})
    return _notebook([*earlier, cell], "replay()", fields)


def make_call(code: str, fields: CallFields) -> ToolCall:
    """A call from its parts. Raises InvalidCall."""
    try:
        return ToolCall.model_validate({"code": code, **fields})
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc


def read_cells(cells: Sequence[str], result: ToolResult) -> list[CellResult]:
    """What came of each of these cells, of which `result` is the call's. Raises its error for a fault."""
    if (error := result.to_error()) is not None:
        raise error
    word = _word(cells)
    outputs, records = _cut(result.stdout, word, len(cells))
    errors, _ = _cut(result.stderr, word, len(cells))
    is_over = bool(records) and records[-1].is_last
    if is_over:  # what threads and exit functions wrote after the last cell is the last cell's
        outputs = _joined(outputs, len(records))
        errors = _joined(errors, len(records))
    results = list(_done(records, outputs, errors))
    if not is_over and len(results) < len(cells):
        results.append(CellResult("stopped", outputs[len(results)], "".join(errors[len(results) :])))
    return results + [CellResult("not_run")] * (len(cells) - len(results))


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    cell: int
    is_last: bool = False
    value: str | None = None
    error: CellError | None = None


def _done(records: Sequence[_Record], outputs: Sequence[str], errors: Sequence[str]) -> Iterator[CellResult]:
    for index, record in enumerate(records):
        # Without its mark a cell's stderr is with the one before it: the program has closed the stream.
        stderr = errors[index] if index < len(errors) else ""
        status: CellStatus = "ok" if record.error is None else "error"
        yield CellResult(status, outputs[index], stderr, record.value, record.error)


def _cut(text: str, word: str, most: int) -> tuple[list[str], list[_Record]]:
    """The records in a stream, at most so many, and the text before, between and behind them.

    A mark that is not the next record is the program's own doing, and stays text; half of one at the end is left out.
    """
    texts: list[str] = []
    records: list[_Record] = []
    start = 0
    for match in re.finditer(rf"\x1e{word}([^\x1e]*)\x1e", text):
        if len(records) < most and (record := _record(match[1], len(records) + 1)) is not None:
            records.append(record)
            texts.append(text[start : match.start()])
            start = match.end()
    before, _, after = text[start:].rpartition("\x1e")
    is_half = word.startswith(after) or after.startswith(word)
    return [*texts, before if is_half else text[start:]], records


def _record(text: str, number: int) -> _Record | None:
    try:
        record = _Record.model_validate_json(text)
    except ValidationError:
        return None
    return record if record.cell == number else None


def _joined(texts: Sequence[str], count: int) -> list[str]:
    """The texts of so many cells, where the last has all that is left."""
    return [*texts[: count - 1], "".join(texts[count - 1 :])]


def _notebook(cells: Sequence[str], what: str, fields: CallFields) -> ToolCall:
    own_files = fields.get("files") or {}
    if not cells:
        raise InvalidCall("cells: there is none")
    cell_files = {f"cell_{number}.py": cell for number, cell in enumerate(cells, 1)}
    if taken := cell_files.keys() & own_files.keys():
        raise InvalidCall(f"files: {min(taken)} is a cell's own file")
    code = f"{_program()}\n\nNotebook({len(cells)}).{what}\n{_hint(cells)}"
    return make_call(code, {**fields, "files": {**own_files, **cell_files}})


@cache
def _program() -> str:
    return Path(__file__).with_name("_notebook.py").read_text(encoding="utf-8")


_IMPORTS = re.compile(r"^[ \t]*(?:import|from)[ \t]+([\w., \t]{1,500})", re.MULTILINE)


def _hint(cells: Sequence[str]) -> str:
    """Import statements that never run: a worker looks at those of a program to choose a warm interpreter for it."""
    names = {name for cell in cells for line in _IMPORTS.findall(cell) for name in re.findall(r"\w+", line)}
    lines = [f"    import {name}\n" for name in sorted(names)[:200] if _is_name(name)]
    return "".join(["if False:\n    pass\n", *lines])


def _is_name(text: str) -> bool:
    return text.isidentifier() and not keyword.iskeyword(text) and len(text) < 50


def _word(cells: Sequence[str]) -> str:
    """A word that no cell prints by chance, and the same whenever the same cells are sent again."""
    return hashlib.sha256("\0".join(cells).encode("utf-8", "surrogatepass")).hexdigest()[:24]
