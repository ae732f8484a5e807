"""Memory that the kernel keeps for a program is charged to its call, or cannot be had; and all of it is given back."""

from __future__ import annotations

import pytest

from sandbox.calls import MIB
from tests.sandbox.jail.box import Box, program

from .probe import outcomes, probe


def test_no_access_lists(box: Box) -> None:
    """Files get no lists and no notes: lists are memory that no group counts, twice 64 KB for each folder."""
    code = """
entry = lambda tag, who=0xffffffff: struct.pack("<HHI", tag, 6, who)
access = struct.pack("<I", 2) + entry(1) + entry(2, os.getuid()) * 100 + entry(4) + entry(16) + entry(32)
fd = os.open("main.py", os.O_RDONLY)
for name in (b"system.posix_acl_access", b"system.posix_acl_default", b"user.x", b"trusted.x", b"security.x"):
    n = name.decode()
    attempt("set-" + n, lambda: syscall("setxattr", b"/tmp", name, access, len(access), 0))
    attempt("link-" + n, lambda: syscall("lsetxattr", b"/tmp", name, access, len(access), 0))
    attempt("file-" + n, lambda: syscall("fsetxattr", fd, name, access, len(access), 0))
    attempt("at-" + n, lambda: syscall("setxattrat", -100, b"/tmp", 0, name, bytes(16), 16))
"""
    found = outcomes(box, code)
    assert len(found) == 20
    assert set(found.values()) == {"ENOTSUP"}


def test_no_pages_are_merged(box: Box) -> None:
    """No memory can be offered for merging with that of others."""
    code = """
import mmap
block = mmap.mmap(-1, 1 << 16)
attempt("merge", lambda: block.madvise(12))
attempt("merge-call", lambda: syscall("madvise", ctypes.addressof(ctypes.c_char.from_buffer(block)), 1 << 16, 12))
attempt("merge-all", lambda: syscall("prctl", 67, 1, 0, 0, 0))
"""
    assert set(outcomes(box, code).values()) <= {"EINVAL", "EPERM"}


#: Each piles up one kind of kernel object until it is refused, in every process that it may start.
PILES = {
    "pipes": "r, w = os.pipe(); os.set_blocking(w, False); kept.append((r, w)); full(lambda: os.write(w, bytes(4096)))",
    "large pipes": "r, w = os.pipe(); fcntl.fcntl(w, 1031, 1 << 20); os.set_blocking(w, False); kept.append((r, w)); full(lambda: os.write(w, bytes(65536)))",
    "socket pairs": "a, b = socket.socketpair(); a.setblocking(False); kept.append((a, b)); full(lambda: a.send(bytes(32768)))",
    "descriptors in flight": "a, b = socket.socketpair(); a.setblocking(False); kept.append((a, b)); full(lambda: a.sendmsg([b'x'], [(1, 1, array.array('i', [0, 1, 2] * 80))]))",
    "sockets within sockets": "a, b = socket.socketpair(); a.sendmsg([b'x'], [(1, 1, array.array('i', [x.fileno() for pair in kept[-1:] for x in pair]))]); kept[:] = [(a, b)]",
    "epoll": "e = select.epoll(); kept.append(e); [e.register(other.fileno(), 1) for other in kept[:-1]]",
    "event descriptors": "kept.append(_libc.eventfd(0, 0)); kept[-1] >= 0 or refuse()",
    "timer descriptors": "kept.append(_libc.timerfd_create(1, 0)); kept[-1] >= 0 or refuse(); _libc.timerfd_settime(kept[-1], 0, struct.pack('4q', 0, 1, 0, 1), None)",
    "timers": "_libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0 or refuse()",
    "locks": "fcntl.fcntl(file, fcntl.F_SETLK, struct.pack('hhqqi4x', n % 2, 0, 2 * n, 1, 0))",
    "locks on the runtime": "fcntl.fcntl(shared, fcntl.F_SETLK, struct.pack('hhqqi4x', 0, 0, 2 * n, 1, 0))",
    "mappings": "kept.append(mmap.mmap(-1, 4096, prot=1 + n % 2 * 2))",
    "page tables": "kept.append(mmap.mmap(-1, 1 << 30)); [kept[-1].__setitem__(k, 1) for k in range(0, 1 << 30, 2 << 20)]",
    "names": "os.path.exists(f'/python/{n:0200}')",
    "signals": "syscall('rt_sigqueueinfo', os.getpid(), 40, struct.pack('iii', 40, 0, -1) + bytes(116))",
    "futex tables": "syscall('prctl', 78, 1, 1 << 20, 0)",
}

_PILE = """
import array, fcntl, mmap, select, signal, socket
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
def full(action):
    try:
        while True: action()
    except BlockingIOError: pass
def refuse():
    raise OSError(ctypes.get_errno() or 1, "refused")
for _ in range(30):
    if not os.fork(): break
kept, n = [], 0
file, shared = open(f"/tmp/{os.getpid()}", "w+"), open("/etc/passwd")
try:
    while True:
        PILE
        n += 1
except OSError:
    pass
signal.pause()
"""


@pytest.mark.parametrize("name", PILES)
def test_piles(box: Box, name: str) -> None:
    """A pile ends at a bound or at the call's memory, disturbs no call beside it, and nothing of it stays in the group."""
    pile = program(
        probe(_PILE.replace("PILE", PILES[name])), wall_s=1.0, cpu_s=20, memory_bytes=96 * MIB, processes=32
    )
    ended, beside = box.run_together([pile, program("print(sum(range(1000)))")])
    assert ended.status in {"timeout", "memory_limit"}, ended
    assert (beside.status, beside.stdout) == ("ok", "499500\n")
    assert all(slot.group.is_empty() for slot in box.slots.free)
    # What stayed charged would be missing here.
    assert box.run("x = bytearray(8 << 20)", memory_bytes=16 * MIB).status == "ok"
