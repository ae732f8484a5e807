"""What chaos does and what it sends, both from a seed alone: the same seed is the same plan on every machine.

A fault goes to one kind of process. Which one of them is chosen by a share of their list, so that the plan needs to
know neither how many there will be nor their numbers.

What is not done: a program itself is not killed, for that looks like an end of its own making and would be a verdict.
Its init may be, and whatever stands above that; then the call is run again. Parts of a jail are frozen for less than
what the limits of calls leave them, for a program that stands still uses up its time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox import CallStatus

from .callers import Way
from .oracle import Call

#: From the first call to the first fault, and from the last fault to the last call.
QUIET_S = 3.0
#: Between two faults. Some of them last longer, and meet the next one.
GAP_S = (1.5, 4.5)

#: Requests a second, by the way that they go, and how many calls a batch has.
RATES: Mapping[Way, float] = {"run": 12.0, "batch": 1.2, "job": 2.0}
BATCH = (2, 16)


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to one kind of process."""

    target: str  # gateway, worker, nsjail, forkserver, init or redis
    signal: str  # KILL, TERM, or STOP with CONT after a while
    least_s: float = 0.0
    most_s: float = 0.0


#: By name, which is the word in the report. A worker's lease is 2.5 s.
FAULTS: Mapping[str, Fault] = {
    "gateway-kill": Fault("gateway", "KILL"),
    "gateway-term": Fault("gateway", "TERM"),
    "gateway-freeze": Fault("gateway", "STOP", 0.2, 7.0),
    "worker-kill": Fault("worker", "KILL"),
    "worker-term": Fault("worker", "TERM"),
    "worker-freeze": Fault("worker", "STOP", 0.2, 7.0),
    "nsjail-kill": Fault("nsjail", "KILL"),
    "nsjail-term": Fault("nsjail", "TERM"),
    "nsjail-freeze": Fault("nsjail", "STOP", 0.2, 1.5),
    "forkserver-kill": Fault("forkserver", "KILL"),
    "forkserver-freeze": Fault("forkserver", "STOP", 0.2, 1.5),
    "init-kill": Fault("init", "KILL"),
    "init-freeze": Fault("init", "STOP", 0.2, 1.5),
    "redis-kill": Fault("redis", "KILL"),
    "redis-term": Fault("redis", "TERM"),
    "redis-freeze": Fault("redis", "STOP", 0.2, 7.0),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One fault, when it comes, and to whom."""

    at_s: float
    fault: str
    share: float  # of the list of those that it could befall
    lasts_s: float  # 0 for what is done in a moment

    def __str__(self) -> str:
        lasts = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.1f} s  {self.fault}{lasts}"


@dataclass(frozen=True, slots=True)
class Request:
    """Calls that are sent together at one moment, whatever has become of those before."""

    at_s: float
    calls: tuple[Call, ...]
    way: Way
    leave_after_s: float | None = None  # the caller goes then
    asks_again: bool = False  # and gets the same answer


def faults(seed: int, seconds: float) -> list[Step]:
    """The faults of a run of this length. Each kind comes once before any comes again."""
    draw = random.Random(f"faults {seed}")
    steps: list[Step] = []
    bag: list[str] = []
    at_s = QUIET_S
    while at_s < seconds - QUIET_S:
        if not bag:
            bag = sorted(FAULTS)
            draw.shuffle(bag)
        name = bag.pop()
        lasts_s = draw.uniform(FAULTS[name].least_s, FAULTS[name].most_s)
        steps.append(Step(at_s, name, draw.random(), lasts_s))
        at_s += draw.uniform(*GAP_S)
    return steps


def requests(seed: int, seconds: float) -> list[Request]:
    """All that is sent in a run of this length, in order of time."""
    draw = random.Random(f"requests {seed}")
    sent: list[Request] = []
    for way, rate in RATES.items():
        at_s = draw.expovariate(rate)
        while at_s < seconds:
            count = draw.randint(*BATCH) if way == "batch" else 1
            deadline_s, is_told_beside = draw.choice((5.0, 12.0, 20.0)), draw.random() < 0.2
            name = f"{seed}-{way}-{len(sent)}"
            calls = tuple(_call(draw, f"{name}-{n}", deadline_s, is_told_beside) for n in range(count))
            leaves, asks_again = draw.random() < 0.03, draw.random() < 0.05
            leave_after_s = draw.uniform(0.0, 1.0) if leaves else None
            sent.append(Request(at_s, calls, way, leave_after_s, asks_again and not leaves))
            at_s += draw.expovariate(rate)
    return sorted(sent, key=lambda request: request.at_s)


def _call(draw: random.Random, id_: str, deadline_s: float, is_told_beside: bool) -> Call:
    ends = (CallStatus.OK, CallStatus.ERROR, CallStatus.TIMEOUT, CallStatus.MEMORY_LIMIT)
    [end] = draw.choices(ends, (80, 14, 3, 3))
    [imports] = draw.choices(("", "import numpy", "import sympy"), (88, 10, 2))
    seconds = round(min(2.0, draw.expovariate(5.0)), 3)
    fields: dict[str, Any] = {"priority": draw.choice(("tool", "tool", "judge"))}
    if is_told_beside:
        return Call(id_, end, seconds, imports, fields, header_s=deadline_s)
    return Call(id_, end, seconds, imports, fields | {"deadline_s": deadline_s})
