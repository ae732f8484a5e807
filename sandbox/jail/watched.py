"""The stand-in for a cgroup on a host that gives none: a look at /proc every tenth of a second.

Every process of a call descends from its init or from its program (orphans go to the init), so those two pids are all
one needs to know. A page that several processes share counts once, in shares (the kernel's Pss), and what a fork shares
with the forkserver is taken off once for the whole call, so a call can hide at most that much.

What a look cannot see: what a program takes and gives back between two looks; files in its scratch folders, which have
a size of their own; CPU time of children that a program lets the kernel reap. And up to a tenth of a second's
allocation passes the bound before the call is ended; RLIMIT_DATA at twice the limit, and 8 MiB for each process
allowed, is the backstop for one process. `sandbox doctor` and the worker's start say that a host is in this mode.
"""

from __future__ import annotations

import os
from pathlib import Path

from sandbox.calls import CallStatus
from sandbox.jail.cgroups import GroupUsage

_TICKS = os.sysconf("SC_CLK_TCK")
_FEW = 4  # processes that are always measured exactly, which takes 0.4 to 2 ms each


class Watched:
    """Bounds one call at a time by looking at its processes."""

    enter_fds: tuple[int, ...] = ()
    needs_pids = True

    def __init__(self) -> None:
        self._roots: list[int] = []
        self._memory_bytes = 0
        self._peak = 0
        self._cpu_s = 0.0
        self._warm_bytes = 0

    def begin(self, memory_bytes: int, processes: int) -> None:  # noqa: ARG002 - the shape of a Group
        """Set the bound on memory. RLIMIT_NPROC is the one on processes."""
        self._memory_bytes = memory_bytes
        self._roots, self._peak, self._cpu_s = [], 0, 0.0

    def watch(self, pid: int, warm_bytes: int) -> None:
        """One of the two processes that all others descend from, and what a fork of the warm interpreter shares."""
        self._roots.append(pid)
        self._warm_bytes = warm_bytes

    def exceeded(self, cpu_s: float) -> CallStatus | None:
        """The limit that the call as a whole has passed."""
        pids = self._descendants()
        used = sum(
            _field_bytes(pid, "status", b"RssAnon", b"RssShmem") for pid in pids
        )  # shared pages many times
        if used > self._memory_bytes or len(pids) <= _FEW:
            used = self._exact(pids)
        self._peak = max(self._peak, used)
        if used > self._memory_bytes:
            return CallStatus.MEMORY_LIMIT
        self._cpu_s = max(self._cpu_s, sum(_cpu_s(pid) for pid in pids))
        return CallStatus.TIMEOUT if self._cpu_s >= cpu_s else None

    def _exact(self, pids: list[int]) -> int:
        try:
            shares = sum(_field_bytes(pid, "smaps_rollup", b"Pss_Anon", b"Pss_Shmem") for pid in pids)
        except PermissionError:
            # Without namespaces it takes SYS_PTRACE to see shares. Then what processes share counts for each of them.
            whole = (_field_bytes(pid, "status", b"RssAnon", b"RssShmem") for pid in pids)
            return sum(max(0, each - self._warm_bytes) for each in whole)
        return max(0, shares - self._warm_bytes)

    def _descendants(self) -> list[int]:
        found, todo = [], list(self._roots)
        while todo:
            pid = todo.pop()
            found.append(pid)
            todo += children_of(pid)
        return found

    def end(self) -> GroupUsage:
        """What was seen; of a program that waited for its children, its exit tells the CPU time better."""
        return GroupUsage(self._cpu_s, self._peak, 0)

    def is_empty(self) -> bool:
        """The pid namespace ended with the call, so nothing is left."""
        return True

    def close(self) -> None:
        """There is nothing to remove."""


def children_of(pid: int) -> list[int]:
    """Those that a process has now, of all its threads; none of a dead one."""
    return [int(child) for task in _tasks(pid) for child in _read(f"{task}/children").split()]


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


def tasks_of(uid: int) -> int:
    """How many tasks the kernel counts for a user."""
    states = (_read(f"{process}/status") for process in Path("/proc").iterdir() if process.name.isdigit())
    fields = (
        dict(line.split(b":\t", 1) for line in state.split(b"\n") if b":\t" in line) for state in states
    )
    return sum(int(each[b"Threads"]) for each in fields if each and int(each[b"Uid"].split()[0]) == uid)


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is not pages of files; 0 for a dead one."""
    return _field_bytes(pid, "status", b"RssAnon")


def sockets_of(pid: int) -> int:
    """TCP and UDP sockets in the net namespace of a process, also those that nobody accepted, or that wait to end."""
    text = _read(f"/proc/{pid}/net/sockstat") + _read(f"/proc/{pid}/net/sockstat6")
    lines = [line.split() for line in text.splitlines()]  # a protocol, then names and numbers by turns
    fields = [dict(zip(line[1::2], map(int, line[2::2]), strict=True)) for line in lines]
    return sum(each.get(b"inuse", 0) + each.get(b"tw", 0) for each in fields)


def _field_bytes(pid: int, file: str, *names: bytes) -> int:
    """The sum of fields of a file with 'name: number kB' lines; 0 for a dead process."""
    lines = (line.partition(b":") for line in _read(f"/proc/{pid}/{file}").split(b"\n"))
    return sum(int(value.split()[0]) * 1024 for name, _, value in lines if name in names)


def _cpu_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS if fields else 0.0
