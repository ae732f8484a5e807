"""Limits can be lowered by a program, never raised, and hold for all of it together."""

from __future__ import annotations

import pytest

from tests.sandbox.jail.box import Box, program

from .probe import outcomes, probe


def test_none_can_be_raised(box: Box) -> None:
    """Each limit that is set has a hard bound that no call lifts, in a child or by any of the interfaces."""
    code = """
import resource
finite = {}
for name in dir(resource):
    if name.startswith("RLIMIT_"):
        soft, hard = resource.getrlimit(getattr(resource, name))
        if hard != resource.RLIM_INFINITY:
            finite[name] = hard
for name, hard in finite.items():
    number = getattr(resource, name)
    for target in (hard + 1, resource.RLIM_INFINITY):
        try:
            resource.setrlimit(number, (hard, target))
            print(name, "BREACH")
        except (OSError, ValueError):
            pass
        try:
            resource.prlimit(0, number, (hard, target))
            print(name, "BREACH")
        except (OSError, ValueError):
            pass
print("finite", *sorted(finite))
"""
    found = outcomes(box, code)["finite"].split()
    wanted = {
        "CORE",
        "CPU",
        "FSIZE",
        "MEMLOCK",
        "MSGQUEUE",
        "NOFILE",
        "NPROC",
        "STACK",
        "NICE",
        "RTPRIO",
        "SIGPENDING",
    }
    assert {f"RLIMIT_{name}" for name in wanted} <= set(found)


def test_values(box: Box) -> None:
    """The limits are those that are written down, soft and hard alike but for the CPU's second."""
    code = "import resource as r\nprint([r.getrlimit(n) for n in (r.RLIMIT_CORE, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE, r.RLIMIT_MSGQUEUE, r.RLIMIT_CPU)])"
    assert box.out(code, cpu_s=3) == f"{[(0, 0), (64 << 20, 64 << 20), (256, 256), (0, 0), (4, 5)]}\n"


def test_timers(box: Box) -> None:
    """The timers of a call are bounded: each of them could interrupt the host for next to no CPU time."""
    code = """
n = 0
timer = ctypes.c_void_p()
while n < 5000 and _libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    n += 1
print("timers", n <= 1024)
"""
    assert outcomes(box, code) == {"timers": "True"}


def test_groups_cannot_be_left(box: Box) -> None:
    """No cgroup file system is there to move through."""
    code = """
attempt("sys", lambda: os.listdir("/sys/fs/cgroup"))
for path in ("/sys/fs/cgroup/memory/cgroup.procs", "/tmp/cgroup.procs"):
    attempt(path, lambda: open(path, "r+"))
"""
    assert set(outcomes(box, code).values()) == {"ENOENT"}


BOMBS = {
    "fork": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "fork and exec": "import subprocess\nwhile True:\n    try: subprocess.Popen(['sleep', '60'])\n    except OSError: pass",
    "threads": "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(60,)).start()\n    except RuntimeError: pass",
    "storm": "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0)\n    except OSError: pass",
    "zombies": "import os\nwhile True:\n    try:\n        if not os.fork(): os._exit(0)\n    except OSError: pass",
    "stopped": "import os, signal\nwhile True:\n    try:\n        if not os.fork(): os.kill(os.getpid(), signal.SIGSTOP)\n    except OSError: pass",
    "sessions": "import os\nwhile True:\n    try:\n        if not os.fork(): os.setsid()\n    except OSError: pass",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(box: Box, name: str) -> None:
    """Whatever multiplies is bounded, ends with its call, and leaves a call beside it its answer."""
    bomb = program(BOMBS[name], wall_s=0.8, cpu_s=20, processes=40)
    honest = program(
        "import os\nprint(sum(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(5) if os.fork() or os._exit(1)))"
    )
    ended, answer = box.run_together([bomb, honest])
    # A storm's first process ends by itself, and with it the call.
    assert ended.status in {"timeout", "ok", "error"} if name == "storm" else ended.status == "timeout"
    assert (answer.status, answer.stdout) == ("ok", "5\n")
    assert all(slot.group.is_empty() for slot in box.slots.free)
    assert box.out("print(1)") == "1\n"


@pytest.mark.parametrize(
    "count",
    [
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
        "os.fork() or time.sleep(9)",
        "os.posix_spawn('/bin/sleep', ['sleep', '9'], {})",
        "subprocess.Popen(['sleep', '9'])",
    ],
)
def test_processes_and_threads_count_alike(box: Box, count: str) -> None:
    """The limit is on all of them together, to the last one."""
    code = f"import os, subprocess, threading, time\nn = 1\ntry:\n    while True:\n        {count}\n        n += 1\nexcept (OSError, RuntimeError):\n    print(n, flush=True)\n    os._exit(0)"
    for processes in (1, 2, 10):
        started = int(box.out(code, processes=processes))
        # One user for all: the kernel counts the other slots' processes too, so there is room for these.
        shared = 0 if box.host.identity.first_slot is not None else 3 * box.host.slots + 1
        assert processes <= started <= processes + shared


def test_descriptors(box: Box) -> None:
    """Open files are bounded for each process."""
    code = "kept = []\ntry:\n    while True: kept.append(open('/dev/null'))\nexcept OSError as exc: print(exc.errno, 200 < len(kept) < 256)"
    assert box.out(code) == "24 True\n"


def test_locked_memory(box: Box) -> None:
    """Hardly any memory can be kept from the kernel's reach."""
    code = """
import mmap
block = mmap.mmap(-1, 1 << 20)
address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(block)))
attempt("lock", lambda: _libc.mlock(address, ctypes.c_size_t(1 << 20)) and (_ for _ in ()).throw(OSError(ctypes.get_errno(), "")))
attempt("all", lambda: _libc.mlockall(3) and (_ for _ in ()).throw(OSError(ctypes.get_errno(), "")))
"""
    assert set(outcomes(box, code).values()) <= {"ENOMEM", "EPERM"}


def test_what_takes_the_kernel_long_to_end(box: Box) -> None:
    """A call of many processes with very many mappings each is ended, however long it takes, and the jail with it is not."""
    code = """
import time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for n in range(60_000):
    libc.mmap(None, 4096, 1 if n % 2 else 3, 0x22, -1, 0)
try:
    while True:
        if not os.fork():
            time.sleep(60)
except OSError:
    time.sleep(60)
"""
    result = box.run(probe(code), wall_s=1.5, cpu_s=20, memory_bytes=1 << 30, processes=64)
    assert result.status == "timeout"
    assert not box.jail.is_broken
