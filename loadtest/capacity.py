"""What so many calls need, found by simulation: cores, hosts, gateways, Redis servers.

Given are how many calls come within a window (or a trace of them), what they are, and the mean latency that is wanted.
The fewest whole hosts are searched at which the simulated mean is no longer than that. The hosts are taken to be, core
for core, as fast as the machine of the profile.

Gateways and Redis are counted first, each so that it is busy for no more than `BUSY` of the time in which the calls
must get through, at what a call costs them in a crowd, as it does all parts here: a plan keeps its cores busy, and no
part of it sleeps between two calls. More than one Redis is a design that is not built (ARCHITECTURE.md): such a plan
says what one service cannot do.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from loadtest.profile import Profile, works
from loadtest.simulate import Cost, Costs, Layout, Scaler, Simulated, Work, simulate
from loadtest.timing import percentile
from loadtest.workloads import load_workload
from sandbox.calls import first_error
from sandbox.errors import ConfigError

#: How busy a gateway or a Redis may be while the calls come.
BUSY = 0.6
#: Shares of calls without end for which the plan is shown.
RUNAWAY_SHARES = (0.0, 0.001, 0.01)
#: Shares of the hosts that are there before the first call.
FLOORS = (1.0, 0.5, 0.25, 0.0)
_MOST_HOSTS = 4096
_SLICE_S = 0.004  # coarse, and so quick; a host of a plan has many cores, among which it hardly matters
_SEED = 45


@dataclass(frozen=True, slots=True)
class Load:
    """The calls of a plan, and how soon they must be answered."""

    calls: Sequence[Work]
    window_s: float
    mean_s: float

    @property
    def busy_s(self) -> float:
        """How long gateways and Redis have for them: those of one instant must be through within the wanted mean."""
        return max(self.window_s, self.mean_s)

    @property
    def cpu_s(self) -> float:
        """What all programs need together, of those that end."""
        return sum(call.cpu_s for call in self.calls if math.isfinite(call.cpu_s))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulated service makes of a load. All of it is simulated."""

    cores: int
    hosts: int
    gateways: int
    redis: int
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    cores_busy: float  # share of all cores' time until the last answer
    gateway_busy: float
    # Cores that all Redis servers together need while the calls come: beyond 1, one is too few.
    redis_load: float
    in_flight_peak: int
    backlog_peak: int
    last_answer_s: float


@dataclass(frozen=True, slots=True)
class Runaways:
    """What programs without end make of it, which each hold a slot until their limit."""

    share: float
    same: Outcome  # with the cores of the plan
    needed: Outcome | None  # with as many as it takes; None where none do


@dataclass(frozen=True, slots=True)
class Floor:
    """What autoscaling makes of it, with so many of the hosts there before the first call."""

    hosts: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Plan:
    """All of a plan."""

    calibrated_on: str
    calls: int
    window_s: float
    wanted_mean_s: float
    needed: Outcome
    gateway_rss_bytes: int  # of all gateways, as measured
    hosts_rss_bytes: int  # of all workers and jails, as measured on the machine of the profile, by its cores
    runaway_limit_s: float
    runaways: tuple[Runaways, ...]
    scaler: Scaler
    floors: tuple[Floor, ...]
    how: Literal["simulated"] = "simulated"
    calibration: Literal["measured"] = "measured"


def make_plan(load: Load, profile: Profile, host_cores: int, limit_s: float) -> Plan:
    """Everything that `sandbox plan` prints. Raises ConfigError where no number of hosts would do."""
    profile = replace(profile, costs=_in_a_crowd(profile.costs))
    layout, simulated = _fewest(load, profile, host_cores)
    needed = _outcome(load, layout, simulated)
    return Plan(
        calibrated_on=profile.origin,
        calls=len(load.calls),
        window_s=load.window_s,
        wanted_mean_s=load.mean_s,
        needed=needed,
        gateway_rss_bytes=needed.gateways * profile.gateway_rss_bytes,
        hosts_rss_bytes=needed.cores * profile.host_rss_bytes // profile.cores,
        runaway_limit_s=limit_s,
        runaways=tuple(_runaways(load, profile, layout, share, limit_s) for share in RUNAWAY_SHARES),
        scaler=Scaler(layout.hosts),
        floors=tuple(_floor(load, profile, layout, hosts) for hosts in _floors(layout.hosts)),
    )


def fewest(load: Load, profile: Profile, host_cores: int) -> Outcome:
    """The fewest hosts at which the mean is no longer than wanted. Raises ConfigError where none would do."""
    profile = replace(profile, costs=_in_a_crowd(profile.costs))
    return _outcome(load, *_fewest(load, profile, host_cores))


def make_load(profile: Profile, workload: str, calls: int, window_s: float, mean_s: float) -> Load:
    """So many calls of a workload, at random times within the window. Raises ConfigError for an unknown workload."""
    rng = random.Random(_SEED)
    times = sorted(rng.uniform(0.0, window_s) for _ in range(calls))
    kinds = [kind.name for kind in islice(load_workload(workload).draw(rng), calls)]
    if unknown := set(kinds) - profile.kinds.keys():
        raise ConfigError(
            f"the profile has no costs of {min(unknown)}; it has those of {', '.join(profile.kinds)}. "
            "Programs of your own: run them by `sandbox bench --calls FILE`, then `sandbox plan --trace FILE`"
        )
    return Load(works(profile, list(zip(times, kinds, strict=True)), rng), window_s, mean_s)


class _Line(BaseModel):
    """A line of a trace, of which we need this much."""

    at_s: FiniteFloat = Field(ge=0)
    kind: str | None = None
    cpu_s: FiniteFloat | None = Field(default=None, ge=0)
    wall_s: FiniteFloat | None = Field(default=None, ge=0)


def read_load(profile: Profile, path: Path, workload: str, mean_s: float) -> Load:
    """The calls of a trace, such as `sandbox bench --calls` writes. Raises ConfigError with the line that is wrong.

    A line's own `cpu_s` and `wall_s` say what it needs; else its kind does; else the workload brings one. What is wall
    time and no CPU is taken for sleep, so trace a service that was not full.
    """
    rng = random.Random(_SEED)
    drawn = load_workload(workload).draw(rng)
    calls = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"cannot read {path}: it is no UTF-8 text") from exc
    for number, raw in enumerate(text.splitlines(), start=1):
        try:
            line = _Line.model_validate_json(raw)
        except ValidationError as exc:
            raise ConfigError(f"{path}:{number}: {first_error(exc)}") from exc
        if line.cpu_s is not None:
            calls.append(_traced(profile, line, line.cpu_s))
            continue
        kind = line.kind or next(drawn).name
        if kind not in profile.kinds:
            raise ConfigError(f"{path}:{number}: neither cpu_s nor a kind that the profile knows")
        calls.append(profile.kinds[kind].work(line.at_s, rng.random()))
    if not calls:
        raise ConfigError(f"{path} has no call in it")
    calls.sort(key=lambda call: call.at_s)
    return Load(calls, calls[-1].at_s, mean_s)


def _traced(profile: Profile, line: _Line, cpu_s: float) -> Work:
    kind = profile.kinds.get(line.kind or "")
    if kind is not None and kind.limit_s is not None:
        return kind.work(line.at_s, 0.0)
    beside_s = (
        kind.beside_s if kind else fmean(each.beside_s for each in profile.kinds.values() if each.cpu_s)
    )
    idle_s = kind.idle_s if kind else max(0.0, (line.wall_s or 0.0) - cpu_s)
    return Work(line.at_s, cpu_s + beside_s, idle_s)


def _in_a_crowd(costs: Costs) -> Costs:
    """What calls cost parts that are never idle for long."""
    return Costs(
        gateway=Cost(call_s=costs.gateway.call_s),
        redis=Cost(call_s=costs.redis.call_s),
        worker=Cost(call_s=costs.worker.call_s),
        fixed_s=max(0.0, costs.fixed_s),
    )


def _runaways(load: Load, profile: Profile, layout: Layout, share: float, limit_s: float) -> Runaways:
    rng = random.Random(_SEED)
    ending = set(rng.sample(range(len(load.calls)), round(share * len(load.calls))))
    calls = [
        Work(call.at_s, math.inf, limit_s=limit_s) if number in ending else call
        for number, call in enumerate(load.calls)
    ]
    worse = replace(load, calls=calls)
    same = _outcome(worse, layout, simulate(calls, profile.costs, layout))
    if same.mean_s <= load.mean_s:
        return Runaways(share, same, same)
    if share * limit_s > load.mean_s:
        return Runaways(share, same, None)  # their own time alone makes the mean longer
    try:
        return Runaways(share, same, fewest(worse, profile, layout.cores))
    except ConfigError:
        return Runaways(share, same, None)


def _floors(hosts: int) -> list[int]:
    return sorted({math.ceil(share * hosts) for share in FLOORS}, reverse=True)


def _floor(load: Load, profile: Profile, layout: Layout, hosts: int) -> Floor:
    scaled = replace(layout, scaler=Scaler(hosts))
    return Floor(hosts, _outcome(load, scaled, simulate(load.calls, profile.costs, scaled)))


def _outcome(load: Load, layout: Layout, simulated: Simulated) -> Outcome:
    latencies, cores = simulated.latency_s, layout.hosts * layout.cores
    return Outcome(
        cores=cores,
        hosts=layout.hosts,
        gateways=layout.gateways,
        redis=layout.redis,
        mean_s=fmean(latencies),
        p50_s=percentile(latencies, 0.5),
        p95_s=percentile(latencies, 0.95),
        p99_s=percentile(latencies, 0.99),
        cores_busy=simulated.host_cpu_s / cores / simulated.end_s,
        gateway_busy=simulated.gateway_cpu_s / layout.gateways / load.busy_s,
        redis_load=simulated.redis_cpu_s / load.busy_s,
        in_flight_peak=simulated.in_flight_peak,
        backlog_peak=simulated.backlog_peak,
        last_answer_s=simulated.end_s,
    )


def _fewest(load: Load, profile: Profile, host_cores: int) -> tuple[Layout, Simulated]:
    """Doubling and halving from what the calls' work alone would need; each step is a whole simulation."""
    edge = _edge(load, profile)

    def attempt(hosts: int) -> tuple[Layout, Simulated]:
        layout = replace(edge, hosts=hosts, cores=host_cores)
        return layout, simulate(load.calls, profile.costs, layout)

    def is_enough(attempted: tuple[Layout, Simulated]) -> bool:
        return fmean(attempted[1].latency_s) <= load.mean_s

    guess = load.cpu_s / (load.window_s + 2 * load.mean_s) / host_cores
    hosts = max(1, round(guess))
    tried = attempt(hosts)
    step = max(1, hosts // 8)
    if is_enough(tried):
        enough, below = tried, 0
        while enough[0].hosts > 1:
            hosts = max(1, enough[0].hosts - step)
            tried = attempt(hosts)
            if not is_enough(tried):
                below = hosts
                break
            enough, step = tried, 2 * step
    else:
        while not is_enough(tried):
            below = hosts
            hosts, step = hosts + step, 2 * step
            if hosts > _MOST_HOSTS:
                raise ConfigError(
                    f"no number of hosts brings the mean down to {load.mean_s:g} s; "
                    f"with {below} it is {fmean(tried[1].latency_s):.3g} s"
                )
            tried = attempt(hosts)
        enough = tried
    while enough[0].hosts - below > 1:
        hosts = (enough[0].hosts + below) // 2
        tried = attempt(hosts)
        if is_enough(tried):
            enough = tried
        else:
            below = hosts
    return enough


def _edge(load: Load, profile: Profile) -> Layout:
    """Enough gateways and Redis servers. The dearest that a call can be is alone, the cheapest in a crowd."""

    def servers(call_s: float) -> int:
        return max(1, math.ceil(len(load.calls) * call_s / load.busy_s / BUSY))

    costs = profile.costs
    return Layout(
        0, 0, slice_s=_SLICE_S, gateways=servers(costs.gateway.call_s), redis=servers(costs.redis.call_s)
    )
