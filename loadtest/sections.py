"""The parts of the table of `make bench`, each with the tool that measures it.

A section yields its rows as they come. An error of ours that it raises becomes a row (see `table.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from loadtest import budgets
from loadtest.callers import WARM_UP_CALLS, measure_callers
from loadtest.costs import measure_forkservers
from loadtest.edge import measure_edge
from loadtest.inflight import GATEWAYS as INFLIGHT_GATEWAYS
from loadtest.processes import used_by
from loadtest.rows import JAIL, Figure, Row
from loadtest.sizing import HostLimits, plan
from loadtest.sockets import HOLD_S
from loadtest.stack import own_stack
from loadtest.together import Together
from loadtest.together import measure as measure_together
from sandbox import ConfigError, SandboxClient, ToolResult
from sandbox.calls import MIB
from sandbox.settings import load_settings


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. The whole table takes less than five minutes on two cores with these."""

    edge_calls: int = 8192
    wall_calls: int = 60
    callers: int = 256
    sockets: int = 45_000
    gateways: int = 3
    batches: int = 704
    batch: int = 64
    seconds: float = 5.0  # of each load


class Section(NamedTuple):
    """Rows that one tool measures."""

    what: str
    command: str  # that repeats it
    measure: Callable[[Size], Iterator[Row]]


def start(_: Size) -> Iterator[Row]:
    """From nothing to the first result."""
    started = time.perf_counter()
    with own_stack() as stack:

        async def ask() -> ToolResult:
            async with SandboxClient(stack.url) as client:
                return await client.run("import sys; print(sys.version.split()[0])")

        result = asyncio.run(ask())
        took_s = time.perf_counter() - started
    note = f"Python {result.stdout.strip()} in a jail of level {load_settings().jail.level}"
    figure = Figure("", took_s, "s", at_most=budgets.START_S)
    yield Row("start until the first result", "make demo", (figure,), JAIL, note=note)


def edge(size: Size) -> Iterator[Row]:
    """CPU of gateway and queue."""
    found = measure_edge(size.edge_calls)
    names = {"single": "gateway CPU, one call a request", "batch": "gateway CPU, batch of 64"}
    for way in found.ways:
        figure = Figure("", way.gateway_us, "µs/call", at_most=way.gateway_budget_us)
        yield Row(names[way.name], _EDGE, (figure,), found.answered_by, found.how)
    figure = Figure("", found.queue.cpu_us, "µs/call", at_most=found.queue.budget_us)
    yield Row("queue CPU, all three parties", _EDGE, (figure,), found.answered_by, found.how)


def walls(size: Size) -> Iterator[Row]:
    """CPU of the jail beside that of a bare fork."""
    shown = {("standard", "print(1)"): "print", ("numpy", "det"): "numpy", ("sympy", "solve"): "sympy"}
    try:
        costs = asyncio.run(measure_forkservers(load_settings().jail, size.wall_calls))
    except ConfigError as exc:
        yield Row("jail CPU over a bare fork", _COSTS, answered_by=JAIL, note=f"not measured: {exc.message}")
        return
    for cost in costs:
        if name := shown.get((cost.preload, cost.code)):
            figures = (
                Figure("", cost.walls_ms, "ms/call", at_most=budgets.WALLS_MS),
                Figure("of", cost.inside_ms, "ms in all"),
            )
            yield Row(f"jail CPU over a bare fork, {name}", _COSTS, figures, JAIL)


def closed_loop(size: Size) -> Iterator[Row]:
    """Calls a second, and what a worker uses for one."""
    with own_stack() as stack:
        for kind, budget in budgets.CALLS_PER_S.items():
            before = used_by(stack.pid)["worker"].cpu_s
            (cell,) = asyncio.run(measure_callers(stack.url, [(kind, size.callers)], size.seconds, _nothing))
            worker_s = used_by(stack.pid)["worker"].cpu_s - before
            wrong = ", ".join(f"{count} {name}" for name, count in cell.errors.items())
            figures = (
                Figure("", cell.calls_per_s, "calls/s", at_least=budget),
                Figure(
                    "worker outside the jail",
                    1e6 * worker_s / (cell.answered + WARM_UP_CALLS),
                    "µs/call",
                    at_most=budgets.WORKER_US,
                ),
            )
            command = f"{_CALLERS} --kinds {kind} --callers {size.callers}"
            yield Row(f"{kind} through HTTP, {size.callers} callers", command, figures, JAIL, wrong=wrong)


def sockets(size: Size) -> Iterator[Row]:
    """So many requests open at once."""
    what = f"{size.sockets:,} requests open at once, {size.gateways} gateways"
    sized = plan(size.sockets, size.gateways, HostLimits.read())
    yield _together(what, _SOCKETS, measure_together(sized, 1, HOLD_S, _silently))


def inflight(size: Size) -> Iterator[Row]:
    """So many batches in flight at once."""
    what = f"{size.batches} batches of {size.batch} in flight at once, {INFLIGHT_GATEWAYS} gateways"
    sized = plan(size.batches, INFLIGHT_GATEWAYS, HostLimits.read())
    yield _together(what, _INFLIGHT, measure_together(sized, size.batch, HOLD_S, _silently))


def _together(what: str, command: str, found: Together) -> Row:
    figures = (
        Figure("peak", found.in_flight_peak, "calls", at_least=min(budgets.IN_FLIGHT, found.calls)),
        Figure("answered", found.answered, "calls"),
        Figure("errors", found.errors, "calls", at_most=0),
        Figure("mean", found.mean_s, "s"),
        Figure("p50", found.p50_s, "s"),
        Figure("p99", found.p99_s, "s"),
        Figure("memory", found.rss_bytes / MIB, "MiB"),
    )
    wrong = (
        "" if found.is_proved else f"not proved: {found.errors_by_name or 'not all were there at one moment'}"
    )
    return Row(what, command, figures, found.answered_by, found.how, wrong=wrong, note=found.note)


def _silently(_: str) -> None:
    """The row says it."""


def _nothing() -> None:
    """Nobody watches."""


_SOCKETS, _INFLIGHT = "sandbox bench sockets", "sandbox bench inflight"
_EDGE, _COSTS, _CALLERS = (f"python -m loadtest.{tool}" for tool in ("edge", "costs", "callers"))

SECTIONS = (
    Section("start until the first result", "make demo", start),
    Section("CPU of gateway and queue", _EDGE, edge),
    Section("CPU of the jail", _COSTS, walls),
    Section("calls through HTTP", _CALLERS, closed_loop),
    Section("requests open at once", _SOCKETS, sockets),
    Section("batches in flight at once", _INFLIGHT, inflight),
)
