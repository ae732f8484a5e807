"""`python -m loadtest.scaling`: what a call costs while the processes that serve it become more.

What is measured: a whole service of our own, and callers that each send `print(1)`, wait for the answer, check it and
send the next one, four times as many of them as there are slots. Each worker has the slots of one core, as each host
that is added brings slots of its own: 1, 2, 4 or 8 workers; then, with one worker, 1, 2 or 3 gateways. `pinned`: all
threads of a worker and of all that it has started are bound to one core, the workers to the cores by turns; what they
start from then on inherits that.

Cost grows linearly where the CPU of a call stays as it is while processes become more: `of first` is that of a row over
that of the first one. How many calls a second come out is another thing, and bounded by the cores that there are.

The CPU time is that of whole processes, user and system, from the first call to the last answer, and so has in it
what they do beside the calls. It is read once nothing warms up any more: the jails of eight workers take seconds to.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from loadtest.callers import WARM_UP_CALLS, measure_callers
from loadtest.held import descendants
from loadtest.machine import Machine, this_machine
from loadtest.processes import processes_of, used_by
from loadtest.stack import Stack, own_stack, settle
from loadtest.terminal import counted, make_console, make_table, print_error, print_json
from sandbox.errors import ConfigError, SandboxError
from sandbox.settings import SLOTS_PER_CORE

CALLERS_A_SLOT = 4  # so that no slot waits for a caller
WORKERS = (1, 2, 4, 8)
GATEWAYS = (2, 3)  # beside the one that each row of workers has
_PARTS = ("gateway", "redis", "worker", "jail")


@dataclass(frozen=True, slots=True)
class Row:
    """So many processes, and the CPU milliseconds of one call in each part."""

    workers: int
    pinned: bool
    gateways: int
    slots: int  # of all workers together
    calls: int
    errors: dict[str, int]
    calls_per_s: float
    client_ms: float
    gateway_ms: float
    redis_ms: float
    worker_ms: float
    jail_ms: float
    total_ms: float
    of_first: float  # the total over that of the first row


def main(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each row sends calls.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array and nothing else.")] = False,
) -> None:
    """Measure the CPU of a call with more and more processes."""
    console = Console(stderr=True) if as_json else make_console()
    machine = this_machine()
    stacks = [(workers, 1) for workers in WORKERS] + [(1, gateways) for gateways in GATEWAYS]
    try:
        with counted(console, "services", len(stacks)) as count:
            rows = measure_scaling(stacks, seconds, count)
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        _print_rows(console, machine, rows)
    raise typer.Exit(1 if any(row.errors for row in rows) else 0)


def measure_scaling(
    stacks: list[tuple[int, int]], seconds: float, on_stack: Callable[[], None] = lambda: None
) -> list[Row]:
    """Measure services of so many workers and gateways, with one gateway also pinned.

    Raises ConfigError where one does not start, or where workers cannot be pinned.
    """
    rows: list[Row] = []
    for workers, gateways in stacks:
        options = ("--workers", workers, "--slots", SLOTS_PER_CORE, "--gateways", gateways)
        with own_stack(*map(str, options)) as stack:
            asyncio.run(settle(stack))
            for pinned in (False, True) if gateways == 1 else (False,):
                if pinned:
                    pin(stack)
                first_ms = rows[0].total_ms if rows else None
                rows.append(_measure(stack, workers, gateways, seconds, first_ms, pinned=pinned))
        on_stack()
    return rows


def pin(stack: Stack) -> None:
    """Bind each worker and all that it has started to one core; the workers take the cores by turns.

    Raises ConfigError where we may not.
    """
    cores = sorted(os.sched_getaffinity(0))
    for number, worker in enumerate(processes_of(stack.pid, "worker")):
        core = {cores[number % len(cores)]}
        # Until there is nothing left to bind: what a thread starts before its turn is as free as the thread was.
        while loose := [thread for thread in _threads(worker) if _is_loose(thread, core)]:
            for thread in loose:
                try:
                    with suppress(ProcessLookupError):  # it has just ended
                        os.sched_setaffinity(thread, core)
                except PermissionError as exc:
                    raise ConfigError(
                        "this user may not pin the programs of its own worker; try it as root"
                    ) from exc


def _threads(worker: int) -> Iterator[int]:
    for pid in (worker, *descendants(worker)):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            yield from (int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())


def _is_loose(thread: int, core: set[int]) -> bool:
    try:
        return os.sched_getaffinity(thread) != core
    except ProcessLookupError:  # it has just ended
        return False


def _measure(
    stack: Stack,
    workers: int,
    gateways: int,
    seconds: float,
    first_ms: float | None,
    *,
    pinned: bool,
) -> Row:
    slots = SLOTS_PER_CORE * workers
    before = used_by(stack.pid)
    [cell] = asyncio.run(
        measure_callers(stack.url, [("print", CALLERS_A_SLOT * slots)], seconds, lambda: None)
    )
    after = used_by(stack.pid)
    calls = cell.answered + WARM_UP_CALLS
    gateway_ms, redis_ms, worker_ms, jail_ms = (
        1e3 * (after[part].cpu_s - before[part].cpu_s) / calls for part in _PARTS
    )
    total_ms = cell.client_cpu_ms + gateway_ms + redis_ms + worker_ms + jail_ms
    return Row(
        workers=workers,
        pinned=pinned,
        gateways=gateways,
        slots=slots,
        calls=calls,
        errors=cell.errors,
        calls_per_s=cell.calls_per_s,
        client_ms=cell.client_cpu_ms,
        gateway_ms=gateway_ms,
        redis_ms=redis_ms,
        worker_ms=worker_ms,
        jail_ms=jail_ms,
        total_ms=total_ms,
        of_first=total_ms / first_ms if first_ms else 1.0,
    )


def _print_rows(console: Console, machine: Machine, rows: list[Row]) -> None:
    table = make_table("CPU ms of one print(1), measured in jails")
    headings = ("workers", "pinned", "gateways", "calls/s", "client", *_PARTS, "all", "of first")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        parts = (row.client_ms, row.gateway_ms, row.redis_ms, row.worker_ms, row.jail_ms, row.total_ms)
        table.add_row(
            str(row.workers),
            "yes" if row.pinned else "no",
            str(row.gateways),
            f"{row.calls_per_s:.0f}",
            *(f"{part:.2f}" for part in parts),
            f"{row.of_first:.2f}",
        )
    console.print(table)
    console.print(
        f"{SLOTS_PER_CORE} slots a worker, {CALLERS_A_SLOT} callers a slot. We may use {machine.cores} cores of this "
        f"machine ({machine.cpu}), for callers and service together: more processes than that take the calls from "
        f"each other, and calls a second cannot grow. Load before: {machine.load_1min:.1f}"
    )
    for row in rows:
        if row.errors:
            console.print(f"wrong with {row.workers} workers, {row.gateways} gateways: {row.errors}")


if __name__ == "__main__":
    typer.run(main)
