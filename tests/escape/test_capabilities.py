"""A program has no capability, gets none back, and can do nothing that takes one."""

from __future__ import annotations

from tests.sandbox.jail.box import Box

from .probe import outcomes

SETS = "print(sorted(line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')))"


def test_every_set_is_empty(box: Box) -> None:
    """Also after exec, in a child, and in a thread."""
    empty = f"{['0' * 16] * 5}\n"
    assert box.out(SETS) == empty
    assert box.out(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {SETS!r}])") == empty
    assert box.out(f"import os\nif not os.fork():\n    {SETS}\n    os._exit(0)\nos.wait()") == empty
    assert (
        box.out(f"import threading\nt = threading.Thread(target=exec, args=[{SETS!r}])\nt.start(); t.join()")
        == empty
    )


def test_by_the_kernel_s_own_calls(box: Box) -> None:
    """Asked without Python: no capability is in any set, none may be gained, and the program dies with the forkserver."""
    code = """
print("bounding", *(n for n in range(64) if _libc.prctl(23, n, 0, 0, 0) == 1))
print("ambient", *(n for n in range(64) if _libc.prctl(47, 1, n, 0, 0) == 1))
data = (ctypes.c_uint32 * 6)(*[0xffffffff] * 6)
syscall(NR["capset"] - 1 if platform.machine() == "x86_64" else 90, struct.pack("Ii", 0x20080522, 0), data)
print("sets", *data)
print("no-new-privs", _libc.prctl(39, 0, 0, 0, 0))
print("dumpable", _libc.prctl(3, 0, 0, 0, 0))
signal = ctypes.c_int()
_libc.prctl(2, ctypes.byref(signal), 0, 0, 0)
print("parent-death", signal.value)
ids = (ctypes.c_uint * 3)()
_libc.getresuid(*(ctypes.byref(ids, 4 * n) for n in range(3)))
print("users", len(set(ids)), os.getgroups())
"""
    expected = {"bounding": "", "ambient": "", "sets": "0 0 0 0 0 0", "no-new-privs": "1", "users": "1 []"}
    if box.host.identity.first_slot is None:
        expected.pop("users")  # an ordinary user keeps its groups
    for anew in (False, True):
        found = outcomes(box, code, anew=anew)
        # An exec makes it dumpable again, to itself and its like.
        assert found.pop("dumpable") == ("1" if anew else "0")
        assert found.pop("parent-death") == "9"
        assert {name: found[name] for name in expected} == expected


def test_none_comes_back(box: Box) -> None:
    """Neither by asking, nor as ambient ones, nor by the switches that keep them over a change of user."""
    code = """
def capset(version, bits):
    header = struct.pack("Ii", version, 0)
    return syscall("capset", header, struct.pack("6I", *[bits] * 6))
attempt("v3", lambda: capset(0x20080522, 1 << 21))
attempt("v3-all", lambda: capset(0x20080522, 0xffffffff))
attempt("v1", lambda: capset(0x19980330, 1 << 21))
prctl = lambda *a: (_libc.prctl(*a), ctypes.get_errno())
for number in (0, 1, 6, 7, 21):
    ctypes.set_errno(0)
    result = _libc.prctl(47, 2, number, 0, 0)
    print(f"ambient-{number}", errno.errorcode.get(ctypes.get_errno(), "BREACH") if result else "BREACH")
ctypes.set_errno(0)
print("securebits", "BREACH" if _libc.prctl(28, 1) == 0 else errno.errorcode[ctypes.get_errno()])
print("no-new-privs", "EINVAL" if _libc.prctl(38, 0, 0, 0, 0) else "BREACH")
"""
    found = outcomes(box, code)
    assert set(found.values()) <= {"EPERM", "EINVAL"}


def test_what_takes_one_is_refused(box: Box) -> None:
    """Priorities, clocks, devices, and limits of others."""
    code = """
import time
attempt("nice", lambda: os.nice(-1))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 0, -5))
attempt("fifo", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)))
attempt("ioprio", lambda: syscall("ioprio_set", 1, 0, 1 << 13))
attempt("clock", lambda: time.clock_settime(time.CLOCK_REALTIME, 0))
attempt("mknod", lambda: os.mknod("/tmp/null", 0o20666, os.makedev(1, 3)))
attempt("hostname", lambda: _libc.sethostname(b"x", 1) and (_ for _ in ()).throw(OSError(ctypes.get_errno(), "")))
attempt("oom-score", lambda: open("/proc/self/oom_score_adj", "wb", buffering=0).write(b"-1"))
"""
    assert set(outcomes(box, code).values()) <= {"EPERM", "EACCES", "ESRCH"}
