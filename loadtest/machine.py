"""The machine that a figure was measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    """What a reader has to know before comparing figures of two machines."""

    cores: int  # that we may use
    cpu: str
    memory_bytes: int
    kernel: str
    python: str
    load_1min: float  # tasks that ran or wanted to in the minute before, ours not among them


def this_machine() -> Machine:
    """The one that we run on, now."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=platform.release(),
        python=platform.python_version(),
        load_1min=os.getloadavg()[0],
    )


def _cpu() -> str:
    """Its name where the kernel tells one, which it does not on every architecture."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
