"""A profile: what calls cost on one machine, as `calibrate.py` measured it, and the calls that a simulation takes."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from loadtest.simulate import Costs, Layout, Simulated, Work, simulate
from sandbox.calls import first_error
from sandbox.errors import ConfigError

#: The profile that is used when none is given; it says on which machine it was measured.
SHIPPED = Path(__file__).with_name("profile.json")


@dataclass(frozen=True, slots=True)
class KindCost:
    """One kind of program in its jail."""

    cpu_s: tuple[float, ...]  # its histogram, as ascending values that are equally likely
    beside_s: float = 0.0  # CPU of its forkserver and its init
    idle_s: float = 0.0  # in which it holds a slot and no core
    limit_s: float | None = None  # for a program without end: when it is ended

    def work(self, at_s: float, share: float) -> Work:
        """A call of it, with the service time below which this share of all lies."""
        if self.limit_s is not None:
            return Work(at_s, math.inf, limit_s=self.limit_s)
        cpu_s = self.cpu_s[min(int(share * len(self.cpu_s)), len(self.cpu_s) - 1)]
        return Work(at_s, cpu_s + self.beside_s, self.idle_s)


@dataclass(frozen=True, slots=True)
class Profile:
    """What calls cost on a machine."""

    machine: str
    cores: int
    day: str
    kinds: Mapping[str, KindCost]
    costs: Costs
    # Of the calibration's mix that its cores can do, if callers run on them too and nobody else.
    calls_per_s: float
    idle_jail_cores: float  # that forkservers use while nobody calls
    gateway_rss_bytes: int
    host_rss_bytes: int  # of worker and jails with every slot busy; pages that they share count for each
    others_cores: float  # that others used meanwhile

    @property
    def origin(self) -> str:
        """Where the figures come from, for a reader."""
        return f"{self.machine}, {self.day}, where others used {self.others_cores:.2f} cores"


def at_speed(profile: Profile, factor: float) -> Profile:
    """The profile of a machine on which everything takes so many times the CPU."""
    kinds = {
        name: replace(
            kind, cpu_s=tuple(cpu_s * factor for cpu_s in kind.cpu_s), beside_s=kind.beside_s * factor
        )
        for name, kind in profile.kinds.items()
    }
    costs = profile.costs
    return replace(
        profile,
        kinds=kinds,
        costs=replace(
            costs,
            caller=costs.caller.times(factor),
            gateway=costs.gateway.times(factor),
            redis=costs.redis.times(factor),
            worker=costs.worker.times(factor),
        ),
    )


def load_profile(path: Path) -> Profile:
    """Read a profile. Raises ConfigError for a file that is none."""
    try:
        return _PROFILE.validate_json(path.read_bytes())
    except OSError as exc:
        raise ConfigError(f"cannot read the profile {path}: {exc.strerror}") from exc
    except ValidationError as exc:
        raise ConfigError(
            f"{path} is no profile that `sandbox plan measure` wrote: {first_error(exc)}"
        ) from exc


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile for `load_profile`."""
    path.write_bytes(_PROFILE.dump_json(profile, indent=1) + b"\n")


_PROFILE = TypeAdapter(Profile)


def works(profile: Profile, sent: Sequence[tuple[float, str]], rng: random.Random) -> list[Work]:
    """What calls need, of which we know when each comes and its kind.

    The n calls of a kind get the middles of n equal parts of its histogram, in a random order: drawn one by one, a few
    hundred would differ by the luck of the draw.
    """
    shares: dict[str, list[float]] = {}
    for kind, count in Counter(kind for _, kind in sent).items():
        shares[kind] = [(n + 0.5) / count for n in range(count)]
        rng.shuffle(shares[kind])
    return [profile.kinds[kind].work(at_s, shares[kind].pop()) for at_s, kind in sent]


def replay(profile: Profile, sent: Sequence[tuple[float, str]], slots: int = 0) -> Simulated:
    """Simulate calls on the machine of the profile, with their callers on the same cores."""
    layout = Layout(1, profile.cores, slots=slots, one_machine=True)
    return simulate(works(profile, sent, random.Random(len(sent))), profile.costs, layout)
