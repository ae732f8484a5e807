"""What is sent: kinds of programs, and workloads that mix them.

A kind is a program of which we know what must come of it, so a service that is measured is also held to its answers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox import CallStatus, ConfigError, ToolCall, jsonl

_RUNAWAY_S = 2.0  # the wall limit of a runaway: all that it costs


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of program, and what must come of it."""

    name: str
    code: str
    stdout: str | None = ""  # None: not known
    status: CallStatus | None = CallStatus.OK  # None: not known, so that any verdict is right
    fields: Mapping[str, Any] = field(default_factory=dict)  # of the call, beside its code

    def call(self) -> ToolCall:
        """A new call of it, with an id of its own."""
        return ToolCall.model_validate({**self.fields, "code": self.code})


def _sleeper(ms: int) -> Kind:
    return Kind(f"sleep-{ms}", f"import time; time.sleep({ms / 1000}); print(1)", "1\n")


KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("print", "print(1)", "1\n"),
        Kind("numpy", "import numpy as np; print(round(np.linalg.det(np.eye(20) * 2)))", "1048576\n"),
        Kind(
            "sympy",
            "from sympy import *; x = symbols('x'); print(solve(x**2 - 2))",
            "[-sqrt(2), sqrt(2)]\n",
        ),
        _sleeper(20),
        _sleeper(100),
        _sleeper(300),
        Kind(
            "runaway",
            "while True: pass",
            status=CallStatus.TIMEOUT,
            fields={"limits": {"wall_s": _RUNAWAY_S}},
        ),
    )
}

#: By name: the share of each kind.
WORKLOADS: Mapping[str, Mapping[str, float]] = {
    "print": {"print": 1},
    "numpy": {"numpy": 1},
    "sympy": {"sympy": 1},
    "mixed": {"print": 0.6, "numpy": 0.25, "sympy": 0.1, "sleep-100": 0.05},
    "sleepers": {"sleep-20": 0.5, "sleep-100": 0.3, "sleep-300": 0.2},
    "runaways": {"print": 0.99, "runaway": 0.01},
}


def own_kind(name: str, call: ToolCall) -> Kind:
    """A kind of which nothing is known but the call. Its id is not kept: sent again, it would not run again."""
    fields = call.model_dump(exclude_unset=True, exclude={"id", "code"})
    return Kind(name, call.code, stdout=None, status=None, fields=fields)


@dataclass(frozen=True, slots=True)
class Workload:
    """A stream of kinds: drawn by their shares, or, without any, in their order and over again."""

    name: str
    kinds: Sequence[Kind]
    shares: Sequence[float] | None = None

    def draw(self, rng: random.Random) -> Iterator[Kind]:
        """Kinds without end; the same seed gives the same."""
        if self.shares is None:
            yield from itertools.cycle(self.kinds)
        while True:
            yield rng.choices(self.kinds, self.shares)[0]


def load_workload(name: str) -> Workload:
    """A workload of ours by its name, or else a file of calls, as `sandbox map` reads it.

    Raises ConfigError where there is neither, and InvalidCall with the number of a line that is no call.
    """
    if name in WORKLOADS:
        shares = WORKLOADS[name]
        return Workload(name, [KINDS[kind] for kind in shares], list(shares.values()))
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"{name!r} is no file, and none of the workloads {', '.join(WORKLOADS)}")
    calls = jsonl.read_calls(path, lenient=False)
    file = shown_name(path)
    kinds = [own_kind(f"{file}:{number}", call) for number, call in enumerate(calls, start=1)]
    if not kinds:
        raise ConfigError(f"{path} has no call in it")
    return Workload(file, kinds)


def shown_name(path: Path) -> str:
    """The name of a file as text that JSON and pages can hold, which the bytes of a name need not be."""
    return path.name.encode(errors="replace").decode()
