"""Rows of what is simulated: how well that foretells this machine, and what very many calls would need."""

from __future__ import annotations

from collections.abc import Iterator

from loadtest import budgets
from loadtest.capacity import fewest, make_load
from loadtest.profile import SHIPPED, load_profile
from loadtest.table.rows import MEASURED, SIMULATED, Figure, Row, Size
from loadtest.validate import TOLERANCE, Compared, validate

PLAN, VALIDATE = "sandbox plan", "sandbox plan validate"
_WORKLOAD = "mixed"
_WINDOW_S = 10.0
_HOST_CORES = 16


def validation(size: Size) -> Iterator[Row]:
    """What was foretold of loads on this machine, beside what came."""
    found = validate(_silently, size.shares)
    for load in found.loads:
        yield beside(load, found.workload, found.answered_by)


def beside(load: Compared, workload: str, answered_by: str) -> Row:
    """The row of one load."""
    figures = (
        Figure("mean predicted", 1e3 * load.predicted.mean_s, "ms"),
        Figure("measured", 1e3 * load.measured.mean_s, "ms"),
        Figure("p95 predicted", 1e3 * load.predicted.p95_s, "ms"),
        Figure("measured", 1e3 * load.measured.p95_s, "ms"),
        Figure("CPU of the profile", load.slower, "times"),
        Figure("off by", round(100 * max(map(abs, load.differences))), "%", at_most=100 * TOLERANCE),
    )
    note = f"DISTURBED: others used {load.others_cores:.2f} cores" if load.is_disturbed else ""
    what = f"{workload} at {load.rate:.0f} calls/s, {load.share:.0%} of what fits"
    return Row(what, VALIDATE, figures, answered_by, f"{SIMULATED}, {MEASURED}", note=note)


def cores(size: Size) -> Iterator[Row]:
    """What a burst needs."""
    profile = load_profile(SHIPPED)
    load = make_load(profile, _WORKLOAD, size.planned_calls, _WINDOW_S, budgets.PLANNED_MEAN_S)
    needed = fewest(load, profile, _HOST_CORES)
    figures = (
        Figure("cores", needed.cores, ""),
        Figure("hosts", needed.hosts, ""),
        Figure("gateways", needed.gateways, ""),
        Figure("mean", needed.mean_s, "s", at_most=budgets.PLANNED_MEAN_S),
        Figure("p95", needed.p95_s, "s"),
        Figure("p99", needed.p99_s, "s"),
    )
    yield Row(
        f"{size.planned_calls:,} calls ({_WORKLOAD}) within {_WINDOW_S:g} s",
        f"{PLAN} --calls {size.planned_calls} --window {_WINDOW_S:g}s --mean {budgets.PLANNED_MEAN_S:g} "
        f"--host-cores {_HOST_CORES}",
        figures,
        how=SIMULATED,
        note=f"from costs that were measured on {profile.origin}",
    )


def _silently(_: str) -> None:
    """The rows say it."""
