"""The page of a bench: one HTML file that opens without a network, and holds all that it shows.

The drawings are SVG by matplotlib inside of the page, some ten kilobytes each and no script; plotly would bring
a script of four megabytes. Names of files and the words of a service are somebody else's: each is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from loadtest.charts import latency_by_load, latency_by_percentile, timeline
from loadtest.figures import Run
from loadtest.measure import Bench
from loadtest.openloop import Sent

_PAGE = Path(__file__).with_name("report.html")
_LATENCIES = ("mean", "p50", "p90", "p95", "p99", "p999", "max", "added_p50", "added_p99")
_HEAD = (
    "load",
    "answers a second",
    "mean",
    "p50",
    "p90",
    "p95",
    "p99",
    "p99.9",
    "max",
    "added p50",
    "added p99",
    "late p99",
    "answers",
)


def make_page(bench: Bench, calls: Sequence[Sequence[Sent]], command: str) -> str:
    """The whole page: figures, curves, and the command that makes them again."""
    highest = max(bench.runs, key=lambda run: run.offered_per_s)
    page = Template(_PAGE.read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(f"{bench.workload} on {bench.url or 'a stack of our own'}"),
        subtitle=escape(
            f"Measured, not simulated, through {bench.target}; answered by: {bench.answered_by}."
        ),
        notices="\n".join(f'<p class="notice">{escape(text)}</p>' for text in _notices(bench)),
        highest=escape(highest.load),
        tiles="\n".join(_tile(value, name) for value, name in _tiles(highest)),
        head="<tr>" + "".join(f"<th>{heading}</th>" for heading in _HEAD) + "</tr>",
        rows="\n".join(map(_row, bench.runs)),
        percentiles=latency_by_percentile(bench.runs, calls),
        by_load=latency_by_load(bench.runs),
        timeline=timeline(bench.runs, calls),
        facts="\n".join(f"<dt>{escape(name)}</dt><dd>{fact}</dd>" for name, fact in _facts(bench, command)),
    )


def _notices(bench: Bench) -> Iterable[str]:
    for run in bench.runs:
        if run.invalid:
            yield f"{run.load} is INVALID: {run.invalid}."
        if run.wrong:
            yield f"{run.load}: {run.wrong} calls got another answer than they had to."
        for outcome, why in run.reasons.items():
            yield f"{run.load}, {outcome}: {why}"


def _tiles(run: Run) -> Iterable[tuple[str, str]]:
    yield f"{run.answered_per_s:.1f}", "answers a second"
    yield f"{_ms(run.p50_s)} ms", "latency, p50"
    yield f"{_ms(run.p99_s)} ms", "latency, p99"
    if run.added_p50_s is not None:
        yield f"{_ms(run.added_p50_s)} ms", "added by the service, p50"
    yield f"{run.right / run.calls:.1%}", "right answers"


def _tile(value: str, name: str) -> str:
    return f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'


def _row(run: Run) -> str:
    mark = ' <span class="bad">INVALID</span>' if run.invalid else ""
    is_good = run.right == run.calls
    outcomes = ", ".join(f"{count} {word}" for word, count in run.outcomes.items())
    cells = [
        f"<td>{escape(run.load)}{mark}</td>",
        f"<td>{run.answered_per_s:.1f}</td>",
        *(f"<td>{_ms(getattr(run, f'{name}_s'))}</td>" for name in _LATENCIES),
        f"<td>{_ms(run.late_p99_s)}</td>",
        f'<td class="{"good" if is_good else "bad"}">{escape(outcomes)}</td>',
    ]
    return "<tr>" + "".join(cells) + "</tr>"


def _facts(bench: Bench, command: str) -> Iterable[tuple[str, str]]:
    """Name and HTML of each."""
    machine = bench.machine
    yield "Command", f"<code>{escape(command)}</code>"
    yield "Seed", str(bench.seed)
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB"
    yield (
        "Machine",
        escape(f"{machine.cores} cores, {machine.cpu}, {memory}, load before: {machine.load_1min:.1f}"),
    )
    yield "System", escape(f"Linux {machine.kernel}, Python {machine.python}")
    first = (
        "goes first where it shares a core"
        if bench.goes_first
        else "shares its cores with whatever runs there"
    )
    shares = ", ".join(f"{run.load}: {run.generator_cpu_share:.0%}" for run in bench.runs)
    yield "Generator", escape(f"{first}; of a core it used, in {shares}")
    for run in bench.runs:
        if run.cpu_s_per_call:
            parts = ", ".join(f"{part} {used * 1e3:.2f}" for part, used in run.cpu_s_per_call.items())
            yield f"CPU ms a call, {run.load}", escape(parts)


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.1f}"  # noqa: RUF001 - a dash is what a table has there
