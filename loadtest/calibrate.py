"""Measures what calls cost on the machine at hand, in about half a minute, on a stack that it gets.

    crowd      gateway and Redis with a stand-in behind them, which could answer any number (`edge.py`)
    idle       what the stack uses while nobody calls, which is taken off all that follows
    mixed      `MIX`, all calls at one instant, so that every slot is busy: what a call in a crowd costs worker and
               callers
    full       each kind of program by itself in the same way: the CPU of each program as the service tells it, and
               what its forkserver uses beside that
    light      `MIX` again, few of them a second, before and after that: what a call alone costs each part, how much
               more a program costs on an idle core, and how long a call takes

How many calls a second the machine can do is taken from the CPU of a call, the middle of alone and in a crowd, so that
others on it do not make it less. On a quiet machine that is what all calls at one instant came to, 290 a second.

CPU is what the kernel counted for each process, so others on the machine make it a few percent larger and no more.
The one figure that is fitted is `fixed_s`: by how much the median call of `light` took longer than the same calls take
in the simulation. It may be negative, for some of the CPU is used after the answer has left.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from loadtest.arrivals import poisson
from loadtest.edge import Way, measure_edge
from loadtest.openloop import Planned, Sent, Target, run_open_loop
from loadtest.processes import used_by
from loadtest.profile import KindCost, Profile, replay
from loadtest.simulate import Cost, Costs
from loadtest.stack import Stack
from loadtest.timing import percentile
from loadtest.workloads import KINDS, Workload
from sandbox.calls import CallStatus
from sandbox.errors import InternalError, Unavailable
from sandbox.stack import cores

#: Programs that need cores, in a mix whose 95th percentile lies among the calls of one kind and not between two.
MIX = Workload(
    "print, numpy, sympy", [KINDS[name] for name in ("print", "numpy", "sympy")], [0.6, 0.25, 0.15]
)
#: A run is disturbed when others used more cores than this, or its generator was later than this on average.
QUIET_CORES, QUIET_LATE_S = 0.2, 0.003

_CROWD_CALLS = 4096
_WARM_UP = 12  # calls of each kind
_IDLE_S = 2.0
_MOST_IDLE = 15  # times
_WARM_JAIL = 0.02  # cores that jails may use while nobody calls
_FULL_CALLS = {"print": 300, "numpy": 240, "sympy": 120, "sleep-20": 80, "sleep-100": 40, "sleep-300": 20}
_MIXED_CALLS = 400
_LIGHT_SHARE = 1 / 9
_LIGHT_S = 3.0
_REPEATS = 2
_LOOK_S, _MOST_LOOKS = 0.2, 10
_QUANTILES = 40
_SEED = 45
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Observed:
    """A run in an open loop, and what it used."""

    sent: list[Sent]
    took_s: float
    cpu_s: Mapping[str, float]  # by part, the callers' own too
    rss_bytes: Mapping[str, int]  # at its end
    others_cores: float

    @property
    def late_s(self) -> float:
        """How late the generator was, on average."""
        return fmean(call.late_s for call in self.sent)

    @property
    def is_disturbed(self) -> bool:
        """Whether its figures are rather those of the machine's other users."""
        return self.others_cores > QUIET_CORES or self.late_s > QUIET_LATE_S

    @property
    def call_s(self) -> float:
        """CPU of all parts for each call, with what they use anyway."""
        return sum(self.cpu_s.values()) / len(self.sent)

    def then(self, later: Observed) -> Observed:
        """One run of this one and a later one."""
        start_s = max(call.at_s + call.latency_s for call in self.sent) + 1.0
        return Observed(
            sent=[*self.sent, *(replace(call, at_s=call.at_s + start_s) for call in later.sent)],
            took_s=self.took_s + later.took_s,
            cpu_s={part: used + later.cpu_s[part] for part, used in self.cpu_s.items()},
            rss_bytes=later.rss_bytes,
            others_cores=max(self.others_cores, later.others_cores),
        )

    def each_s(self, part: str, idle: Mapping[str, float]) -> float:
        """CPU of a part for each call, without what it uses anyway."""
        return max(0.0, self.cpu_s[part] - idle.get(part, 0.0) * self.took_s) / len(self.sent)


async def observe(stack: Stack, target: Target, planned: Sequence[Planned]) -> Observed:
    """Run an open loop on a stack of our own. Raises InternalError for an answer that is not right."""
    meter = _Meter(stack)
    sent = await run_open_loop(target, planned)
    took_s, cpu_s, others_s = meter.read()
    if wrong := next((call for call in sent if not call.is_right), None):
        raise InternalError(f"a call of kind {wrong.kind} ended as {wrong.outcome} {wrong.why}")
    rss_bytes = {part: use.rss_bytes for part, use in used_by(stack.pid).items()}
    return Observed(sent, took_s, cpu_s, rss_bytes, max(0.0, others_s) / took_s)


def measure_crowd() -> Way:
    """What a call in a crowd costs gateway and Redis."""
    return measure_edge(_CROWD_CALLS).ways[0]


@dataclass(slots=True)
class Patience:
    """How often disturbed runs may still be repeated."""

    repeats: int

    async def observe(
        self, stack: Stack, target: Target, planned: Sequence[Planned], say: Callable[[str], None]
    ) -> Observed:
        """Observe until a run was not disturbed; else return the one in which others used least."""
        await _lull(stack)
        best = await observe(stack, target, planned)
        while best.is_disturbed and self.repeats:
            self.repeats -= 1
            say(f"disturbed, others used {best.others_cores:.2f} cores; again")
            await _lull(stack)
            again = await observe(stack, target, planned)
            best = min(best, again, key=lambda run: run.others_cores)
        return best


async def measure_profile(stack: Stack, target: Target, crowd: Way, say: Callable[[str], None]) -> Profile:
    """Measure the machine by a stack of our own that runs on it; `say` hears of each step."""
    rng = random.Random(_SEED)

    async def full(step: str, planned: list[Planned]) -> Observed:
        say(f"all slots busy: {step}")
        return await observe(stack, target, planned)

    say("warm-up")
    await observe(stack, target, [Planned(0.0, KINDS[name]) for name in _FULL_CALLS for _ in range(_WARM_UP)])
    say("idle")
    idle = await _idle(stack)
    kinds = MIX.draw(rng)
    mixed = await full("mixed", [Planned(0.0, kind) for kind in islice(kinds, _MIXED_CALLS)])
    times = poisson(_LIGHT_SHARE * cores() / mixed.call_s, _LIGHT_S, rng)
    spread = [Planned(at_s, kind) for at_s, kind in zip(times, kinds, strict=False)]

    async def observe_light() -> Observed:
        say("light")
        return await Patience(_REPEATS).observe(stack, target, spread, say)

    before = await observe_light()
    each = {name: await full(name, [Planned(0.0, KINDS[name])] * n) for name, n in _FULL_CALLS.items()}
    light = before.then(await observe_light())

    def cost(part: str, call_s: float) -> Cost:
        alone_s = light.each_s(part, idle)
        return Cost(max(0.0, alone_s - call_s), min(alone_s, call_s))

    endless = {
        name: KindCost((), limit_s=kind.call().limits.wall_s)
        for name, kind in KINDS.items()
        if kind.status is CallStatus.TIMEOUT
    }
    profile = Profile(
        machine=_machine(),
        cores=cores(),
        day=datetime.now(UTC).date().isoformat(),
        kinds={name: _kind_cost(seen, idle) for name, seen in each.items()} | endless,
        costs=Costs(
            caller=cost("caller", mixed.each_s("caller", idle)),
            gateway=cost("gateway", crowd.gateway_us / 1e6),
            redis=cost("redis", crowd.redis_us / 1e6),
            worker=cost("worker", mixed.each_s("worker", idle)),
            cold=max(1.0, _program_s(light) / _program_s(mixed)),
        ),
        calls_per_s=2 * cores() / (mixed.call_s + light.call_s),
        idle_jail_cores=idle["jail"],
        gateway_rss_bytes=mixed.rss_bytes["gateway"],
        host_rss_bytes=mixed.rss_bytes["worker"] + mixed.rss_bytes["jail"],
        others_cores=fmean([mixed.others_cores, light.others_cores]),
    )
    return refit(profile, light)


def refit(profile: Profile, light: Observed, slots: int = 0) -> Profile:
    """The profile with what a light run tells of times that are no CPU: of sleepers in their slots, and of the way."""
    slept: dict[str, list[float]] = {}
    for call in light.sent:
        if profile.kinds[call.kind].idle_s:
            slept.setdefault(call.kind, []).append((call.wall_s or 0.0) - (call.cpu_s or 0.0))
    kinds = {name: replace(profile.kinds[name], idle_s=fmean(times)) for name, times in slept.items()}
    costs = replace(profile.costs, fixed_s=0.0)
    bare = replace(profile, kinds={**profile.kinds, **kinds}, costs=costs)
    simulated = replay(bare, [(call.at_s, call.kind) for call in light.sent], slots)
    fixed_s = median(call.latency_s for call in light.sent) - median(simulated.latency_s)
    return replace(bare, costs=replace(costs, fixed_s=fixed_s))


def _kind_cost(seen: Observed, idle: Mapping[str, float]) -> KindCost:
    used = sorted(call.cpu_s or 0.0 for call in seen.sent)
    parts = min(_QUANTILES, len(used))
    return KindCost(
        cpu_s=tuple(used[int((n + 0.5) * len(used) / parts)] for n in range(parts)),
        beside_s=max(0.0, seen.each_s("jail", idle) - fmean(used)),
        idle_s=_idle_s(seen),
    )


def _program_s(seen: Observed) -> float:
    """CPU of the middle program, of the kind that is the most frequent in every mix."""
    return median(call.cpu_s or 0.0 for call in seen.sent if call.kind == "print")


def _idle_s(seen: Observed) -> float:
    """How long a sleeper sleeps. Waiting for a core looks the same, so it is what the luckiest waited."""
    if not seen.sent[0].kind.startswith("sleep"):
        return 0.0
    return percentile([(call.wall_s or 0.0) - (call.cpu_s or 0.0) for call in seen.sent], 0.1)


async def _idle(stack: Stack) -> Mapping[str, float]:
    """CPU seconds a second of each part while nobody calls, once the last forkserver is warm."""
    for _ in range(_MOST_IDLE):
        meter = _Meter(stack)
        await asyncio.sleep(_IDLE_S)  # the measured time itself
        took_s, cpu_s, _ = meter.read()
        idle = {part: used / took_s for part, used in cpu_s.items()}
        if idle["jail"] < _WARM_JAIL:
            return idle
    raise Unavailable(
        f"after {_MOST_IDLE * _IDLE_S:.0f} s without calls the jails still use {idle['jail']:.2f} cores"
    )


async def _lull(stack: Stack) -> None:
    """Wait for a moment in which others leave the machine alone, but not for long."""
    for _ in range(_MOST_LOOKS):
        meter = _Meter(stack)
        await asyncio.sleep(_LOOK_S)
        took_s, _, others_s = meter.read()
        if others_s <= QUIET_CORES * took_s:
            return


class _Meter:
    """CPU seconds since it was made."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._before = self._now()

    def read(self) -> tuple[float, dict[str, float], float]:
        """Of the clock, of each part with the callers, and of all others."""
        before, now = self._before, self._now()
        cpu_s = {part: used - before.parts.get(part, 0.0) for part, used in now.parts.items()}
        return now.clock - before.clock, cpu_s, now.machine - before.machine - sum(cpu_s.values())

    def _now(self) -> _Reading:
        parts = {part: use.cpu_s for part, use in used_by(self._stack.pid).items()}
        return _Reading(time.perf_counter(), parts | {"caller": time.process_time()}, _machine_s())


@dataclass(frozen=True, slots=True)
class _Reading:
    clock: float
    parts: dict[str, float]
    machine: float


def _machine_s() -> float:
    """CPU seconds of all cores since the machine started, those that a hypervisor took included; see proc(5)."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    return (user + nice + system + irq + softirq + steal) * _TICK_S


def _machine() -> str:
    """The processor, how many of it, and the kernel."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return f"{cores()} cores of {names[0] if names else platform.machine()}, Linux {platform.release()}"
