"""Programs of others with the output that was recorded when they ran elsewhere: one JSON object a line.

A line has `id`, `code` and `stdout`, without its last newline; further fields are left alone.
"""

from __future__ import annotations

from enum import Enum
from itertools import islice
from math import isclose
from pathlib import Path

from pydantic import BaseModel, ValidationError

from sandbox import Answer, ConfigError, SandboxError
from sandbox.calls import first_error


class Recorded(BaseModel):
    """One program and what it printed."""

    id: str
    code: str
    stdout: str

    @property
    def timed_out(self) -> bool:
        """Whether the record is that of a program that had no end."""
        return "TimeoutError" in self.stdout


class Agreement(Enum):
    """How an output compares with the recorded one."""

    EXACT = "same output"
    NUMERIC = "same numbers"  # 18 and 18.0
    NONE = "other output"


def read_corpus(path: Path, first: int | None = None) -> list[Recorded]:
    """The programs of a file, or its first few. Raises ConfigError that names the line that is wrong."""
    try:
        with path.open(encoding="utf-8") as lines:
            return [_read_line(f"{path}:{n}", line) for n, line in enumerate(islice(lines, first), start=1)]
    except OSError as exc:
        raise ConfigError(f"cannot read the corpus {path}: {exc.strerror}") from exc


def compare(recorded: Recorded, outcome: Answer) -> Agreement:
    """Whether a call gave the recorded output; a call without a result did not."""
    if isinstance(outcome, SandboxError):
        return Agreement.NONE
    ours = outcome.stdout.removesuffix("\n")
    if ours == recorded.stdout:
        return Agreement.EXACT
    if _same_numbers(ours.split(), recorded.stdout.split()):
        return Agreement.NUMERIC
    return Agreement.NONE


def _read_line(place: str, line: str) -> Recorded:
    try:
        return Recorded.model_validate_json(line)
    except ValidationError as exc:
        raise ConfigError(f"{place} is no program with id, code and stdout: {first_error(exc)}") from exc


def _same_numbers(ours: list[str], theirs: list[str]) -> bool:
    """Whether word stands by word, where a number may be written in another way."""
    return len(ours) == len(theirs) and all(map(_same_word, ours, theirs))


def _same_word(ours: str, theirs: str) -> bool:
    try:
        return ours == theirs or isclose(float(ours), float(theirs), rel_tol=1e-9)
    except ValueError:
        return False
