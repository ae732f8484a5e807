"""What the tools of this package show: progress and tables, plain text where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sandbox import SandboxError

_WIDTH = 100  # of what is no terminal, such as a log


def make_console() -> Console:
    """The standard output; without colours and movement where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)


@contextmanager
def counted(console: Console, name: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar that moves with each call of the function that this lends."""
    bar = BarColumn(bar_width=50)
    columns = TextColumn("{task.description}"), bar, MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda: progress.advance(task)


def make_table(title: str) -> Table:
    """An empty table in our one style."""
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)


def print_error(console: Console, error: SandboxError) -> None:
    """Say why there is nothing to show, each line of the message on a line of its own."""
    console.print(Text(f"{type(error).__name__}: {error}", style="red"), soft_wrap=True)
