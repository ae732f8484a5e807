"""The drawings of a bench's page: SVG to stand inside of HTML, whole in itself.

Text and axes have the colour of the text around them (`currentColor`), so that one drawing fits a light page and a
dark one. Labels stay text, in whatever sans-serif font the reader has. Ids carry the name of their drawing, because
those of two drawings on a page would meet.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from math import isfinite, log10
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from loadtest.figures import Run, counts_for_latency, histogram, is_failure, percentile_s
from loadtest.openloop import Sent
from loadtest.timing import percentile

_INK = "#010203"  # stands for the colour of text until a drawing is done
_COLOURS = ("#3b82c4", "#e0912f", "#4fa36b", "#b667a3", "#8279d6", "#8d949e")  # on white as on near black
_BAD = "#dc4c4c"
_WIDTH = 9.0  # inches, which a page makes as wide as itself
_BINS = 120  # of a timeline's latencies
_RATE_BINS = 40  # and of its answers, of which a narrow bin would have none or one
_PERCENTS = (0.0, 50.0, 90.0, 99.0, 99.9, 99.99)

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "text.parse_math": False,  # the words of a load may hold a file's name, and `$` in it is no formula
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.linewidth": 0.6,
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
}


def latency_by_percentile(runs: Sequence[Run], calls: Sequence[Sequence[Sent]]) -> str:
    """A curve for each run, from its fastest call to its slowest; the rarer, the wider."""
    with mpl.rc_context(_STYLE):
        figure, [axes] = _figure(3.3, 1)
        most_nines = 2.0
        for number, (run, sent) in enumerate(zip(runs, calls, strict=True)):
            latencies = histogram(call.latency_s for call in sent if counts_for_latency(call))
            if not (count := latencies.get_total_count()):
                continue
            # The last point is the one slowest call: of a hundred calls, p99.
            nines = [log10(count) * step / 60 for step in range(61)]
            most_nines = max(most_nines, nines[-1])
            values = [(percentile_s(latencies, 100 * (1 - 10**-nine)) or 0.0) * 1e3 for nine in nines]
            style = "--" if run.invalid else "-"
            axes.plot(nines, values, color=_colour(number), linestyle=style, label=_label(run))
        axes.xaxis.set_major_locator(FixedLocator([-log10(1 - percent / 100) for percent in _PERCENTS]))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda nines, _: _percent(nines)))
        axes.set_xlim(0, most_nines)
        axes.set_xlabel("share of calls that were at least as fast, %")
        _latency_axis(axes)
        _legend(axes)
        return _svg(figure, "percentiles")


def latency_by_load(runs: Sequence[Run]) -> str:
    """Percentiles over the offered load; invalid runs are hollow."""
    with mpl.rc_context(_STYLE):
        figure, [axes] = _figure(3.0, 1)
        ordered = sorted(runs, key=lambda run: run.offered_per_s)
        for number, name in enumerate(("p50", "p90", "p99", "p999")):
            points = [(run, getattr(run, f"{name}_s")) for run in ordered]
            known = [(run, value * 1e3) for run, value in points if value is not None]
            colour = _COLOURS[number]
            axes.plot(
                [run.offered_per_s for run, _ in known],
                [v for _, v in known],
                color=colour,
                label=_dotted(name),
            )
            for run, value in known:
                face = "none" if run.invalid else colour
                axes.plot(run.offered_per_s, value, "o", ms=5, mfc=face, mec=colour)
        axes.set_xlim(left=0)
        axes.set_xlabel("offered load, calls/s")
        _latency_axis(axes)
        _legend(axes)
        return _svg(figure, "load")


def timeline(runs: Sequence[Run], calls: Sequence[Sequence[Sent]]) -> str:
    """All runs one after the other: latency by the moment a call was to be sent, and answers by when they came."""
    with mpl.rc_context(_STYLE):
        figure, [latency, rate] = _figure(4.4, 2)
        end_s = max(run.started_s + run.took_s for run in runs)
        for number, (run, sent) in enumerate(zip(runs, calls, strict=True)):
            _draw_latency(latency, number, run, sent, end_s / _BINS)
            _draw_rate(rate, number, run, sent, end_s / _RATE_BINS)
        latency.set_xlim(0, end_s)
        _latency_axis(latency)
        rate.set_ylim(bottom=0)
        rate.set_ylabel("calls/s")
        rate.set_xlabel("time since the first run began, s")
        latency.plot([], [], "x", color=_BAD, ms=5, label="failed")
        rate.plot([], [], color=_INK, lw=1, ls=":", label="offered")
        _legend(latency)
        _legend(rate)
        return _svg(figure, "timeline")


def _draw_latency(axes: Axes, number: int, run: Run, sent: Sequence[Sent], width_s: float) -> None:
    """The median and, above it, the range up to the slowest call of each moment."""
    bins: dict[int, list[float]] = {}
    for call in sent:
        if counts_for_latency(call):
            bins.setdefault(int(call.at_s / width_s), []).append(call.latency_s * 1e3)
    moments = [run.started_s + (place + 0.5) * width_s for place in sorted(bins)]
    medians = [percentile(bins[place], 0.5) for place in sorted(bins)]
    slowest = [max(bins[place]) for place in sorted(bins)]
    colour = _colour(number)
    axes.fill_between(moments, medians, slowest, color=colour, alpha=0.22, lw=0)
    axes.plot(moments, medians, color=colour, lw=1.2, label=_label(run))
    bad = {int(call.at_s / width_s): call for call in sent if is_failure(call)}
    axes.plot(
        [run.started_s + (place + 0.5) * width_s for place in bad],
        [call.latency_s * 1e3 for call in bad.values()],
        "x",
        color=_BAD,
        ms=5,
    )


def _draw_rate(axes: Axes, number: int, run: Run, sent: Sequence[Sent], width_s: float) -> None:
    places = int(run.took_s / width_s) + 1
    answers, failures = [0] * places, [0] * places
    for call in sent:
        place = min(places - 1, int((call.at_s + call.latency_s) / width_s))
        (failures if is_failure(call) else answers)[place] += 1
    moments = [run.started_s + (place + 0.5) * width_s for place in range(places)]
    axes.plot(moments, [n / width_s for n in answers], color=_colour(number), lw=1.2)
    if any(failures):
        axes.plot(moments, [n / width_s for n in failures], color=_BAD, lw=1.2)
    axes.hlines(run.offered_per_s, run.started_s, run.started_s + run.seconds, color=_INK, lw=1, ls=":")


def _figure(height: float, rows: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.patch.set_alpha(0)
    grid = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=[3, 2][:rows])
    axes = [row[0] for row in grid]
    for each in axes:
        each.patch.set_alpha(0)
    return figure, axes


def _latency_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    if not isfinite(axes.dataLim.minposy):
        axes.set_ylim(1, 10)  # of nothing, where nothing was served
    axes.set_ylabel("latency, ms")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _legend(axes: Axes) -> None:
    """Beside the drawing, where no curve can be."""
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _label(run: Run) -> str:
    words = run.load if len(run.load) <= 24 else f"{run.load[:23]}…"
    return f"{words} (invalid)" if run.invalid else words


def _dotted(name: str) -> str:
    return name.replace("p999", "p99.9")


def _percent(nines: float) -> str:
    return f"{100 * (1 - 10**-nines):.6g}"


def _svg(figure: Figure, name: str) -> str:
    with io.StringIO() as file, mpl.rc_context({"svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=nothing)
        text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\s(?:xmlns(?::\w+)?)="[^"]*"', "", text)  # an HTML parser knows them
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\1{name}-", text)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', rf'<svg viewBox="\1" role="img" class="{name}">', text, count=1
    )
    return text.replace(_INK, "currentColor")
