"""`sandbox bench sockets`: so many single requests open at once, each on a connection of its own."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from loadtest.sizing import HostLimits, plan
from loadtest.terminal import make_console
from loadtest.together import Together, measure, show

HOLD_S = 0.3


def sockets(
    calls: Annotated[int, typer.Option(min=1, help="Requests, and so connections.")] = 45_000,
    gateways: Annotated[int, typer.Option(min=1, help="Gateway processes behind the one port.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    """Hold very many single requests open at once, through gateways and queue, and have each answered exactly once.

    Starts gateways and a Redis of its own; a stand-in answers in the workers' place. It begins when all calls wait in
    the queue. Exit code 1: that they were all held, and each answered once, is not proved.
    """
    console = Console(stderr=True) if as_json else make_console()
    measured = measure(
        plan(calls, gateways, HostLimits.read()), 1, HOLD_S, partial(console.print, soft_wrap=True)
    )
    tell(console, f"{calls} requests open at once", measured, as_json=as_json)


def tell(console: Console, title: str, measured: Together, *, as_json: bool) -> None:
    """Print what was measured, and end with 1 where it does not prove what it should."""
    if as_json:
        json.dump(asdict(measured), sys.stdout)
        print()
    else:
        show(console, title, measured)
    raise typer.Exit(0 if measured.is_proved else 1)
