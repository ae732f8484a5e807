"""`sandbox plan validate`: whether the simulation foretells what the real stack does on this machine.

A profile is measured, then the stack is loaded with five shares of what the machine can do. The same calls at the same
times go through the simulation, which knows no figure of these runs, so chance in the arrivals is the same on both
sides. Mean and 95th percentile of each are put side by side.

Others on the machine take what the simulation takes for ours. A run in which they used more than a little, or in which
the generator was late, is repeated a few times, and what others used in the one that counts stands beside its figures.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from loadtest.arrivals import poisson
from loadtest.calibrate import MIX, Patience, measure_crowd, measure_profile
from loadtest.openloop import Planned
from loadtest.profile import Profile, replay
from loadtest.stack import own_stack
from loadtest.targets import open_target
from loadtest.timing import percentile

#: How far a prediction may lie from what is measured.
TOLERANCE = 0.20
SHARES = (0.15, 0.3, 0.45, 0.6, 0.7)
_SECONDS = 4.0
_REPEATS = 6  # of all runs together


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
    predicted: Times  # simulated
    measured: Times
    others_cores: float
    late_s: float  # of the generator, on average
    is_disturbed: bool

    @property
    def differences(self) -> tuple[float, float]:
        """Of mean and 95th percentile, as shares of what was measured."""
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
    answered_by: Literal["jail"] = "jail"

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


def foretell(profile: Profile, planned: Sequence[Planned], slots: int = 0) -> Times:
    """What the simulation says of these calls on the machine of the profile."""
    return _times(replay(profile, [(plan.at_s, plan.kind.name) for plan in planned], slots).latency_s)


def validate(say: Callable[[str], None], shares: Sequence[float] = SHARES) -> Validation:
    """Measure this machine, then compare. `say` hears of each step."""
    say("gateway and Redis in a crowd")
    crowd = measure_crowd()
    with own_stack() as stack:

        async def compare() -> Validation:
            patience = Patience(_REPEATS)
            loads = []
            async with open_target(stack.url, "v1") as target:
                profile = await measure_profile(stack, target, crowd, say)
                for seed, share in enumerate(shares, start=1):
                    rate = share * profile.calls_per_s
                    planned = schedule(rate, _SECONDS, seed)
                    say(f"{rate:.0f} calls a second, {share:.0%} of what the machine can do")
                    predicted = foretell(profile, planned)
                    seen = await patience.observe(stack, target, planned, say)
                    loads.append(
                        Compared(
                            share=share,
                            rate=rate,
                            seconds=_SECONDS,
                            seed=seed,
                            calls=len(planned),
                            predicted=predicted,
                            measured=_times([call.latency_s for call in seen.sent]),
                            others_cores=seen.others_cores,
                            late_s=seen.late_s,
                            is_disturbed=seen.is_disturbed,
                        )
                    )
            return Validation(MIX.name, profile, tuple(loads))

        return asyncio.run(compare())


def _times(latencies_s: Sequence[float]) -> Times:
    return Times(fmean(latencies_s), percentile(latencies_s, 0.95))
