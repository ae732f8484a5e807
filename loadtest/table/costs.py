"""Rows of what things cost: a start, and the CPU of each part for a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

from loadtest import budgets
from loadtest.client import measure_client
from loadtest.costs import measure_forkservers
from loadtest.edge import measure_edge
from loadtest.stack import own_stack
from loadtest.table.rows import JAIL, Figure, Row, Size
from sandbox import ConfigError, SandboxClient, ToolResult
from sandbox.settings import load_settings

EDGE, COSTS, CLIENT = (f"python -m loadtest.{tool}" for tool in ("edge", "costs", "client"))


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
        yield Row(names[way.name], EDGE, (figure,), found.answered_by, found.how)
    figure = Figure("", found.queue.cpu_us, "µs/call", at_most=found.queue.budget_us)
    yield Row("queue CPU, all three parties", EDGE, (figure,), found.answered_by, found.how)


def walls(size: Size) -> Iterator[Row]:
    """CPU of the jail beside that of a bare fork."""
    shown = {("standard", "print(1)"): "print", ("numpy", "det"): "numpy", ("sympy", "solve"): "sympy"}
    try:
        costs = asyncio.run(
            measure_forkservers(load_settings().jail, size.wall_calls, {name for name, _ in shown})
        )
    except ConfigError as exc:
        yield Row("jail CPU over a bare fork", COSTS, answered_by=JAIL, note=f"not measured: {exc.message}")
        return
    for cost in costs:
        if name := shown.get((cost.preload, cost.code)):
            figures = (
                Figure("", cost.walls_ms, "ms/call", at_most=budgets.WALLS_MS),
                Figure("of", cost.inside_ms, "ms in all"),
            )
            yield Row(f"jail CPU over a bare fork, {name}", COSTS, figures, JAIL)


def client(size: Size) -> Iterator[Row]:
    """What callers pay themselves."""
    found = measure_client(size.client_calls)
    figures = (
        Figure("", found.cpu_us, "µs/call", at_most=found.cpu_budget_us),
        Figure("peak", found.connections, "connections", at_most=found.connections_budget),
    )
    yield Row(f"client CPU, {found.calls:,} run() at once", CLIENT, figures, found.answered_by, found.how)
