"""What the processes of a service use, by the part of it that they are, read from /proc."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loadtest.held import descendants

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")

#: Words of a command line that tell the part; the first that fits.
_PARTS = {
    "-m gateway": "gateway",
    "-m worker": "worker",
    "-m loadtest.standin work": "stand-in",
    "redis-server": "redis",
    "valkey": "redis",
}


@dataclass(slots=True)
class Use:
    """What all processes of one part have used since they started."""

    processes: int = 0
    cpu_s: float = 0.0  # also of children that have ended and were waited for; a worker's are jails
    rss_bytes: int = 0


def used_by(supervisor: int) -> dict[str, Use]:
    """By part, for everything below a supervisor: `gateway`, `worker`, `redis`, `jail` and `stand-in`.

    What a worker starts is `jail`, with the programs: the init of each is waited for by its forkserver, so that a
    difference of two readings has the CPU time of all calls between them, to a hundredth of a second.
    """
    parts: defaultdict[str, Use] = defaultdict(Use)
    for child in _children(supervisor):
        part = _part(child)
        if part is not None:
            # A jail that was replaced meanwhile would else be its worker's, with all of its life.
            _add(parts[part], child, parts["jail"] if part == "worker" else parts[part])
            for pid in descendants(child):
                _add(parts["jail"], pid, parts["jail"])
    return dict(parts)


def processes_of(supervisor: int, part: str) -> list[int]:
    """The processes of one part that a supervisor has started, without what these have started."""
    return [child for child in _children(supervisor) if _part(child) == part]


def rss_bytes(pid: int) -> int:
    """Resident memory of one process, shared pages included; 0 when it has ended."""
    use = Use()
    _add(use, pid, use)
    return use.rss_bytes


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def _part(pid: int) -> str | None:
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return next((part for words, part in _PARTS.items() if words in command), None)
    return None


def _add(use: Use, pid: int, of_ended: Use) -> None:
    """Count a process, and to `of_ended` what its children used that have ended."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        # After the name, which is in brackets and may hold anything: state is field 3 of proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        use.processes += 1
        use.cpu_s += sum(map(int, fields[11:13])) * _TICK_S  # utime, stime
        of_ended.cpu_s += sum(map(int, fields[13:15])) * _TICK_S  # cutime, cstime
        use.rss_bytes += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
