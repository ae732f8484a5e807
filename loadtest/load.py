"""Loads: what a bench sends and when, made of what its command line says, before anything is sent."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtest.arrivals import burst, constant, poisson
from loadtest.openloop import Planned
from loadtest.trace import read_trace
from loadtest.workloads import KINDS, Workload, shown_name
from sandbox import ConfigError

ARRIVALS = ("constant", "poisson", "burst", "trace")

#: A load that a machine with two cores serves with ease, its double, and the double of that.
_RATES = (20.0, 40.0, 80.0)
_BURSTS = (64,)

_WARM_UP_RATE = 20.0
_WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """The calls of one run."""

    words: str
    seconds: float
    planned: Sequence[Planned]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How calls come, by the words of the command line. What is empty has a default."""

    how: str = "poisson"
    rates: Sequence[float] = ()  # one run each, for `constant` and `poisson`
    bursts: Sequence[int] = ()  # the same for `burst`: so many calls at a time
    every_s: float = 1.0  # between bursts
    trace: Path | None = None
    seconds: float = 5.0  # of each run, but for a trace

    def __post_init__(self) -> None:
        """Refuse what would be left out of account."""
        given = {"--rate": bool(self.rates), "--burst": bool(self.bursts), "--trace": self.trace is not None}
        fits = {"constant": "--rate", "poisson": "--rate", "burst": "--burst", "trace": "--trace"}[self.how]
        if stray := [option for option, is_given in given.items() if is_given and option != fits]:
            raise ConfigError(f"{', '.join(stray)} says nothing to --arrivals {self.how}, which takes {fits}")
        if self.how == "trace" and self.trace is None:
            raise ConfigError("--arrivals trace takes the trace: --trace FILE")


def loads(arrivals: Arrivals, workload: Workload, seed: int) -> list[Load]:
    """The runs of a bench, all planned; the same seed plans the same. Raises what the trace has wrong."""
    if arrivals.trace is not None:
        return [_of_trace(arrivals.trace, workload, seed)]
    sizes = (arrivals.bursts or _BURSTS) if arrivals.how == "burst" else (arrivals.rates or _RATES)
    made = [_drawn(arrivals, size, workload, seed) for size in sizes]
    if empty := [load.words for load in made if not load.planned]:
        raise ConfigError(f"{', '.join(empty)}: no call in {arrivals.seconds:g} s; give more --seconds")
    return made


def _drawn(arrivals: Arrivals, size: float, workload: Workload, seed: int) -> Load:
    is_burst = arrivals.how == "burst"
    words = f"{size:g} every {arrivals.every_s:g} s" if is_burst else f"{arrivals.how} {size:g}/s"
    # Each run has a source of its own: what one of them draws changes no other.
    rng = random.Random(f"{seed} {words}")
    match arrivals.how:
        case "constant":
            times = constant(size, arrivals.seconds)
        case "burst":
            times = burst(int(size), arrivals.every_s, arrivals.seconds)
        case _:
            times = poisson(size, arrivals.seconds, rng)
    kinds = workload.draw(rng)
    return Load(words, arrivals.seconds, [Planned(at_s, next(kinds)) for at_s in times])


def warm_up(workload: Workload) -> list[Planned]:
    """Calls before the first run that count for nothing: they connect, and load what is loaded once."""
    kinds = workload.draw(random.Random(0))
    return [Planned(at_s, next(kinds)) for at_s in constant(_WARM_UP_RATE, _WARM_UP_S)]


def _of_trace(trace: Path, workload: Workload, seed: int) -> Load:
    known = {**KINDS, **{kind.name: kind for kind in workload.kinds}}
    planned = read_trace(trace, known, workload.draw(random.Random(seed)))
    # Its end is its last call; a trace of one moment lasts as long as a burst may take to send.
    return Load(f"trace {shown_name(trace)}", max(planned[-1].at_s, 0.1), planned)
