"""`sandbox plan`: how many cores so many calls need, by a simulation that `validate` holds against this machine."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.table import Table

from loadtest.calibrate import measure_crowd, measure_profile
from loadtest.capacity import BUSY, Outcome, Plan, make_load, make_plan, read_load
from loadtest.profile import SHIPPED, Profile, load_profile, save_profile
from loadtest.simulate import CORES_A_WORKER
from loadtest.stack import own_stack
from loadtest.targets import open_target
from loadtest.terminal import check_place, make_console, make_table, options_given, refuse_options
from loadtest.validate import TOLERANCE, Validation
from loadtest.validate import validate as validate_here
from loadtest.workloads import WORKLOADS
from sandbox.calls import MIB, Limits

_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0}
_DURATION = re.compile(r"(?P<number>\d+(\.\d*)?|\.\d+)(?P<unit>ms|s|m|)")
_WALL_S = Limits().wall_s

plan_app = typer.Typer(invoke_without_command=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")]


def seconds(text: str) -> float:
    """A time such as 10s, 500ms, 1m, or plain seconds. Raises typer.BadParameter."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is no time such as 10s, 500ms, 1m or 2.5")
    return float(found["number"]) * _SECONDS[found["unit"]]


@plan_app.callback()
def plan(  # noqa: PLR0913, PLR0917 - the options of a command line
    context: typer.Context,
    calls: Annotated[int, typer.Option(min=1, help="Calls that come within the window.")] = 45_000,
    window: Annotated[
        str, typer.Option(help="Within which they come: 10s, 500ms, 1m; 0 is all at one instant.")
    ] = "10s",
    mean: Annotated[float, typer.Option(min=0.001, help="Seconds that they may take on average.")] = 0.3,
    workload: Annotated[str, typer.Option(help=f"What they are: {', '.join(WORKLOADS)}.")] = "mixed",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Calls from a file, instead of --calls and --window: JSON lines with at_s, and kind or cpu_s, "
            "as bench --calls writes."
        ),
    ] = None,
    host_cores: Annotated[int, typer.Option(min=1, help="Cores of a host.")] = CORES_A_WORKER,
    limit: Annotated[float, typer.Option(min=0.1, help="Seconds after which a runaway is ended.")] = _WALL_S,
    profile: Annotated[Path, typer.Option(help="What calls cost, as `measure` wrote it.")] = SHIPPED,
    as_json: AsJson = False,
) -> None:
    """Find the fewest hosts that answer calls within a mean time, and what runaways and autoscaling make of that.

    Simulated, with costs that were measured on the machine that it names. `measure` takes them on this machine, and
    `validate` shows how well the simulation foretells what the real stack does here.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    if trace is not None and (ignored := {"--calls", "--window"} & set(options_given(context))):
        raise typer.BadParameter(
            f"--trace says when which calls come; leave out {', '.join(sorted(ignored))}"
        )
    costs = load_profile(profile)
    if trace is not None:
        load = read_load(costs, trace, workload, mean)
    else:
        load = make_load(costs, workload, calls, seconds(window), mean)
    console = Console(stderr=True) if as_json else make_console()
    started = time.perf_counter()
    console.print(f"simulating {len(load.calls):,} calls, several times …", markup=False)
    made = make_plan(load, costs, host_cores, limit)
    if as_json:
        print(to_json(asdict(made)).decode())
    else:
        _print_plan(console, made, "a trace" if trace is not None else workload)
        console.print(f"took {time.perf_counter() - started:.0f} s")


@plan_app.command()
def measure(
    out: Annotated[Path, typer.Option("-o", "--out", help="The profile to write.")],
) -> None:
    """Measure what calls cost on this machine, in less than a minute, for `sandbox plan --profile`."""
    check_place(out)
    console = make_console()
    measured = measure_here(_steps(console))
    save_profile(measured, out)
    console.print(f"measured on {measured.origin}; written to {out}", markup=False, soft_wrap=True)


def measure_here(say: Callable[[str], None]) -> Profile:
    """A profile of this machine, by a stack of our own."""
    say("gateway and Redis in a crowd")
    crowd = measure_crowd()
    with own_stack() as stack:

        async def measured() -> Profile:
            async with open_target(stack.url, "v1") as target:
                return await measure_profile(stack, target, crowd, say)

        return asyncio.run(measured())


@plan_app.command()
def validate(as_json: AsJson = False) -> None:
    """Measure this machine, load the real stack at five rates, and show what the simulation had foretold beside it.

    Takes about a minute and wants the machine to itself. Exit code 1 when a prediction is more than 20 % off.
    """
    console = Console(stderr=True) if as_json else make_console()
    found = validate_here(_steps(console))
    if as_json:
        print(to_json(asdict(found)).decode())
    else:
        _print_validation(console, found)
    raise typer.Exit(0 if found.is_within else 1)


def _steps(console: Console) -> Callable[[str], None]:
    return lambda step: console.print(f"{step} …", markup=False)


def _print_plan(console: Console, made: Plan, workload: str) -> None:
    needed = made.needed
    when = f"within {made.window_s:g} s" if made.window_s else "at one instant"
    table = make_table(
        f"{made.calls:,} calls ({workload}) {when}, mean at most {made.wanted_mean_s:g} s: simulated"
    )
    table.add_column("")
    table.add_column("simulated", justify="right")
    for what, figure in (
        ("cores", f"{needed.cores}"),
        ("hosts", f"{needed.hosts} of {needed.cores // needed.hosts} cores"),
        (f"gateways, at most {BUSY:.0%} busy", f"{needed.gateways}, {needed.gateway_busy:.0%} busy"),
        ("Redis, of one core", f"{needed.redis_load:.0%}"),
        ("Redis servers", f"{needed.redis}{'' if needed.redis == 1 else ': more than one is not built'}"),
        ("mean, p50, p95, p99", ", ".join(f"{figure:.3f}" for figure in _times(needed)) + " s"),
        ("cores busy until the last answer", f"{needed.cores_busy:.0%} of {needed.last_answer_s:.1f} s"),
        ("most in flight, most in the queue", f"{needed.in_flight_peak:,}, {needed.backlog_peak:,}"),
        (
            "memory of gateways, of hosts",
            f"{made.gateway_rss_bytes // MIB:,}, {made.hosts_rss_bytes // MIB:,} MiB",
        ),
    ):
        table.add_row(what, figure)
    console.print(table)
    console.print(_runaway_table(made))
    console.print(_floor_table(made))
    console.print(
        f"Simulated, with costs measured on {made.calibrated_on}. Memory is what gateways and busy hosts held there, "
        "pages that processes share counted for each.",
        soft_wrap=True,
    )


def _times(outcome: Outcome) -> tuple[float, float, float, float]:
    return outcome.mean_s, outcome.p50_s, outcome.p95_s, outcome.p99_s


def _runaway_table(made: Plan) -> Table:
    table = make_table(f"Programs without end, ended after {made.runaway_limit_s:g} s: simulated")
    for heading in ("runaways", "mean s", "p95 s", "p99 s", "with cores", "cores for the mean"):
        table.add_column(heading, justify="right")
    for row in made.runaways:
        table.add_row(
            f"{row.share:.1%}",
            *(f"{figure:.3f}" for figure in (row.same.mean_s, row.same.p95_s, row.same.p99_s)),
            str(row.same.cores),
            str(row.needed.cores) if row.needed else "none will do",
        )
    return table


def _floor_table(made: Plan) -> Table:
    scaler = made.scaler
    table = make_table(
        f"Autoscaling that looks every {scaler.looks_every_s:g} s, hosts that start in {scaler.start_s:g} s: simulated"
    )
    for heading in ("hosts at first", "mean s", "p95 s", "p99 s", "last answer s", "most in the queue"):
        table.add_column(heading, justify="right")
    for row in made.floors:
        outcome = row.outcome
        table.add_row(
            f"{row.hosts} of {made.needed.hosts}",
            *(
                f"{figure:.2f}"
                for figure in (outcome.mean_s, outcome.p95_s, outcome.p99_s, outcome.last_answer_s)
            ),
            f"{outcome.backlog_peak:,}",
        )
    return table


def _print_validation(console: Console, found: Validation) -> None:
    table = make_table(f"{found.workload} on {found.profile.machine}")
    headings = (
        "load",
        "calls/s",
        "calls",
        "CPU",
        "",
        "foretold ms",
        "at its CPU",
        "measured",
        "off by",
        "others",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for load in found.loads:
        rows = zip(
            ("mean", "p95"),
            (load.foretold.mean_s, load.foretold.p95_s),
            (load.predicted.mean_s, load.predicted.p95_s),
            (load.measured.mean_s, load.measured.p95_s),
            load.differences,
            strict=True,
        )
        head = (f"{load.share:.0%}", f"{load.rate:.0f}", str(load.calls), f"x {load.slower:.2f}")
        others = f"{load.others_cores:.2f}"
        for name, *times_s, difference in rows:
            mark = "" if abs(difference) <= TOLERANCE else " !"
            figures = (*(f"{1e3 * time_s:.1f}" for time_s in times_s), f"{difference:+.0%}{mark}")
            table.add_row(*head, name, *figures, others)
            head, others = ("", "", "", ""), ""
    console.print(table)
    if disturbed := sum(load.is_disturbed for load in found.loads):
        console.print(
            f"In {disturbed} of {len(found.loads)} runs others used cores, or the generator was late."
        )
    console.print(
        "CPU: of programs in the run, over that at the time of the profile; at its CPU: simulated with it"
    )
    verdict = "every prediction lies" if found.is_within else "NOT every prediction lies"
    console.print(f"{verdict} within {TOLERANCE:.0%} of what was measured")
