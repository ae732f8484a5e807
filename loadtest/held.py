"""What a worker in this process and the jails below it hold, counted so that a leak is a difference.

Everything is read from /proc and, for the slots' groups, through the descriptors that the worker itself has on them, so
that nothing of another worker on the host is counted.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: What may grow without being a leak, and by how much; everything else must be as before.
GROWTH = {
    "memory of the worker, KiB": 12 * 1024,  # Python keeps what the first large outputs took
    "memory of the jails, KiB": 16 * 1024,  # a heap has huge pages where the kernel finds room for them
}

#: Net namespaces that a jail may have made ahead of need, beside one for each slot.
_AHEAD = 8


@dataclass(frozen=True, slots=True)
class Held:
    """One thing that is counted, before and after."""

    what: str
    before: int
    after: int

    @property
    def is_leak(self) -> bool:
        """True when there is more than may be, or less of what must be the same."""
        if self.what in GROWTH:
            return self.after > self.before + GROWTH[self.what]
        return self.after != self.before

    @property
    def allowed(self) -> str:
        """What `after` may be, for a reader."""
        return f"up to {self.before + GROWTH[self.what]}" if self.what in GROWTH else "the same"


def compare(before: dict[str, int], after: dict[str, int]) -> list[Held]:
    """All counts side by side."""
    return [Held(what, count, after[what]) for what, count in before.items()]


def descendants(pid: int) -> list[int]:
    """All processes below one, by the host's numbers."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text(encoding="ascii").split()):
                found += [child, *descendants(child)]
    return found


def count_held(slots: int, first_uid: int | None) -> dict[str, int]:
    """Everything that is held now. Each slot's programs have a user from `first_uid` on, or, if None, run as we do."""
    jails = descendants(os.getpid())
    opened = [_links(pid) for pid in jails]
    namespaces = [sum(link.startswith("net:") for link in links) for links in opened]
    groups = _groups()
    return {
        "descriptors of the worker": len(_links(os.getpid())),
        "descriptors of the jails": sum(map(len, opened)) - sum(namespaces),
        "net namespaces too many": sum(max(0, number - slots - _AHEAD) for number in namespaces),
        "processes below the worker": len(jails),
        "groups": len(groups),
        "processes in groups": sum(len((group / "cgroup.procs").read_text().split()) for group in groups),
        "mounts of the worker": _lines("self/mountinfo"),
        "mounts of the host": _lines(f"{os.getppid()}/mountinfo"),
        "files of programs on the host": _files_of_programs(slots, first_uid),
        "memory of the worker, KiB": _anonymous_kib(os.getpid()),
        "memory of the jails, KiB": sum(map(_anonymous_kib, jails)),
    }


def _links(pid: int) -> list[str]:
    """What each open descriptor of a process leads to."""
    found = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
        for fd in list(Path(f"/proc/{pid}/fd").iterdir()):
            with suppress(FileNotFoundError):  # the one that listed the folder
                found.append(str(fd.readlink()))
    return found


def _groups() -> list[Path]:
    """The folder of each group that this process has made, in every hierarchy; it holds a lock on those above them."""
    opened = map(Path, _links(os.getpid()))
    tops = {path for path in opened if path.name.startswith(f"roc-sandbox-w{os.getpid()}-")}
    return [folder for top in tops for folder in (top, *top.glob("*/"))]


def _lines(file: str) -> int:
    return Path("/proc", file).read_bytes().count(b"\n")


def _files_of_programs(slots: int, first_uid: int | None) -> int:
    """What lies in the host's folders for everybody and belongs to a program's user; none has a place there."""
    if first_uid is None:
        return 0  # nothing tells them from our own, which come and go
    folders = [Path(tempfile.gettempdir()), Path("/dev/shm")]  # noqa: S108 - looked at only
    found = 0
    for path in [path for folder in folders for path in folder.iterdir()]:
        with suppress(FileNotFoundError):  # somebody else's, just removed
            found += first_uid <= path.lstat().st_uid < first_uid + slots
    return found


def _anonymous_kib(pid: int) -> int:
    """Resident memory that is no page of a file."""
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    return 0
