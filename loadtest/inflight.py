"""`sandbox bench inflight`: so many batches at once, through real gateways and the real queue."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from loadtest.sizing import HostLimits, plan
from loadtest.sockets import HOLD_S, tell
from loadtest.terminal import make_console
from loadtest.together import measure

GATEWAYS = 2


def inflight(
    batches: Annotated[
        int, typer.Option(min=1, help="Batch requests, each on a connection of its own.")
    ] = 704,
    size: Annotated[int, typer.Option(min=2, max=1024, help="Calls of each.")] = 64,
    hold: Annotated[
        float, typer.Option(min=0.0, help="Seconds that each call is held once it is taken.")
    ] = HOLD_S,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    """Hold very many calls of batches in flight at once, and have each answered exactly once, line by line.

    Starts gateways and a Redis of its own; a stand-in answers in the workers' place. It begins when all calls wait in
    the queue. Exit code 1: that they were all held, and each answered once, is not proved.
    """
    console = Console(stderr=True) if as_json else make_console()
    sized = plan(batches, GATEWAYS, HostLimits.read())
    measured = measure(sized, size, hold, partial(console.print, soft_wrap=True))
    tell(console, f"{batches} batches of {size} in flight at once", measured, as_json=as_json)
