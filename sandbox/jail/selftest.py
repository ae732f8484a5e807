"""The self-test of a worker's start: one program that pushes at each wall, before a stranger's does.

Kernels and hosts differ, and a wall that silently is not there is the commonest failure of a sandbox. The program runs
as any call does and prints one line for each wall; a line that says otherwise, or is missing, refuses the start.
"""

from __future__ import annotations

from sandbox.calls import CallStatus, Limits, ToolCall
from sandbox.errors import JailError
from sandbox.jail.host import Slot
from sandbox.jail.jail import Jail

#: Name of the wall -> what to look at when it is missing.
WALLS = {
    "user": "the uid mapping of nsjail",
    "capabilities": "the capability steps of fork.c",
    "no_new_privs": "the kernel",
    "system call filter": "CONFIG_SECCOMP_FILTER in the kernel",
    "network": "the net namespace and the filter",
    "read-only root": "the root mount of nsjail",
    "own processes only": "the pid namespace and /proc",
    "scratch folder": "the tmpfs mount on /tmp",
    "no descriptors": "close_range in the kernel",
}

_PROGRAM = """
import ctypes, os, socket
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)

def refused(action):
    try:
        action()
    except OSError:
        return True
    return False

scratch = os.statvfs("/tmp")
held = {
    "user": os.getuid() == os.geteuid() == UID and (os.getgroups() == [] or not DROPS_GROUPS),
    "capabilities": all(int(status[name], 16) == 0 for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")),
    "no_new_privs": status["NoNewPrivs"].strip() == "1",
    "system call filter": status["Seccomp"].strip() == "2" and ctypes.CDLL(None).ptrace(0, 0, 0, 0) == -1,
    "network": refused(lambda: socket.socket(socket.AF_INET)) and os.listdir("/sys") == [],
    "read-only root": all(refused(lambda: open(p + "/probe", "w")) for p in ("", "/python", "/etc", "/dev", "/jail")),
    "own processes only": os.getpid() == 2 and {p for p in os.listdir("/proc") if p.isdigit()} <= {"1", "2"},
    "scratch folder": os.listdir("/tmp") == ["main.py"] and scratch.f_blocks * scratch.f_frsize == SIZE,
    "no descriptors": all(refused(lambda: os.fstat(fd)) for fd in range(3, 1024)),
}
for wall, holds in held.items():
    print(wall if holds else "MISSING " + wall)
"""


async def check_walls(jail: Jail, slot: Slot) -> None:
    """Try the walls. Raises JailError naming those that are missing and what to look at."""
    identity = jail.host.identity
    uid = slot.uid if slot.uid is not None else 0
    # An ordinary user may not change its groups, nor let another do it; no file in the jail belongs to one of them.
    drops_groups = identity.first_slot is not None
    header = f"UID, DROPS_GROUPS, SIZE = {uid}, {drops_groups}, {jail.host.scratch_bytes}\n"
    result = await jail.run(ToolCall(code=header + _PROGRAM, limits=Limits(wall_s=10.0)), slot)
    if result.status != CallStatus.OK:
        raise JailError(f"the self-test of the jail ended as {result.status}: {result.stderr[-500:]}")
    standing = set(result.stdout.splitlines())
    missing = [f"{wall} (look at {where})" for wall, where in WALLS.items() if wall not in standing]
    if missing:
        raise JailError(f"walls of the jail are missing: {', '.join(missing)}")
