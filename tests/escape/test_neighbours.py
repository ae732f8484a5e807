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


@pytest.mark.xfail(strict=True, reason="a futex on a page of a file is known by the file, which the calls share; to refuse such futexes would end multiprocessing")  # fmt: skip
def test_two_programs_that_conspire_do_not_meet(box: Box) -> None:
    """One program cannot wake another that waits on a page of a file that both can read."""
    code = """
import time
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
page = _libc.mmap(None, 4096, 1, 2, os.open("/etc/passwd", os.O_RDONLY), 0)
WHAT
"""
    wait = "value = ctypes.c_uint32.from_address(page).value\nattempt('woken', lambda: syscall('futex', ctypes.c_void_p(page), 0, value, struct.pack('qq', 1, 0), 0, 0))"
    wake = "woken = 0\nfor _ in range(80):\n    woken += syscall('futex', ctypes.c_void_p(page), 1, 9, 0, 0, 0)\n    time.sleep(0.01)\nprint(woken)"
    _, waker = box.run_together(program(probe(code.replace("WHAT", what))) for what in (wait, wake))
    assert waker.stdout == "0\n"


#: What the kernel tells every program of the host and of others, in files that cannot be taken away from it.
TOLD = {
    "how many processes map a page of the runtime": "import re\nprint(max(map(int, re.findall(r'mapmax=(\\d+)', open('/proc/self/numa_maps').read()))) > 1)",
    "packets that each core has handled": "print(any(int(line.split()[0], 16) for line in open('/proc/self/net/softnet_stat')))",
    "space on the host's disk": "print(os.statvfs('/').f_bfree > 0)",
}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.xfail(strict=True, reason="the kernel knows no switch for it; SECURITY.md names it")
def test_what_the_kernel_tells(box: Box, name: str) -> None:
    """A program is not told anything of others."""
    assert box.out(probe(TOLD[name])) == "False\n"


@pytest.mark.xfail(strict=True, reason="sysinfo tells load, memory and processes of the host; only a time namespace and a kernel of its own would not")  # fmt: skip
def test_the_host_s_load_is_not_visible(box: Box) -> None:
    """A program cannot tell how busy the host is."""
    code = (
        "info = (ctypes.c_char * 128)()\n_libc.sysinfo(info)\nprint(struct.unpack_from('H', info, 80)[0] < 5)"
    )
    assert box.out(probe(code)) == "True\n"
