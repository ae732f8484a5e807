"""`sandbox plan validate`: whether the simulation foretells what the real stack does on this machine.

A profile is measured, then the stack is loaded with five shares of what the machine can do. The same calls at the same
times go through the simulation, so chance in the arrivals is the same on both sides. Mean and 95th percentile of each
are put side by side.

A virtual machine has no speed of its own: on a quiet one the CPU of the same calls, a few a second, went from 8.5 ms to
6.1 and back within seconds. So the simulation is told one figure of a run, how much CPU its programs and their
forkservers took, over what they would have taken at the time of the profile; all its costs are taken times that. What
it foretold without stands beside it. Swings within a run it is not told of, and the fuller the machine, the more of the
waiting they make; so the loads go up to little more than half of what fits.

Others on the machine take what the simulation takes for ours. A run in which they used more than a little, or in which
the generator was late, is repeated a few times, and what others used in the one that counts stands beside its figures.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal

from loadtest.arrivals import poisson
from loadtest.calibrate import MIX, Patience, measure_crowd, measure_profile
from loadtest.openloop import Planned, Target
from loadtest.profile import Profile, at_speed, replay
from loadtest.stack import Stack, own_stack
from loadtest.targets import open_target
from loadtest.timing import percentile

#: How far a prediction may lie from what is measured.
TOLERANCE = 0.20
SHARES = (0.15, 0.25, 0.35, 0.45, 0.55)
_SECONDS = 4.0
_REPEATS = 6  # of all runs together
#: A slow machine is not slow alike: programs took 1.3 times the CPU, and the service's threads twice as much. So a
#: profile that was measured at another speed than most of the loads, either way, is measured anew, with all loads.
_SAME = 0.87, 1.2
_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Times:
    """Of all calls of a run."""

    mean_s: float
    p95_s: float


@dataclass(frozen=True, slots=True)
class Compared:
    """One load: what was foretold and what came."""

    share: float  # of what the machine can do
    rate: float
    seconds: float
    seed: int
    calls: int
    foretold: Times  # simulated, as fast as the machine was when its profile was measured
    slower: float  # times the CPU that programs took in the run, over what they would have then
    predicted: Times  # simulated, as fast as it was then
    measured: Times
    others_cores: float
    late_s: float  # of the generator, on average
    is_disturbed: bool

    @property
    def differences(self) -> tuple[float, float]:
        """Of mean and 95th percentile as predicted, as shares of what was measured."""
        return (
            self.predicted.mean_s / self.measured.mean_s - 1,
            self.predicted.p95_s / self.measured.p95_s - 1,
        )

    @property
    def is_within(self) -> bool:
        """Whether neither is further off than it may be."""
        return max(map(abs, self.differences)) <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Validation:
    """Everything that was compared, and the profile that it rests on."""

    workload: str
    profile: Profile  # measured
    loads: tuple[Compared, ...]
    attempt: int  # those before it met a machine that had changed
    answered_by: Literal["jail"] = "jail"

    @property
    def is_of_this_machine(self) -> bool:
        """Whether the profile is of a machine as fast as this one was under most of the loads."""
        return _SAME[0] <= median(load.slower for load in self.loads) <= _SAME[1]

    @property
    def is_within(self) -> bool:
        """Whether all are."""
        return all(load.is_within for load in self.loads)


def schedule(rate: float, seconds: float, seed: int) -> list[Planned]:
    """The calls of a load."""
    rng = random.Random(seed)
    return [
        Planned(at_s, kind)
        for at_s, kind in zip(poisson(rate, seconds, rng), MIX.draw(random.Random(seed)), strict=False)
    ]


def foretell(profile: Profile, planned: Sequence[Planned], slots: int = 0) -> tuple[Times, float]:
    """What the simulation says of these calls on the machine of the profile, and the CPU seconds of their programs."""
    simulated = replay(profile, [(plan.at_s, plan.kind.name) for plan in planned], slots)
    return _times(simulated.latency_s), simulated.program_cpu_s


def validate(say: Callable[[str], None], shares: Sequence[float] = SHARES) -> Validation:
    """Measure this machine, then compare. `say` hears of each step."""
    say("gateway and Redis in a crowd")
    crowd = measure_crowd()
    with own_stack() as stack:

        async def compare() -> Validation:
            async with open_target(stack.url, "v1") as target:
                for attempt in range(1, _ATTEMPTS + 1):
                    profile = await measure_profile(stack, target, crowd, say)
                    loads = await _compare_all(stack, target, profile, shares, say)
                    found = Validation(MIX.name, profile, loads, attempt)
                    if found.is_of_this_machine:
                        break
                    say("the machine's speed has changed since it was measured")
            return found

        return asyncio.run(compare())


async def _compare_all(
    stack: Stack, target: Target, profile: Profile, shares: Sequence[float], say: Callable[[str], None]
) -> tuple[Compared, ...]:
    patience = Patience(_REPEATS)
    loads = []
    for seed, share in enumerate(shares, start=1):
        rate = share * profile.calls_per_s
        planned = schedule(rate, _SECONDS, seed)
        say(f"{rate:.0f} calls a second, {share:.0%} of what the machine can do")
        foretold, program_cpu_s = foretell(profile, planned)
        seen = await patience.observe(stack, target, planned, say)
        slower = (seen.cpu_s["jail"] - profile.idle_jail_cores * seen.took_s) / program_cpu_s
        predicted, _ = foretell(at_speed(profile, slower), planned)
        loads.append(
            Compared(
                share=share,
                rate=rate,
                seconds=_SECONDS,
                seed=seed,
                calls=len(planned),
                foretold=foretold,
                slower=slower,
                predicted=predicted,
                measured=_times([call.latency_s for call in seen.sent]),
                others_cores=seen.others_cores,
                late_s=seen.late_s,
                is_disturbed=seen.is_disturbed,
            )
        )
    return tuple(loads)


def _times(latencies_s: Sequence[float]) -> Times:
    return Times(fmean(latencies_s), percentile(latencies_s, 0.95))
