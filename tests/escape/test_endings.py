"""Programs that will not end are ended at their time, whatever state they bring themselves into."""

from __future__ import annotations

import pytest

from sandbox.calls import MIB, ToolResult
from sandbox.jail import jail as jail_module
from tests.sandbox.jail.box import Box, program

from .conftest import standard_box as box  # limits are no matter of the level
from .probe import probe

__all__ = ["box"]

ENDLESS = {
    # States that a signal does not reach, or not by itself.
    "the parent of a vfork": "if syscall('clone', 0x4100 | 17, 0, 0, 0, 0) == 0: syscall('clock_nanosleep', 1, 0, struct.pack('qq', 60, 0), 0)",
    "a chain of vforks": "while syscall('clone', 0x4100 | 17, 0, 0, 0, 0) == 0:\n    n = globals().setdefault('n', [])\n    n.append(1)\n    if len(n) > 20: syscall('clock_nanosleep', 1, 0, struct.pack('qq', 60, 0), 0)",
    "stopped": "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "stopped by its child": "import signal, time\nparent = os.getpid()\nif not os.fork():\n    while True: os.kill(parent, signal.SIGSTOP); time.sleep(0.01)\nsignal.pause()",
    "stopped with all its children": "import signal\nfor _ in range(10): os.fork() or os.kill(os.getpid(), signal.SIGSTOP)\nos.kill(0, signal.SIGSTOP)",
    "all signals blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: signal.sigwaitinfo([signal.SIGUSR1])",
    "waiting for a lock": "import fcntl, signal\nfile = open('lock', 'w')\nread_end, write_end = os.pipe()\nif not os.fork():\n    fcntl.lockf(file, fcntl.LOCK_EX)\n    os.write(write_end, b'.')\n    signal.pause()\nos.read(read_end, 1)\nfcntl.lockf(file, fcntl.LOCK_EX)",
    "waiting for itself": "import threading\nlock = threading.Lock()\nlock.acquire(); lock.acquire()",
    "waiting in a futex that nobody wakes": "value = ctypes.c_uint32(7)\nsyscall('futex', ctypes.byref(value), 128, 7, 0, 0, 0)",
    "reading its own output": "open('/proc/self/fd/1', 'rb').read()",
    "opening its own pipe": "os.set_blocking(1, True)\nr, w = os.pipe()\nos.write(w, bytes(1 << 20))",
    "waking at every tick": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)\nwhile True: pass",
    "in the kernel for long": "import mmap\nblock = mmap.mmap(-1, 8 << 20)\nzero = os.open('/dev/zero', os.O_RDONLY)\nwhile True: os.readv(zero, [block] * 1000)",
    "starting again and again": "import sys\nos.execv(sys.executable, [sys.executable, *sys.orig_argv[1:1], '-c', 'import os, sys\\nos.execv(sys.executable, sys.orig_argv)'])",
    # Ends that do not come to their end.
    "an excepthook": "import sys, time\nsys.excepthook = lambda *_: time.sleep(60)\n1 / 0",
    "an exit hook": "import atexit, time\natexit.register(time.sleep, 60)",
    "a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
    "a thread that starts one": "import threading, time\ndef again():\n    time.sleep(0.01)\n    threading.Thread(target=again).start()\nagain()",
    "a __del__": "class A:\n    def __del__(self):\n        while True: pass\na = A()",
    "a __del__ in a circle": "class A:\n    def __del__(self):\n        while True: pass\na = A()\na.a = a",
    "a __repr__": "class A(Exception):\n    def __str__(self):\n        while True: pass\nraise A",
    "a stream": "import sys, time\nclass A:\n    def write(self, text): pass\n    def flush(self): time.sleep(60)\nsys.stdout = A()",
    "a finally": "import sys, time\ntry:\n    sys.exit(0)\nfinally:\n    time.sleep(60)",
    "a fork in the end": "import atexit, time\natexit.register(lambda: os.fork() and time.sleep(60))",
}  # fmt: skip


@pytest.fixture(scope="module")
def results(_standard: Box) -> dict[str, ToolResult]:
    """All of them, a few at a time, each group beside an honest call."""
    found: dict[str, ToolResult] = {}
    names = list(ENDLESS)
    for start in range(0, len(names), 7):
        group = names[start : start + 7]
        calls = [program(probe(ENDLESS[name]), wall_s=1, cpu_s=20, processes=40) for name in group]
        *ended, honest = _standard.run_together([*calls, program("print('well')")])
        assert (honest.status, honest.stdout) == ("ok", "well\n")
        assert all(slot.group.is_empty() for slot in _standard.slots.free)
        found |= zip(group, ended, strict=True)
    return found


@pytest.mark.parametrize("name", ENDLESS)
def test_endless(results: dict[str, ToolResult], box: Box, name: str) -> None:
    """It is ended by the clock, and the jail goes on."""
    assert (results[name].status, results[name].exit_code) == ("timeout", None), results[name]
    assert box.out("print(1)") == "1\n"


def test_every_signal(box: Box) -> None:
    """A program that sends itself a signal ends as that signal does, whichever of all it is, and only stops need the clock."""
    numbers = range(1, 65)
    kind = {
        **dict.fromkeys(numbers, "signaled"),
        **dict.fromkeys(
            (13, 17, 18, 21, 22, 23, 25, 28, 32, 33), "ok"
        ),  # ignored, by the kernel or by Python
        **dict.fromkeys((19,), "timeout"),
    }
    # A group without a terminal is an orphan, which the terminal's stops do not reach.
    kind[20] = "ok"
    found = {}
    for start in range(1, 65, 8):
        group = range(start, start + 8)
        code = "import os\nos.kill(os.getpid(), {})"
        results = box.run_together(program(code.format(number), wall_s=1) for number in group)
        found |= zip(group, results, strict=True)
    assert {number: result.status for number, result in found.items()} == kind
    assert all(result.signal == n for n, result in found.items() if result.status == "signaled")


def test_an_end_that_takes_the_kernel_long(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed call whose end is much work for the kernel does not take the calls beside it with it."""
    if not box.slots.free[0].group.enter_fds:
        pytest.skip("this host gives no cgroup, which would count the work")
    monkeypatch.setattr(jail_module, "KILL_S", 0.4)
    monkeypatch.setattr(jail_module, "KILL_TIMES", 1000)
    code = """
import signal
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
for n in range(60_000):
    _libc.mmap(None, 4096, 1 if n % 2 else 3, 0x22, -1, 0)
try:
    while True:
        if not os.fork():
            signal.pause()
except OSError:
    signal.pause()
"""
    slow = program(probe(code), wall_s=2, cpu_s=60, memory_bytes=512 * MIB, processes=32)
    ended, beside = box.run_together([slow, program("import time\ntime.sleep(3)\nprint('well')")])
    assert ended.status in {"timeout", "memory_limit"}
    assert (beside.status, beside.stdout) == ("ok", "well\n")
