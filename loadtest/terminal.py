"""What the tools of this package show: progress and tables, plain text where nobody watches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sandbox import ConfigError, SandboxError

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


def options_given(context: typer.Context) -> list[str]:
    """The options that stand on the command line before a command's name, or beside each other."""
    return [
        f"--{name.removeprefix('as_').replace('_', '-')}"
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]


def refuse_options(context: typer.Context) -> None:
    """End where options stand before a subcommand, which they would not reach. Raises typer.BadParameter."""
    if found := options_given(context):
        raise typer.BadParameter(
            f"{', '.join(found)}: no option of `{context.invoked_subcommand}`, or written before its name"
        )


def check_place(path: Path | None) -> None:
    """Raise ConfigError where nothing can be written there, before there is anything to lose."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise ConfigError(
            f"cannot write {path}: {'it is a folder' if path.is_dir() else 'there is no such folder'}"
        )


def make_table(title: str) -> Table:
    """An empty table in our one style."""
    return Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)


def print_json(value: object) -> None:
    """One JSON object or array on stdout, which has nothing else then."""
    json.dump(value, sys.stdout, indent=2)
    print()


def print_error(console: Console, error: SandboxError) -> None:
    """Say why there is nothing to show, each line of the message on a line of its own."""
    console.print(Text(f"{type(error).__name__}: {error}", style="red"), soft_wrap=True)
