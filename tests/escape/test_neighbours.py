"""Two calls at the same time in one jail, and two after each other in one slot, do not notice each other."""

from __future__ import annotations

import pytest

from tests.sandbox.jail.box import Box, program

from .probe import probe

#: All that a program can list or count, without times and without what chance decides.
_LOOK = """
import resource, time
time.sleep(WAIT_S)
seen = {
    "proc": sorted(os.listdir("/proc")), "tmp": sorted(os.listdir("/tmp")), "shm": os.listdir("/dev/shm"),
    "dev": sorted(os.listdir("/dev")), "pid": (os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0)),
    "space": [(os.statvfs(p).f_bfree, os.statvfs(p).f_ffree) for p in ("/tmp", "/dev/shm")],
    "unix": len(open("/proc/self/net/unix").readlines()), "sockets": open("/proc/self/net/sockstat").readline(),
    "protocols": [line.split()[:3] for line in open("/proc/self/net/protocols")],
    "limits": [resource.getrlimit(n) for n in range(16)], "flags": os.sched_getscheduler(0),
    "environ": sorted(os.environ), "fork": [os.fork() or os._exit(0) for _ in range(3)], "mask": os.umask(0),
}
print(seen)
"""

_NOISE = """
import socket, subprocess, time
os.environ["NOISE"] = "1"
kept = [socket.socketpair() for _ in range(50)]
children = [subprocess.Popen(["sleep", "60"]) for _ in range(10)]
for folder in ("/tmp", "/dev/shm"):
    for n in range(20): open(f"{folder}/noise{n}", "wb").write(bytes(1 << 16))
os.umask(0o777); os.nice(5); os.chdir("/")
time.sleep(1)
"""


def test_beside_each_other(box: Box) -> None:
    """A call sees the same world whether it is alone or beside one that makes all the noise that it can."""
    look = program(probe(_LOOK.replace("WAIT_S", "0.5")))
    (alone,) = box.run_together([look])
    beside, noise = box.run_together([look, program(probe(_NOISE))])
    assert (alone.status, noise.status) == ("ok", "ok")
    assert beside.stdout == alone.stdout
    assert len(alone.stdout) > 500


def test_after_each_other(box: Box) -> None:
    """A call sees the same world after one that made noise in its slot as after one that made none."""
    look = probe(_LOOK.replace("WAIT_S", "0"))
    before = box.out(look)
    assert box.run(probe(_NOISE.replace("time.sleep(1)", ""))).status == "ok"
    assert box.out(look) == before


def test_calls_do_not_share_a_clock_of_work(box: Box) -> None:
    """CPU time, page faults and switches that a program is told are its own."""
    code = "import resource, time\ntime.sleep(0.4)\nu = resource.getrusage(resource.RUSAGE_SELF)\nprint(u.ru_utime + u.ru_stime < 0.1, time.process_time() < 0.1, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime)"
    quiet, _ = box.run_together(
        [program(code), program("import time\nwhile time.process_time() < 0.4: pass")]
    )
    assert quiet.stdout == "True True 0.0\n"


#: Ways to be many. The scheduler gives each session a share of its own, where nothing else says who belongs together.
CROWDS = {
    "threads": "for _ in range(20): threading.Thread(target=spin, daemon=True).start()",
    "processes": "for _ in range(20): os.fork() or spin()",
    "sessions": "for _ in range(20): os.fork() or (os.setsid(), spin())",
    "batch": "os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))\nfor _ in range(20): os.fork() or (os.setsid(), spin())",
}


@pytest.mark.parametrize("name", CROWDS)
def test_a_crowd_gets_no_more(box: Box, name: str) -> None:
    """Beside a call that spins in as many ways as it can, a call that spins alone gets its share of the CPU they are on."""
    if box.host.place.kind == "none":
        pytest.skip("this host gives no cgroup")
    spin = "import os, threading\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\ndef spin():\n    while True: pass\n"
    crowd, alone = box.run_together(
        [program(spin + more + "\nspin()", wall_s=1.5, cpu_s=60) for more in (CROWDS[name], "")]
    )
    assert (crowd.status, alone.status) == ("timeout", "timeout")
    assert alone.usage.cpu_s > crowd.usage.cpu_s / 4


@pytest.mark.xfail(strict=True, reason="sysinfo tells load, memory and processes of the host; only a time namespace and a kernel of its own would not")  # fmt: skip
def test_the_host_s_load_is_not_visible(box: Box) -> None:
    """A program cannot tell how busy the host is."""
    code = (
        "info = (ctypes.c_char * 128)()\n_libc.sysinfo(info)\nprint(struct.unpack_from('H', info, 80)[0] < 5)"
    )
    assert box.out(probe(code)) == "True\n"
