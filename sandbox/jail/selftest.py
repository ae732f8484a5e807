"""The self-test of a worker's start: programs that push at each wall, before a stranger's does.

Kernels and hosts differ, and a wall that silently is not there is the commonest failure of a sandbox. One program tries
most walls and prints one line for each; the limits take a call each, since they end the program. What does not hold,
though the level claims it, refuses the start. SECURITY.md has the same list as a table, and a test compares them.
"""

from __future__ import annotations

import contextlib
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from sandbox.calls import MIB, CallStatus, Limits, ToolCall
from sandbox.errors import JailError, SandboxError
from sandbox.jail.host import Slot, Slots, prepare
from sandbox.jail.hostcheck import Check
from sandbox.jail.jail import Jail
from sandbox.jail.preload import PRELOADS
from sandbox.settings import JailSettings, Level

_ALL: tuple[Level, ...] = get_args(Level)
_NAMESPACES: tuple[Level, ...] = ("namespaces", "strict")


@dataclass(frozen=True, slots=True)
class Wall:
    """Something that a program must not be able to do."""

    name: str
    levels: tuple[Level, ...]  # that claim it
    look_at: str  # when it is missing


WALLS = (
    Wall("own user", _ALL, "the users given to the slots"),
    Wall("own user namespace", ("strict",), "the limit /proc/sys/user/max_user_namespaces"),
    Wall("no capabilities", _ALL, "the capability steps of fork.c"),
    Wall("no new privileges", _ALL, "the kernel"),
    Wall("not dumpable", _ALL, "the kernel"),
    Wall("system call filter", _ALL, "CONFIG_SECCOMP_FILTER in the kernel"),
    Wall("kernel channels", _ALL, "policy.seccomp"),
    Wall("no network", _ALL, "policy.seccomp, and the net namespace"),
    Wall("own namespaces", _NAMESPACES, "nsjail's namespaces, and those of fork.c"),
    Wall("own processes only", _NAMESPACES, "the pid namespace and its /proc"),
    Wall("files of the host", _ALL, "the root of nsjail; at level `process` Landlock"),
    Wall("read-only root", _ALL, "the root of nsjail; at level `process` Landlock"),
    Wall("bounded scratch", _NAMESPACES, "the tmpfs mount on /tmp"),
    Wall("no descriptors", _ALL, "close_range in the kernel"),
    Wall("bounded processes", _ALL, "the pids controller, or RLIMIT_NPROC"),
    Wall("bounded memory", _ALL, "the memory controller; without one, /proc of the worker"),
    Wall("bounded output", _ALL, "the worker's own reading"),
    Wall("bounded time", _ALL, "the worker's own clock"),
    Wall("nothing stays", _ALL, "the init of each call, and KILL"),
)

_PROGRAM = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)

def refused(action):
    try:
        action()
    except OSError:
        return True
    return False

def listed(action):
    \"\"\"What it lists; nothing where that is refused.\"\"\"
    try:
        return list(action())
    except OSError:
        return []

def denied(number, *arguments):
    ctypes.set_errno(0)
    return libc.syscall(number, *arguments) == -1 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS)

def children():
    \"\"\"How many can be had, one after the other and all at once.\"\"\"
    reader, writer = os.pipe()
    started = []
    while len(started) <= MOST_PROCESSES:
        try:
            pid = os.fork()
        except OSError:
            break
        if pid == 0:
            os.close(writer)
            os.read(reader, 1)
            os._exit(0)
        started.append(pid)
    os.close(writer)
    for pid in started:
        os.waitpid(pid, 0)
    return len(started)

namespaces = {name: os.readlink("/proc/self/ns/" + name) for name in HOST_NAMESPACES}
user_map = " ".join(listed(lambda: open("/proc/self/uid_map"))).split()
# Not from /proc/self/status, which is not there for all: capget, then the bounding and the ambient set, bit by bit.
sets = (ctypes.c_uint32 * 6)(*[1] * 6)
libc.capget((ctypes.c_uint32 * 2)(0x20080522, 0), sets)
numbers = [*sets] + [libc.prctl(23, n, 0, 0, 0) == 1 for n in range(64) if HAS_BOUNDING_SET]
numbers += [libc.prctl(47, 1, n, 0, 0) == 1 for n in range(64)]
keyctl, io_uring_setup, bpf, perf_event_open, userfaultfd, unshare = NUMBERS
scratch, shared = os.statvfs("."), os.statvfs("/dev/shm")
held = {
    "own user": os.getresuid() == (UID,) * 3 and (os.getgroups() == [] or not DROPS_GROUPS),
    "own user namespace": user_map == [str(UID), str(UID), "1"] and namespaces["user"] != HOST_NAMESPACES["user"],
    "no capabilities": not any(numbers),
    "no new privileges": libc.prctl(39, 0, 0, 0, 0) == 1,
    "not dumpable": libc.prctl(3) == 0,
    "system call filter": libc.prctl(21) == 2 and libc.personality(0xFFFFFFFF) == -1,
    "kernel channels": denied(keyctl, 0, -3, 0) and denied(io_uring_setup, 1, None) and denied(bpf, 0, None, 0)
        and denied(perf_event_open, None, 0, -1, -1, 0) and denied(userfaultfd, 0) and denied(unshare, 0x10000000),
    "no network": all(refused(lambda: socket.socket(*kind)) for kind in ((1, 1), (2, 1), (10, 2), (16, 3), (40, 1))),
    "own namespaces": all(namespaces[name] != HOST_NAMESPACES[name] for name in namespaces),
    "own processes only": os.getpid() == 2
        and {p for p in listed(lambda: os.listdir("/proc")) if p.isdigit()} <= {"1", "2"},
    "files of the host": refused(lambda: open(HOST_FILE)) and refused(lambda: os.listdir("/root"))
        and refused(lambda: open("/etc/shadow")),
    "read-only root": all(refused(lambda: open(folder + "/probe", "w")) for folder in READ_ONLY),
    "bounded scratch": scratch.f_blocks * scratch.f_frsize == SIZE and scratch.f_files == INODES
        and os.listdir(".") == ["main.py"] and shared.f_files < 1000,
    "no descriptors": all(refused(lambda: os.fstat(fd)) for fd in range(3, 1024)),
    "bounded processes": children() < MOST_PROCESSES,
}
for wall, holds in held.items():
    if holds:
        print(wall)
"""

_PROCESSES = 8
# It stays until it is ended: where /proc is all there is to watch it by, it may take its memory between two looks.
_HOG = "import time\nheld = bytearray(256 << 20)\ntime.sleep(60)"
_FLOOD = "import os\nwhile True: os.write(1, b'x' * 4096)"
_SLEEP = "import time\ntime.sleep(60)"
# One goes to the background in a session of its own, and holds the output open; the call ends without it.
_DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)"

#: keyctl, io_uring_setup, bpf, perf_event_open, userfaultfd, unshare
_NUMBERS = {"x86_64": (250, 425, 321, 298, 323, 272), "aarch64": (219, 425, 280, 241, 282, 97)}


async def walls_that_hold(jail: Jail, slot: Slot) -> set[str]:
    """Try every wall, also those that the level does not claim, and name those that hold.

    Raises JailError when the program that tries them did not come to its end.
    """
    result = await jail.run(_call(_header(jail, slot) + _PROGRAM, processes=_PROCESSES), slot)
    if result.status != CallStatus.OK:
        raise JailError(f"the self-test of the jail ended as {result.status}: {result.stderr[-500:]}")
    standing = set(result.stdout.splitlines())
    ends: dict[str, tuple[ToolCall, CallStatus]] = {
        "bounded memory": (_call(_HOG, memory_bytes=64 * MIB), CallStatus.MEMORY_LIMIT),
        "bounded output": (_call(_FLOOD, output_bytes=1000), CallStatus.OUTPUT_LIMIT),
        "bounded time": (_call(_SLEEP, wall_s=0.1), CallStatus.TIMEOUT),
        "nothing stays": (_call(_DAEMON), CallStatus.OK),
    }
    for wall, (call, status) in ends.items():
        result = await jail.run(call, slot)
        if result.status == status and slot.group.is_empty():
            standing.add(wall)
    return standing


def _header(jail: Jail, slot: Slot) -> str:
    """What the program must know of its host: nothing that a stranger's program would gain from."""
    host = jail.host
    names = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
    facts = {
        "UID": slot.uid if slot.uid is not None else host.identity.uid if host.level == "process" else 0,
        # An ordinary user may not change its groups, nor let another do it; no file in the jail belongs to one of them.
        "DROPS_GROUPS": host.identity.first_slot is not None,
        # Nor, without a user namespace, empty its bounding set, which no exec can give it anything of.
        "HAS_BOUNDING_SET": host.identity.first_slot is not None or host.level != "process",
        "SIZE": host.scratch_bytes,
        "INODES": host.scratch_inodes,
        "MOST_PROCESSES": jail.most_processes(_PROCESSES, slot),
        "HOST_NAMESPACES": {name: str(Path(f"/proc/self/ns/{name}").readlink()) for name in names},
        "HOST_FILE": str(Path(__file__).resolve()),
        "READ_ONLY": ("", "/etc", "/usr", "/dev", "/proc", "/python", str(host.root)),
        "NUMBERS": _NUMBERS[platform.machine()],
    }
    return "".join(f"{name} = {value!r}\n" for name, value in facts.items())


def _call(code: str, **limits: float) -> ToolCall:
    return ToolCall(code=code, limits=Limits(**{"wall_s": 10.0, **limits}))


async def check_walls(jail: Jail, slot: Slot) -> None:
    """Try the walls. Raises JailError naming those that the level claims and that are missing, and what to look at."""
    standing = await walls_that_hold(jail, slot)
    claimed = [wall for wall in WALLS if jail.host.level in wall.levels]
    missing = [f"{wall.name} (look at {wall.look_at})" for wall in claimed if wall.name not in standing]
    if missing:
        raise JailError(f"walls of the jail are missing: {', '.join(missing)}")


async def try_level(settings: JailSettings) -> list[Check]:
    """What a worker with these settings finds at its start: the walls of its level, or why it has no jail."""
    try:
        host = prepare(settings, slots=1)
        with contextlib.closing(Slots(host)) as slots:
            jail = await Jail.start(host, PRELOADS[0])
            try:
                standing = await walls_that_hold(jail, slots.free[0])
            finally:
                await jail.close()
    except SandboxError as exc:
        return [Check("self-test", settings.level, ok=False, found=exc.message)]
    return [
        _wall_check(wall, settings.level, wall.name in standing)
        for wall in WALLS
        if settings.level in wall.levels
    ]


def _wall_check(wall: Wall, level: Level, holds: bool) -> Check:
    if holds:
        return Check(wall.name, level, ok=True, found="the wall holds")
    return Check(wall.name, level, ok=False, found="the wall is missing", remedy=f"look at {wall.look_at}")
