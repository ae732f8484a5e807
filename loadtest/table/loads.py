"""Rows of what comes of loads: how many calls a second, how long they take, how many fit at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import groupby

from loadtest import budgets
from loadtest.callers import WARM_UP_CALLS, measure_callers
from loadtest.figures import Run
from loadtest.inflight import GATEWAYS as INFLIGHT_GATEWAYS
from loadtest.load import Arrivals
from loadtest.measure import Options, measure
from loadtest.processes import used_by
from loadtest.scaling import measure_scaling
from loadtest.sizing import HostLimits, plan
from loadtest.sockets import HOLD_S
from loadtest.stack import own_stack, settle
from loadtest.table.rows import JAIL, Figure, Row, Size
from loadtest.together import Together
from loadtest.together import measure as measure_together
from sandbox.calls import MIB

CALLERS = "python -m loadtest.callers"
SCALING = "python -m loadtest.scaling"
BENCH, SOCKETS, INFLIGHT = "sandbox bench", "sandbox bench sockets", "sandbox bench inflight"
_LOW_RATE = 20.0  # calls a second: what is added to a call that meets nobody
_RATES = (20.0, 40.0, 80.0, 160.0)


def closed_loop(size: Size) -> Iterator[Row]:
    """Calls a second, and what a worker uses for one."""
    with own_stack() as stack:
        asyncio.run(settle(stack))
        for kind, budget in budgets.CALLS_PER_S.items():
            before = used_by(stack.pid)["worker"].cpu_s
            (cell,) = asyncio.run(measure_callers(stack.url, [(kind, size.callers)], size.seconds, _silently))
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
            command = f"{CALLERS} --kinds {kind} --callers {size.callers}"
            yield Row(f"{kind} through HTTP, {size.callers} callers", command, figures, JAIL, wrong=wrong)


def low_load(size: Size) -> Iterator[Row]:
    """What a call takes beyond its program's own time."""
    ((run, command, answered_by),) = _open_loop("print", (_LOW_RATE,), 2 * size.seconds)
    figures = (
        *_milliseconds("added p50", run.added_p50_s, budgets.ADDED_P50_MS),
        *_milliseconds("added p99", run.added_p99_s, budgets.ADDED_P99_MS),
    )
    yield _row(f"latency at low load, print {run.load}", command, figures, answered_by, run)


def sweep(size: Size) -> Iterator[Row]:
    """Latency at loads that grow, from when each call was to be sent."""
    for run, command, answered_by in _open_loop("mixed", _RATES, size.seconds):
        figures = (
            Figure("answered", run.answered_per_s, "calls/s"),
            *_milliseconds("mean", run.mean_s),
            *_milliseconds("p50", run.p50_s),
            *_milliseconds("p99", run.p99_s),
        )
        yield _row(f"open loop, mixed {run.load}", command, figures, answered_by, run)


def _open_loop(workload: str, rates: tuple[float, ...], seconds: float) -> Iterator[tuple[Run, str, str]]:
    """Each run, the command that repeats it, and who answered."""
    found, _ = measure(Options(workload=workload, arrivals=Arrivals(rates=rates, seconds=seconds)))
    for rate, run in zip(rates, found.runs, strict=True):
        command = f"{BENCH} --workload {workload} --rate {rate:g} --seconds {seconds:g}"
        yield run, command, found.answered_by


def _milliseconds(name: str, seconds: float | None, at_most: float | None = None) -> tuple[Figure, ...]:
    """None where no call tells."""
    return () if seconds is None else (Figure(name, 1e3 * seconds, "ms", at_most=at_most),)


def _row(what: str, command: str, figures: tuple[Figure, ...], answered_by: str, run: Run) -> Row:
    wrong = f"{run.wrong} wrong, {run.failed} failed: {dict(run.outcomes)}" if run.wrong or run.failed else ""
    note = f"INVALID: {run.invalid}" if run.invalid else ""
    return Row(what, command, figures, answered_by, wrong=wrong, note=note)


def sockets(size: Size) -> Iterator[Row]:
    """So many requests open at once."""
    what = f"{size.sockets:,} requests open at once, {size.gateways} gateways"
    sized = plan(size.sockets, size.gateways, HostLimits.read())
    yield _together(what, SOCKETS, measure_together(sized, 1, HOLD_S, _silently))


def inflight(size: Size) -> Iterator[Row]:
    """So many batches in flight at once."""
    what = f"{size.batches} batches of {size.batch} in flight at once, {INFLIGHT_GATEWAYS} gateways"
    sized = plan(size.batches, INFLIGHT_GATEWAYS, HostLimits.read())
    yield _together(what, INFLIGHT, measure_together(sized, size.batch, HOLD_S, _silently))


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


def scaling(size: Size) -> Iterator[Row]:
    """CPU of a call with more and more processes."""
    stacks = [(workers, 1) for workers in size.workers] + [(1, gateways) for gateways in size.more_gateways]
    found = measure_scaling(stacks, size.seconds / 4)
    for (workers, gateways), of_one in groupby(found, key=lambda row: (row.workers, row.gateways)):
        loose, *pinned = of_one
        figures = (
            Figure("", loose.total_ms, "ms of CPU/call"),
            Figure("", loose.of_first, "times the first"),
            *(Figure("pinned", row.total_ms, "ms of CPU/call") for row in pinned),
            Figure("", loose.calls_per_s, "calls/s"),
        )
        errors = [f"{count} {name}" for row in (loose, *pinned) for name, count in row.errors.items()]
        what = f"print, {workers} worker(s), {gateways} gateway(s)"
        yield Row(what, SCALING, figures, JAIL, wrong=", ".join(errors))


def _silently(*_: object) -> None:
    """The row says it."""
