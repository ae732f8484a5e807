"""What /proc tells of processes: who lives, who started whom, what a process was started as."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

#: Between two looks at what nobody tells us of.
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Process:
    """One life of a process. Its number alone would not do, for numbers are given out again."""

    pid: int
    parent: int
    session: int
    started: int
    command: str

    @property
    def lives(self) -> bool:
        """Whether it is still there. A zombie is not: it waits for a parent that need not be ours."""
        now = _look(self.pid)
        return now is not None and now.started == self.started


def alive() -> list[Process]:
    """Every process that lives now."""
    looks = (_look(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdecimal())
    return [process for process in looks if process is not None]


def family(pid: int, among: list[Process] | None = None) -> list[Process]:
    """What this process has started, and what those have started, the nearest first."""
    among = alive() if among is None else among
    found = [process for process in among if process.parent == pid]
    for process in found:  # grows while we look
        found += [child for child in among if child.parent == process.pid]
    return found


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """SIGSTOP, and SIGCONT at the end of the block if it still lives."""
    [process] = [process for process in alive() if process.pid == pid]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        if process.lives:
            os.kill(pid, signal.SIGCONT)


def until(true: Callable[[], object], what: str, patience_s: float = 45.0) -> None:
    """Return when something holds that nobody tells us of; fail when it does not in a long time."""
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, f"not within {patience_s:.0f} s: {what}"
        time.sleep(LOOK_S)


def _look(pid: int) -> Process | None:
    """The process, if it is there and no zombie. Each file can vanish while we read the other."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, _, session, *rest = stat.rpartition(")")[2].split()
    if state in {"Z", "X"}:
        return None
    words = os.fsdecode(command.replace(b"\0", b" ")).strip()
    return Process(pid, int(parent), int(session), int(rest[15]), words)
