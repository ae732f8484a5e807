"""The stand-in for a cgroup on a host that gives none: a look at /proc every tenth of a second.

Every process of a call descends from its init or from its program (orphans go to the init), so those two pids are all
one needs to know. What a look cannot see is what a program takes and gives back between two looks, and up to a tenth of
a second's allocation passes the bound before the call is ended; RLIMIT_DATA at twice the limit is the backstop for one
process. `sandbox doctor` and the worker's start say that a host is in this mode.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.calls import CallStatus
from sandbox.jail.cgroups import GroupUsage

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


class Watched:
    """Bounds one call at a time by looking at its processes."""

    enter_fds: tuple[int, ...] = ()
    needs_pids = True

    def __init__(self) -> None:
        self._roots: list[int] = []
        self._memory_bytes = 0
        self._peak = 0
        self._warm_bytes = 0

    def begin(self, memory_bytes: int, processes: int) -> None:  # noqa: ARG002 - the shape of a Group
        """Set the bound on memory. RLIMIT_NPROC is the one on processes."""
        self._memory_bytes = memory_bytes
        self._roots, self._peak = [], 0

    def watch(self, pid: int, warm_bytes: int) -> None:
        """One of the two processes that all others descend from, and what a fork of the warm interpreter shares."""
        self._roots.append(pid)
        self._warm_bytes = warm_bytes

    def exceeded(self, cpu_s: float) -> CallStatus | None:
        """The limit that the call as a whole has passed."""
        pids = self._descendants()
        used = sum(max(0, anonymous_bytes(pid) - self._warm_bytes) for pid in pids)
        self._peak = max(self._peak, used)
        if used > self._memory_bytes:
            return CallStatus.MEMORY_LIMIT
        return CallStatus.TIMEOUT if sum(_cpu_s(pid) for pid in pids) >= cpu_s else None

    def _descendants(self) -> list[int]:
        found, todo = [], list(self._roots)
        while todo:
            pid = todo.pop()
            found.append(pid)
            for task in _tasks(pid):
                todo += map(int, _read(f"{task}/children").split())
        return found

    def end(self) -> GroupUsage:
        """What was seen; the CPU time of an ended call comes from its exit."""
        return GroupUsage(0.0, self._peak, 0)

    def is_empty(self) -> bool:
        """The pid namespace ended with the call, so nothing is left."""
        return True

    def close(self) -> None:
        """There is nothing to remove."""


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []  # it ended while we looked


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(65536)
    except (FileNotFoundError, ProcessLookupError):
        return b""


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is not pages of files: resident minus shared, plus nothing of a dead one."""
    fields = _read(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE if fields else 0


def _cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS if fields else 0.0
