"""The resource group of one slot: what bounds the memory and the processes of a call, and counts its use.

Three hosts, one shape (`Group`): cgroup v1, cgroup v2, and a host that lets us use neither, where rlimits bound each
process and a watch over /proc stands in for the bound on all of them (`watched.py`). Groups are made once for
each slot and kept: making and removing them for every call costs ten times what entering them does.

A worker's groups stand in a folder of its own below the group that the worker was started in, so whatever bounds the
host put on the worker hold for its programs too. The worker holds a lock on that folder. A killed worker leaves the
folder without its lock, and the next one on the host sweeps it; a pid would not tell, for it says nothing in another
container, and is given out again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sandbox.calls import MIB, CallStatus

FOLDER = "roc-sandbox"


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """What a slot's group counted since `begin`."""

    cpu_s: float
    memory_peak_bytes: int
    oom_kills: int


class Group(Protocol):
    """Bounds and counts one call at a time."""

    #: Files a program enters the group by writing "0" into; empty where there is no group.
    enter_fds: tuple[int, ...]
    #: True when the group must be told the processes of a call (`watch`).
    needs_pids: bool

    def begin(self, memory_bytes: int, processes: int) -> None:
        """Set the bounds and zero the counts."""

    def exceeded(self, cpu_s: float) -> CallStatus | None:
        """Asked every tenth of a second while a program runs: the limit that the call as a whole has passed."""

    def end(self) -> GroupUsage:
        """The counts."""

    def is_empty(self) -> bool:
        """True when no process is in the group."""

    def close(self) -> None:
        """Remove the group."""


def _read(fd: int) -> bytes:
    return os.pread(fd, 4096, 0)


def _write(fd: int, value: int) -> None:
    os.pwrite(fd, b"%d" % value, 0)


def _open(path: Path, flags: int = os.O_RDWR) -> int:
    return os.open(path, flags | os.O_CLOEXEC)


def _field(content: bytes, name: bytes) -> int:
    """The number behind `name` in a file of 'name number' lines."""
    for line in content.split(b"\n"):
        key, _, value = line.partition(b" ")
        if key == name:
            return int(value)
    raise ValueError(f"no field {name.decode()} in a cgroup file")


class GroupV1:
    """A folder in each of the memory, pids and cpuacct hierarchies."""

    needs_pids = False

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders
        self._make()

    def _make(self) -> None:
        for folder in self._folders.values():
            folder.mkdir()
        memory, pids, cpuacct = (self._folders[name] for name in V1_CONTROLLERS)
        _put(memory / "memory.swappiness", "0")  # the bound is on memory alone, and swap would extend it
        # Of all protocols, whatever its name; v2 counts them as memory.
        sockets = memory / "memory.kmem.tcp.limit_in_bytes"
        if sockets.exists():
            _put(sockets, str(SOCKET_BYTES))
        self.enter_fds = tuple(_open(folder / "cgroup.procs") for folder in self._folders.values())
        self._limit = _open(memory / "memory.limit_in_bytes")
        self._peak = _open(memory / "memory.max_usage_in_bytes")
        self._used = _open(memory / "memory.usage_in_bytes", os.O_RDONLY)
        self._oom = _open(memory / "memory.oom_control", os.O_RDONLY)
        self._pids = _open(pids / "pids.max")
        self._alive = _open(pids / "pids.current", os.O_RDONLY)
        self._cpu = _open(cpuacct / "cpuacct.usage")
        self._bounds = (0, 0)
        self._ooms = 0
        self._residue = 0

    def begin(self, memory_bytes: int, processes: int) -> None:
        """Set the bounds and zero the counts."""
        if int(_read(self._used)) > RESIDUE_BYTES:
            self.close()
            self._make()
        if self._bounds != (memory_bytes, processes):
            _write(self._limit, memory_bytes)
            _write(self._pids, processes)
            self._bounds = (memory_bytes, processes)
        self._residue = int(_read(self._used))
        _write(self._peak, 0)
        _write(self._cpu, 0)
        self._ooms = _field(_read(self._oom), b"oom_kill")

    def exceeded(self, cpu_s: float) -> CallStatus | None:
        """v1 kills one victim and lets the rest live on, so its counter is watched as well."""
        if _field(_read(self._oom), b"oom_kill") != self._ooms:
            return CallStatus.MEMORY_LIMIT
        return CallStatus.TIMEOUT if self._cpu_s() >= cpu_s else None

    def _cpu_s(self) -> float:
        return int(_read(self._cpu)) / 1e9

    def end(self) -> GroupUsage:
        """The counts."""
        peak = max(0, int(_read(self._peak)) - self._residue)
        return GroupUsage(self._cpu_s(), peak, _field(_read(self._oom), b"oom_kill") - self._ooms)

    def is_empty(self) -> bool:
        """True when no process is left; the lists of processes would not tell, v1 caches them for a second."""
        return int(_read(self._alive)) == 0

    def close(self) -> None:
        """Remove the folders and close the files."""
        for folder in self._folders.values():
            folder.rmdir()
        counters = (self._limit, self._peak, self._used, self._oom, self._pids, self._alive, self._cpu)
        for fd in (*self.enter_fds, *counters):
            os.close(fd)


class GroupV2:
    """One folder in the unified hierarchy."""

    needs_pids = False

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._make()

    def _make(self) -> None:
        folder = self._folder
        folder.mkdir()
        _put(folder / "memory.oom.group", "1")  # one victim would leave the rest of a call alive
        swap = folder / "memory.swap.max"
        if swap.exists():
            _put(swap, "0")
        self._procs = _open(folder / "cgroup.procs")
        self.enter_fds: tuple[int, ...] = (self._procs,)
        self._limit = _open(folder / "memory.max")
        self._used = _open(folder / "memory.current", os.O_RDONLY)
        self._events = _open(folder / "memory.events", os.O_RDONLY)
        self._pids = _open(folder / "pids.max")
        self._cpu = _open(folder / "cpu.stat", os.O_RDONLY)
        self._bounds = (0, 0)
        self._peak, self._peak_resets = self._open_peak()
        self._peak_start = 0
        self._seen = 0
        self._cpu_start = 0
        self._ooms = 0
        self._residue = 0

    def begin(self, memory_bytes: int, processes: int) -> None:
        """Set the bounds and note where the counters stand."""
        if int(_read(self._used)) > RESIDUE_BYTES:
            self.close()
            self._make()
        if self._bounds != (memory_bytes, processes):
            _write(self._limit, memory_bytes)
            _write(self._pids, processes)
            self._bounds = (memory_bytes, processes)
        self._residue = int(_read(self._used))
        self._seen = 0
        self._begin_peak()
        self._cpu_start = _field(_read(self._cpu), b"usage_usec")
        self._ooms = _field(_read(self._events), b"oom_kill")

    def _open_peak(self) -> tuple[int | None, bool]:
        """From Linux 6.12 on a write resets the peak; before it only grows, and before 5.19 there is none."""
        path = self._folder / "memory.peak"
        if not path.exists():
            return None, False
        try:
            peak = _open(path)
        except PermissionError:
            return _open(path, os.O_RDONLY), False
        try:
            _write(peak, 0)
        except OSError:  # root may open what nobody may write
            return peak, False
        return peak, True

    def _begin_peak(self) -> None:
        if self._peak is not None:
            if self._peak_resets:
                _write(self._peak, 0)
            self._peak_start = 0 if self._peak_resets else int(_read(self._peak))

    def _peak_bytes(self) -> int:
        """The peak of this call; where it cannot be told from that of a larger one before, what was seen of it."""
        peak = int(_read(self._peak)) if self._peak is not None else 0
        return max(0, (peak if peak > self._peak_start else self._seen) - self._residue)

    def exceeded(self, cpu_s: float) -> CallStatus | None:
        """Memory is the kernel's to end; CPU time is ours."""
        self._seen = max(self._seen, int(_read(self._used)))
        return CallStatus.TIMEOUT if self._cpu_s() >= cpu_s else None

    def _cpu_s(self) -> float:
        return (_field(_read(self._cpu), b"usage_usec") - self._cpu_start) / 1e6

    def end(self) -> GroupUsage:
        """The counts."""
        ooms = _field(_read(self._events), b"oom_kill") - self._ooms
        return GroupUsage(self._cpu_s(), self._peak_bytes(), ooms)

    def is_empty(self) -> bool:
        """True when no process is in the group."""
        return not _read(self._procs)

    def close(self) -> None:
        """Remove the folder and close the files."""
        self._folder.rmdir()
        for fd in (self._procs, self._limit, self._used, self._events, self._pids, self._cpu):
            os.close(fd)
        if self._peak is not None:
            os.close(self._peak)


def _put(path: Path, value: str) -> None:
    path.write_text(value, encoding="ascii")


# ---- where groups can stand on this host ----


@dataclass(frozen=True, slots=True)
class Place:
    """Where this process may make groups: one parent folder for each v1 controller, or one for v2."""

    kind: str  # "v1", "v2" or "none"
    parents: dict[str, Path]
    reason: str = ""  # for "none": what stands in the way


V1_CONTROLLERS = ("memory", "pids", "cpuacct")
V2_CONTROLLERS = ("memory", "pids")
#: What an ended call may leave charged to its group: file pages, and names that the kernel keeps. A call that looks for
#: a million missing files leaves 100 MB, which the next call's limit would have to hold as well, and which takes the
#: kernel up to a second to give back. Then a new group takes the old one's place, a matter of a millisecond.
RESIDUE_BYTES = 2 * MIB
#: What sockets may hold on v1, which counts them apart from memory, and only if they have a bound.
SOCKET_BYTES = 16 * MIB
MOVES = 20  # rounds in which a group is emptied
PULSE_S = 0.005  # shorter than the wait that it saves
ANOTHER_PULSES_S = 1.0  # until we look whether that worker is gone


def find_place(proc: Path = Path("/proc")) -> Place:
    """Look at the mounts and at our own groups; v1 first, since a mixed host keeps its controllers there."""
    own = _own_folders(
        (proc / "self/mountinfo").read_text(encoding="utf-8"),
        (proc / "self/cgroup").read_text(encoding="utf-8"),
    )
    v1 = {name: own[name] for name in V1_CONTROLLERS if name in own}
    if len(v1) == len(V1_CONTROLLERS):
        # A share of the CPU for each call, whatever it starts; where it is mounted with cpuacct it comes with that.
        if (cpu := own.get("cpu")) is not None and cpu not in v1.values() and os.access(cpu, os.W_OK):
            v1["cpu"] = cpu
        blocked = [str(path) for path in v1.values() if not os.access(path, os.W_OK)]
        return Place("none", {}, f"no right to write {blocked[0]}") if blocked else Place("v1", v1)
    if "" not in own:
        return Place("none", {}, "no cgroup hierarchy with our own group is mounted")
    unified = own[""]
    if unified.name == f"{FOLDER}-main":  # a worker that started before us has moved us there
        unified = unified.parent
    offered = (unified / "cgroup.controllers").read_text(encoding="ascii").split()
    if lacking := [name for name in V2_CONTROLLERS if name not in offered]:
        return Place("none", {}, f"the controllers {' and '.join(lacking)} are not given to {unified}")
    if not os.access(unified / "cgroup.subtree_control", os.W_OK):
        return Place("none", {}, f"no right to write {unified}; a service needs Delegate=yes")
    return Place("v2", {"": unified})


def _own_folders(mountinfo: str, cgroup: str) -> dict[str, Path]:
    """The folder of our own group by controller; that in the unified hierarchy under the empty name.

    A mount may show only a part of its hierarchy (in a container: the container's), and our group's name is given
    from the top, so it must be cut to what the mount shows.
    """
    names: dict[str, str] = {}
    for line in cgroup.splitlines():
        _number, controllers, name = line.split(":", 2)
        names.update(dict.fromkeys(controllers.split(","), name))
    folders: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _source, options = after.split(" ", 2)
        if kind not in {"cgroup", "cgroup2"}:
            continue
        top, point = (part.replace("\\040", " ") for part in before.split(" ")[3:5])
        for controller in names.keys() & (options.split(",") if kind == "cgroup" else [""]):
            name = names[controller]
            if f"{name}/".startswith(f"{top.rstrip('/')}/"):
                folders.setdefault(controller, Path(point, name.removeprefix(top).lstrip("/")))
    return folders


class Groups:
    """The groups of one worker, in a folder of their own that `close` removes."""

    def __init__(self, place: Place) -> None:
        """Make the folder. Raises OSError where the host refuses after all."""
        self.kind = place.kind
        name_here = f"{FOLDER}-w{os.getpid()}-{secrets.token_hex(4)}"  # one process may have several
        self._folders = {name: path / name_here for name, path in place.parents.items()}
        self._locks: list[int] = []
        self._groups: list[Group] = []
        for parent, folder in zip(place.parents.values(), self._folders.values(), strict=True):
            with _locked(parent, wait=True):  # so that nobody sweeps a folder that is not locked yet
                _sweep(parent)
                if self.kind == "v2":
                    _delegate(parent)
                folder.mkdir()
                self._locks.append(_lock(folder))
        if self.kind == "v2":
            _put(self._folders[""] / "cgroup.subtree_control", _enable(self._folders[""]))
        leaf = f"{FOLDER}-main" if place.kind == "v2" else ""
        own = next(iter(place.parents.values())) / leaf
        # Free at the end; an Event would wake the pulse at a third more CPU time.
        self._end = threading.Lock()
        self._end.acquire()
        self._pulse = threading.Thread(target=self._keep_warm, args=(own,), name="cgroup-pulse", daemon=True)
        self._pulse.start()

    def _keep_warm(self, own: Path) -> None:
        """Keep the kernel ready for the next program to enter its group.

        The first process that enters a group after a quiet while waits for the kernel to warn every fork on the machine
        (an RCU grace period: 6 ms here, up to 20 elsewhere); others who come within that time do not wait. So we enter
        the group that we are in already, again and again, which changes nothing and takes 20 µs. That is for the whole
        machine, so of the workers of one group one does it, while it lives.
        """
        procs = _open(own / "cgroup.procs", os.O_WRONLY)
        try:
            pause_s = PULSE_S
            while not self._end.acquire(timeout=pause_s):
                try:
                    fcntl.flock(procs, fcntl.LOCK_EX | fcntl.LOCK_NB)  # again and again; it stays ours
                except BlockingIOError:
                    pause_s = ANOTHER_PULSES_S
                    continue
                pause_s = PULSE_S
                os.pwrite(procs, b"0", 0)
        finally:
            os.close(procs)

    def add(self, number: int) -> Group:
        """A new group for one slot."""
        folders = {name: folder / f"slot-{number}" for name, folder in self._folders.items()}
        group: Group = GroupV1(folders) if self.kind == "v1" else GroupV2(folders[""])
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Remove every group and the folder."""
        self._end.release()
        self._pulse.join()
        for group in self._groups:
            group.close()
        for folder in self._folders.values():
            folder.rmdir()
        for lock in self._locks:
            os.close(lock)


def _enable(group: Path) -> str:
    offered = (group / "cgroup.controllers").read_text(encoding="ascii").split()
    return " ".join(f"+{name}" for name in (*V2_CONTROLLERS, "cpu") if name in offered)


def _delegate(parent: Path) -> None:
    """v2 gives controllers to children only where the parent itself holds no process: all step down into a leaf.

    Those are we and who was started with us: the supervisor, gateways, other workers, a shell. For none of them does
    anything change: whatever bounds the parent has hold for the leaf as well.
    """
    leaf = parent / f"{FOLDER}-main"
    leaf.mkdir(exist_ok=True)
    for _ in range(MOVES):  # a process that was just forked is found in the next round
        for pid in (parent / "cgroup.procs").read_text(encoding="ascii").split():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                _put(leaf / "cgroup.procs", pid)
        try:
            _put(parent / "cgroup.subtree_control", _enable(parent))
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
        else:
            return
    raise OSError(errno.EBUSY, "there are always new processes", str(parent))


def _lock(folder: Path, *, wait: bool = False) -> int:
    """A descriptor that holds the lock on a folder. Raises BlockingIOError when another holds it."""
    fd = _open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    fd = _lock(folder, wait=wait)
    try:
        yield
    finally:
        os.close(fd)


def _sweep(parent: Path) -> None:
    """Remove the folders of workers that were killed, once their programs are gone."""
    for folder in parent.glob(f"{FOLDER}-w*"):
        # Busy: its worker lives, or its programs are just dying and the next sweep gets it.
        with contextlib.suppress(OSError), _locked(folder):
            for group in folder.glob("slot-*"):
                _sweep(group)  # of workers that were started in there
                group.rmdir()
            folder.rmdir()
