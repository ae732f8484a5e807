"""`python -m loadtest.callers`: how fast the service answers so many callers, each with one call at a time.

What is measured: N tasks in one process share one `SandboxClient` and each of them sends a call, waits for
its answer, checks the text, and sends the next one, until the time is up; then the last answers are waited
for. The client joins calls of the same moment into one request, as it does for every user, so this is not
the speed of N separate HTTP connections. Latency is from `run()` to its return. The client's own CPU is
reported, because it runs on the same cores as a service on this machine; where it is large, the service
could have done more.

This is a closed loop, and that hides something: a slow service slows its callers down, so it is never sent
more than it can take, and a stall delays N calls where an open stream of arrivals would have met it with
many more. Read the percentiles as those of N patient callers, not as those of a given rate of calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer
from rich.console import Console

from loadtest.stack import service_at
from loadtest.terminal import counted, make_console, make_table, print_error, print_json
from loadtest.timing import percentile
from loadtest.workloads import KINDS
from sandbox import SandboxClient, SandboxError

_KINDS = ("print", "numpy", "sympy")
WARM_UP_CALLS = 16  # of each kind, so that no cell pays for first times


@dataclass(frozen=True, slots=True)
class Cell:
    """One kind of program and one number of callers."""

    kind: str
    callers: int
    calls_per_s: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    client_cpu_ms: float  # of a call
    answered: int
    errors: dict[str, int]


@dataclass(slots=True)
class _Tally:
    latencies_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


def main(
    url: Annotated[str, typer.Option(help="A gateway that runs; without it, a stack of our own.")] = "",
    callers: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Callers at a time, each further one a row; without it 1, 32 and 256."),
    ] = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(help=f"Programs, each further one a row; without it {', '.join(_KINDS)}."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each cell sends calls.")] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array and nothing else.")] = False,
) -> None:
    """Measure calls a second and latency, with a fixed number of callers."""
    console = Console(stderr=True) if as_json else make_console()
    if unknown := set(kinds or ()) - set(_KINDS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: the kinds are {', '.join(_KINDS)}")
    grid = [(kind, number) for kind in kinds or _KINDS for number in callers or (1, 32, 256)]
    try:
        with service_at(url) as base, counted(console, "measurements", len(grid)) as count:
            cells = asyncio.run(measure_callers(base, grid, seconds, count))
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    if as_json:
        print_json([asdict(cell) for cell in cells])
    else:
        _print_cells(console, cells)
    raise typer.Exit(1 if any(cell.errors for cell in cells) else 0)


async def measure_callers(
    url: str, grid: list[tuple[str, int]], seconds: float, on_cell: Callable[[], None]
) -> list[Cell]:
    """Measure each kind of program with each number of callers, one after the other, for so long."""
    cells = []
    async with SandboxClient(url) as client:
        for kind in {kind for kind, _ in grid}:
            await asyncio.gather(*(client.run(KINDS[kind].code) for _ in range(WARM_UP_CALLS)))
        for kind, callers in grid:
            cells.append(await _measure(client, kind, callers, seconds))
            on_cell()
    return cells


async def _measure(client: SandboxClient, kind: str, callers: int, seconds: float) -> Cell:
    tally = _Tally()
    started, cpu_started = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(_call_until(started + seconds, client, kind, tally))
    took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    answered = len(tally.latencies_s)
    return Cell(
        kind=kind,
        callers=callers,
        calls_per_s=answered / took_s,
        mean_ms=1000 * sum(tally.latencies_s) / max(1, answered),
        p50_ms=1000 * percentile(tally.latencies_s, 0.5),
        p99_ms=1000 * percentile(tally.latencies_s, 0.99),
        client_cpu_ms=1000 * cpu_s / max(1, answered),
        answered=answered,
        errors=dict(tally.errors),
    )


async def _call_until(end: float, client: SandboxClient, kind: str, tally: _Tally) -> None:
    """One caller. A call counts when its answer is right; anything else is an error under its name."""
    code, printed = KINDS[kind].code, KINDS[kind].stdout
    while (sent := time.perf_counter()) < end:
        try:
            result = await client.run(code)
        except SandboxError as exc:
            tally.errors[type(exc).__name__] += 1
            continue
        if result.stdout == printed:
            tally.latencies_s.append(time.perf_counter() - sent)
        else:
            tally.errors[f"wrong ({result.status.value})"] += 1


def _print_cells(console: Console, cells: list[Cell]) -> None:
    table = make_table("Closed loop, through HTTP")
    table.add_column("program")
    for heading in ("callers", "calls/s", "mean ms", "p50 ms", "p99 ms", "client CPU ms/call", "answered"):
        table.add_column(heading, justify="right")
    table.add_column("errors")
    for cell in cells:
        table.add_row(
            cell.kind,
            str(cell.callers),
            f"{cell.calls_per_s:.0f}",
            *(f"{figure:.1f}" for figure in (cell.mean_ms, cell.p50_ms, cell.p99_ms)),
            f"{cell.client_cpu_ms:.2f}",
            str(cell.answered),
            ", ".join(f"{name} {count}" for name, count in cell.errors.items()) or "none",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
