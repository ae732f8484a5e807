"""What a call is said to have used holds all that it used, whoever of its processes did the work."""

from __future__ import annotations

import pytest

from sandbox.calls import MIB
from tests.sandbox.jail.box import Box

from .conftest import standard_box as box  # limits are no matter of the level
from .probe import probe

__all__ = ["box"]

#: Each way works for 0.15 s in three places, and ends when all have.
WORKERS = {
    "threads": "threads = [threading.Thread(target=work) for _ in range(3)]\n[t.start() for t in threads]; [t.join() for t in threads]",
    "children": "[os.fork() or (work(), os._exit(0)) for _ in range(3)]\nfor _ in range(3): os.wait()",
    "children that the kernel reaps": "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n[os.fork() or (work(), done(), os._exit(0)) for _ in range(3)]\nwait(3)",
    "orphans": "for _ in range(3):\n    if not os.fork():\n        os.fork() or (work(), done(), os._exit(0))\n        os._exit(0)\nwait(3)",
    "orphans of a session of their own": "for _ in range(3):\n    if not os.fork():\n        os.setsid()\n        os.fork() or (work(), done(), signal.pause())\n        os._exit(0)\nwait(3)",
    "children that are killed in the end": "[os.fork() or (work(), done(), signal.pause()) for _ in range(3)]\nwait(3)\nos._exit(0)",
    "started programs": "for _ in range(3): subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.15: pass'], check=True)",
    "an interpreter in its place": "done(); os.execv(sys.executable, [sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.45: pass'])",
    "many short children": "for _ in range(30):\n    if not os.fork():\n        while time.process_time() < 0.015: pass\n        os._exit(0)\n    os.wait()",
    "a child that outlives it": "if not os.fork():\n    for _ in range(3): os.fork() or (work(), done(), signal.pause())\n    signal.pause()\nwait(3)",
}  # fmt: skip

_WORK = """
import signal, subprocess, threading, time
told, tell = os.pipe()
def work():
    end = time.thread_time() + 0.15
    while time.thread_time() < end: pass
def done(): os.write(tell, b".")
def wait(count):
    for _ in range(count): os.read(told, 1)
"""


def needs_group(box: Box) -> None:
    if not box.slots.free[0].group.enter_fds:
        pytest.skip("this host gives no cgroup, and what a look at /proc does not see is said in watched.py")


@pytest.mark.parametrize("name", WORKERS)
def test_cpu(box: Box, name: str) -> None:
    """CPU time of every process and thread is in the sum, also of those that nobody waited for."""
    needs_group(box)
    result = box.run(probe(_WORK + WORKERS[name]), cpu_s=20, wall_s=30)
    assert result.status == "ok", result
    assert result.usage.cpu_s >= 0.44


#: Each keeps 20 MiB somewhere.
KEEPERS = {
    "private": "x = b'x' * SIZE",
    "shared": "import mmap\nx = mmap.mmap(-1, SIZE)\nx[:] = b'x' * SIZE",
    "scratch file": "open('/tmp/x', 'wb').write(b'x' * SIZE)",
    "shared memory": "open('/dev/shm/x', 'wb').write(b'x' * SIZE)",
    "child": "os.fork() or (globals().update(x=b'x' * SIZE), os._exit(0))\nos.wait()",
    "child that the kernel reaps": "import signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nr, w = os.pipe()\nos.fork() or (globals().update(x=b'x' * SIZE), os.write(w, b'.'), os._exit(0))\nos.read(r, 1)",
    "many children together": "r, w = os.pipe()\nfor _ in range(10): os.fork() or (globals().update(x=b'x' * (SIZE // 10)), os.write(w, b'.'), __import__('signal').pause())\nfor _ in range(10): os.read(r, 1)",
    "pipes": "import fcntl\nfor _ in range(20):\n    r, w = os.pipe()\n    os.set_blocking(w, False)\n    fcntl.fcntl(w, 1031, 1 << 20)\n    os.write(w, bytes(1 << 20))",
    "sockets": "import socket\nkept, n = [], 0\nwhile n < SIZE:\n    a, b = socket.socketpair()\n    kept.append((a, b))\n    a.setblocking(False)\n    try:\n        while True: n += a.send(bytes(1 << 15))\n    except BlockingIOError: pass",
    "deleted file": "file = open('/tmp/x', 'wb')\nos.unlink('/tmp/x')\nfile.write(b'x' * SIZE); file.flush()",
}  # fmt: skip


@pytest.mark.parametrize("name", KEEPERS)
def test_memory(box: Box, name: str) -> None:
    """The peak holds memory of every kind and process, though it is gone in the end."""
    needs_group(box)
    result = box.run(f"import os\nSIZE = 20 << 20\n{KEEPERS[name]}")
    assert result.status == "ok", result
    assert result.usage.memory_peak_bytes >= 20 * MIB


def test_wall_clock(box: Box) -> None:
    """The wall clock is the worker's: setting timers, stopping and starting changes nothing of it."""
    code = "import os, signal, time\npid = os.fork()\nif not pid:\n    os.kill(os.getpid(), signal.SIGSTOP)\n    os._exit(0)\nos.waitpid(pid, os.WUNTRACED)\ntime.sleep(0.3)\nos.kill(pid, signal.SIGCONT)\nos.wait()"
    assert box.run(code).usage.wall_s >= 0.3
