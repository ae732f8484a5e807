"""Logging of all programs: an event is a constant string with fields.

    log.info("call finished", extra={"call": call.id, "status": "ok"})

`set_up` is called once by each `main`. Text for a person on a terminal, one JSON object a line for a machine.
Code and output of programs are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from sandbox.outlet import Outlet
from sandbox.settings import LogSettings

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def set_up(settings: LogSettings, program: str, outlet: Outlet | None = None) -> None:
    """Send everything that is logged in this process to stderr, marked with the program's name.

    `outlet` leads there too, for a program that may not wait for whoever reads it.
    """
    as_text = settings.format == "text" or (settings.format == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(outlet or sys.stderr)
    handler.setFormatter(_Text(program) if as_text else _Json(program))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line a request, at info


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _Json(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self.program = program

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "program": self.program,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Text(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__(f"%(asctime)s {program:<8} %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        head, *traceback = super().format(record).split("\n")
        return "\n".join([f"{head}  {fields}".rstrip(), *traceback])
