"""`sandbox bench`: an open loop of calls, and what a service made of it."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_json
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from loadtest.figures import Run
from loadtest.inflight import inflight
from loadtest.load import ARRIVALS, Arrivals
from loadtest.measure import Bench, Options, measure
from loadtest.openloop import PATIENCE_S
from loadtest.sockets import sockets
from loadtest.targets import TARGETS
from loadtest.terminal import check_place, make_console, make_table, refuse_options
from loadtest.trace import to_line
from loadtest.workloads import WORKLOADS
from sandbox import ConfigError
from sandbox.api_keys import key_of_caller

#: Exit codes beside 0: a call got a wrong answer, a fault or neither answer nor refusal; else, a run is invalid.
EXIT_WRONG = 1
EXIT_INVALID = 3

bench_app = typer.Typer(invoke_without_command=True)
bench_app.command()(sockets)
bench_app.command()(inflight)


@bench_app.callback()
def bench(  # noqa: PLR0913, PLR0917 - the options of a command line
    context: typer.Context,
    url: Annotated[str, typer.Option(help="A service that runs; without it, a stack of our own.")] = "",
    target: Annotated[str, typer.Option(help=f"Its API: {', '.join(TARGETS)}.")] = "v1",
    workload: Annotated[
        str, typer.Option(help=f"{', '.join(WORKLOADS)}, or a file of calls as `sandbox map` reads it.")
    ] = "mixed",
    arrivals: Annotated[str, typer.Option(help=f"How calls come: {', '.join(ARRIVALS)}.")] = "poisson",
    rate: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01, help="Calls a second; each further --rate is a further run. [default: 20, 40, 80]"
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="For which each run sends calls.")] = 5.0,
    burst: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Calls in a burst; each further one is a run. [default: 64]"),
    ] = None,
    every: Annotated[float, typer.Option(min=0.001, help="Seconds from burst to burst.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(help="JSON lines with at_s, and kind or code; what --calls wrote is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed sends the same calls at the same times.")] = 1,
    patience: Annotated[
        float, typer.Option(min=0.1, help="Seconds after which a call without an answer is given up.")
    ] = PATIENCE_S,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with the curves, whole in itself.")] = None,
    calls: Annotated[Path | None, typer.Option(help="Write every call: a JSON line each.")] = None,
) -> None:
    """Measure a service under load: send calls at fixed times, whatever it does, and tell how it served them.

    Latency counts from the moment at which a call was to be sent. A run in which the generator itself was late is
    marked INVALID. Where keys are needed, ours is in SANDBOX_API_KEY.

    Exit code 1: a call got a wrong answer, a fault, or none, or no run could begin. 3: none of that, and a run is
    invalid. Refusals (429, 503) fail nothing; a run of which nothing else came is invalid.
    """
    if context.invoked_subcommand is not None:
        refuse_options(context)
        return
    if arrivals not in ARRIVALS:
        raise typer.BadParameter(f"--arrivals is one of {', '.join(ARRIVALS)}")
    if target not in TARGETS:
        raise typer.BadParameter(f"--target is one of {', '.join(TARGETS)}")
    for place in (calls, html):
        check_place(place)
    console = Console(stderr=True) if as_json else make_console()
    options = Options(
        url=url,
        target=target,
        workload=workload,
        arrivals=Arrivals(arrivals, rate or (), burst or (), every, trace, seconds),
        seed=seed,
        patience_s=patience,
        api_key=key_of_caller(),
    )
    # Plain lines, since whatever moved on the screen would take the generator's time.
    found, sent = measure(
        options, lambda load: console.print(f"{load.words}, {len(load.planned)} calls …", markup=False)
    )
    if as_json:
        print(to_json(asdict(found)).decode())
    else:
        _print(console, found)
    if calls is not None:
        runs = zip(found.runs, sent, strict=True)
        _write(calls, "".join(to_line(call, run.started_s) for run, of_run in runs for call in of_run))
    if html is not None:
        from loadtest.report import make_page  # noqa: PLC0415 - takes a second, which a bench without a page need not

        _write(html, make_page(found, sent, shlex.join(["sandbox", *sys.argv[1:]])))
    raise typer.Exit(_exit_code(found))


def _exit_code(bench: Bench) -> int:
    if any(run.wrong or run.failed for run in bench.runs):
        return EXIT_WRONG
    return EXIT_INVALID if any(run.invalid for run in bench.runs) else 0


def _print(console: Console, bench: Bench) -> None:
    where = bench.url or f"a stack of our own, {bench.machine.cores} cores"
    table = make_table(
        escape(f"{bench.workload} → {bench.target}, {where}; measured, answered by: {bench.answered_by}")
    )
    table.add_column("ms", no_wrap=True)
    for heading in (
        "mean",
        "p50",
        "p90",
        "p95",
        "p99",
        "p99.9",
        "max",
        "added p50",
        "p99",
        "late p50",
        "p99",
    ):
        table.add_column(heading, justify="right")
    for run in bench.runs:
        latencies = (run.mean_s, run.p50_s, run.p90_s, run.p95_s, run.p99_s, run.p999_s, run.max_s)
        rest = (run.added_p50_s, run.added_p99_s, run.late_p50_s, run.late_p99_s)
        table.add_row(Text(run.load), *map(_ms, latencies + rest))
    console.print(table)
    console.print(
        "From when a call was to be sent. Added: without the program's own time. Late: the generator itself."
    )
    if not bench.goes_first:
        console.print(
            "The generator had no right to go before others on its cores, which root has, and may be late for it."
        )
    for run in bench.runs:
        outcomes = ", ".join(f"{count} {word}" for word, count in run.outcomes.items())
        rates = {"offered": run.offered_per_s, "sent": run.achieved_per_s, "answered": run.answered_per_s}
        told = ", ".join(f"{name} {rate:.1f}/s" for name, rate in rates.items())
        cpu = [f"{part} {used * 1e3:.2f}" for part, used in (run.cpu_s_per_call or {}).items()]
        console.print(
            f"\n{run.load}: {outcomes}\n  {told}; generator {run.generator_cpu_share:.0%} of a core"
            + (f"\n  CPU ms of a call: {', '.join(cpu)}" if cpu else ""),
            markup=False,
            soft_wrap=True,
        )
        for line in _complaints(run):
            console.print(Text(f"  {line}", style="red"), soft_wrap=True)


def _ms(seconds: float | None) -> str:
    """Three digits, or all before the point."""
    if seconds is None:
        return ""
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}"


def _complaints(run: Run) -> list[str]:
    lines = [f"INVALID: {run.invalid}"] if run.invalid else []
    if run.wrong:
        lines.append(f"{run.wrong} calls got another answer than they had to")
    return lines + [f"{outcome}: {why}" for outcome, why in run.reasons.items()]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
