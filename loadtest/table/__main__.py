"""`make bench`: how fast the service is on this machine, what of it was measured and what was simulated.

Each row says what answered the calls: `jail`, the whole service with programs that run, or `stand-in`, gateways and
Redis with something in a worker's place that runs nothing. A figure beyond its budget is marked MISSED, which fails
nothing. What fails is an answer that was wrong or did not come.

The tools run one after the other, so nothing but a tool's own load and the machine's other users disturbs a row.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.machine import Machine, this_machine
from loadtest.table.rows import Figure, Row, Size, to_markdown
from loadtest.table.sections import SECTIONS, Section
from loadtest.terminal import make_console
from sandbox import ConfigError, SandboxError
from sandbox.redis_server import RedisServer

_WIDTH = 100  # of the table, where it is no terminal's
_HEADINGS = {"what, and what repeats it": 41, "figure": 31, "budget": 14, "how": 10}  # and their widths


def main(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    markdown: Annotated[Path | None, typer.Option(help="Write the table for a page, too.")] = None,
) -> None:
    """Measure everything, in less than five minutes. Exit code 1 when an answer was wrong or did not come."""
    console = Console(stderr=True, width=_WIDTH, highlight=False) if as_json else make_console()
    started = time.monotonic()
    machine = _words(this_machine())
    console.print(machine, soft_wrap=True)
    console.print(_table(*_HEADINGS))
    rows = measure_table(SECTIONS, Size(), lambda row: console.print(_line(row)))
    took_s = time.monotonic() - started
    if as_json:
        json.dump({"machine": machine, "took_s": took_s, "rows": [asdict(row) for row in rows]}, sys.stdout)
        print()
    if markdown is not None:
        _write(markdown, to_markdown(machine, rows))
    code = sum_up(console, rows)
    console.print(f"The table took {took_s:.0f} s.")
    raise typer.Exit(code)


def measure_table(sections: Sequence[Section], size: Size, on_row: Callable[[Row], None]) -> list[Row]:
    """All rows, in order; each is shown to `on_row` when it is there. A section that fails is one, too."""
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        on_row(row)

    for section in sections:
        try:
            for row in section.measure(size):
                add(row)
        except SandboxError as exc:
            add(Row(section.what, section.command, wrong=f"{type(exc).__name__}: {exc.message}"))
    return rows


def sum_up(console: Console, rows: Sequence[Row]) -> int:
    """Say what missed its budget, which fails nothing, and what went wrong, which does. The exit code."""
    for row in rows:
        for missed in row.missed:
            console.print(f"missed: {missed}", soft_wrap=True)
        if row.wrong:
            console.print(Text(f"WRONG: {row.what}: {row.wrong}", style="red"), soft_wrap=True)
    return 1 if any(row.wrong for row in rows) else 0


def _words(machine: Machine) -> str:
    redis = RedisServer.find()
    return (
        f"{machine.cores} cores of {machine.cpu}, {machine.memory_bytes >> 30} GiB, Linux {machine.kernel}, "
        f"Python {machine.python}, {redis.name} {redis.version[0]}.{redis.version[1]}, "
        f"roc-sandbox {version('roc-sandbox')}; load {machine.load_1min:.1f} before"
    )


def _line(row: Row) -> Table:
    texts = [str(figure) for figure in row.figures] or ["none"]
    what = Text.assemble(row.what, *((f"\n{text}", style) for text, style in _remarks(row)))
    how = "\n".join(text for text in (row.how, row.answered_by) if text)
    return _table(what, "\n".join(texts), "\n".join(_budget(figure) for figure in row.figures), how)


def _budget(figure: Figure) -> str:
    return f"{figure.budget} MISSED" if figure.is_missed else figure.budget


def _remarks(row: Row) -> list[tuple[str, str]]:
    styled = ((f"WRONG: {row.wrong}" if row.wrong else "", "red"), (row.note, ""), (row.command, "dim"))
    return [(text, style) for text, style in styled if text]


def _table(*cells: str | Text) -> Table:
    """A line of the table, which is printed before the next one is known."""
    table = Table.grid(padding=(0, 1))
    for width in _HEADINGS.values():
        table.add_column(width=width, overflow="fold")
    table.add_row(*cells)
    return table


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc


if __name__ == "__main__":
    typer.run(main)
