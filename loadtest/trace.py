"""Traces: files of calls with the times at which they were sent, a JSON object on each line.

    {"at_s": 0.25, "kind": "numpy"}                      a kind of ours, or of the workload that is measured
    {"at_s": 0.5, "code": "print(1)", "stdin": "x"}      a program of one's own, with any field of a call
    {"at_s": 0.75}                                       whatever the workload brings

`at_s` counts from the start, in any order. What a bench writes of its calls (`to_line`) is such a file, and what came
of them, which is in it too, is no part of a plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic_core import from_json

from loadtest.openloop import Planned, Sent
from loadtest.workloads import Kind, own_kind
from sandbox import ConfigError, InvalidCall
from sandbox.calls import first_error, parse_call

_LONGEST_S = 7 * 86400.0  # of a trace; a clock that counts nanoseconds ends somewhere
_MEASURED = {field.name for field in fields(Sent)} - {"at_s", "kind"}


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    at_s: FiniteFloat = Field(ge=0, le=_LONGEST_S)
    kind: str | None = None


def to_line(sent: Sent, started_s: float) -> str:
    """The record of a call, in a run that began so long after the first one."""
    return json.dumps(asdict(sent) | {"at_s": started_s + sent.at_s}) + "\n"


def read_trace(path: Path, kinds: Mapping[str, Kind], drawn: Iterator[Kind]) -> list[Planned]:
    """The plan in a file: `kinds` are those that it may name, and `drawn` fills in where it names none.

    Raises InvalidCall with the number of the line that is wrong, ConfigError for a file that is empty or unreadable.
    """
    planned = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    planned.append(
                        _read_line(line, f"{path}:{number}", f"{path.name}:{number}", kinds, drawn)
                    )
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    if not planned:
        raise ConfigError(f"{path} has no call in it")
    return sorted(planned, key=lambda plan: plan.at_s)


def _read_line(
    raw: bytes, where: str, name: str, kinds: Mapping[str, Kind], drawn: Iterator[Kind]
) -> Planned:
    try:
        return _plan(raw, name, kinds, drawn)
    except ValidationError as exc:
        raise InvalidCall(f"{where}: {first_error(exc)}") from exc
    except ValueError as exc:
        raise InvalidCall(f"{where}: {exc}") from exc
    except InvalidCall as exc:
        raise InvalidCall(f"{where}: {exc.message}") from exc


def _plan(raw: bytes, name: str, kinds: Mapping[str, Kind], drawn: Iterator[Kind]) -> Planned:
    line = from_json(raw)
    if not isinstance(line, dict):
        raise InvalidCall("it is no object")
    timing = {key: line.pop(key) for key in _Line.model_fields if key in line}
    called = {key: value for key, value in line.items() if key not in _MEASURED}
    planned = _Line.model_validate(timing)
    if called:
        return Planned(planned.at_s, own_kind(planned.kind or name, parse_call(called)))
    if planned.kind is None:
        return Planned(planned.at_s, next(drawn))
    if planned.kind not in kinds:
        raise InvalidCall(f"no kind {planned.kind[:100]!r} is known; is the workload missing that has it?")
    return Planned(planned.at_s, kinds[planned.kind])
