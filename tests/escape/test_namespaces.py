"""A program stays in the namespaces it was born into, and makes no new ones."""

from __future__ import annotations

import pytest

from tests.sandbox.jail.box import Box, program

from .probe import outcomes, started_anew

FLAGS = {
    "time": 0x80, "mount": 0x20000, "cgroup": 0x2000000, "uts": 0x4000000,
    "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_no_new_one(box: Box, name: str) -> None:
    """Neither by unshare nor by clone, alone, with a user namespace, or hidden behind other flags."""
    code = f"""
flag = {FLAGS[name]}
def clone(flags):
    pid = syscall("clone", flags | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid
for more in (0, 0x10000000, 0x10000000 | 0x20000, 0x100):
    attempt(f"unshare-{{more}}", lambda: syscall("unshare", flag | more))
    attempt(f"clone-{{more}}", lambda: clone(flag | more))
    attempt(f"high-{{more}}", lambda: syscall("unshare", flag | more | 1 << 40))
attempt("clone3", lambda: syscall("clone3", struct.pack("11Q", flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88))
"""
    found = outcomes(box, code)
    assert found.pop("clone3") == "ENOSYS"
    assert set(found.values()) == {"EPERM"}


def test_no_other_one(box: Box) -> None:
    """The files in /proc/self/ns open no way, and lead to no parent."""
    code = """
import fcntl
for name in os.listdir("/proc/self/ns"):
    fd = os.open("/proc/self/ns/" + name, os.O_RDONLY)
    attempt("setns-" + name, lambda: syscall("setns", fd, 0))
for name in ("pid", "user"):
    fd = os.open("/proc/self/ns/" + name, os.O_RDONLY)
    attempt("parent-of-" + name, lambda: fcntl.ioctl(fd, 0xb702))
    attempt("owner-of-" + name, lambda: fcntl.ioctl(fd, 0xb704, bytes(4)) and None or (_ for _ in ()).throw(OSError(1, "told a uid")))
attempt("ns-of-init", lambda: os.open("/proc/1/ns/mnt", os.O_RDONLY))
"""
    found = outcomes(box, code, anew=True)
    assert set(found.values()) <= {"EPERM", "EACCES", "ENOENT", "EINVAL"}
    assert found["parent-of-pid"] == found["parent-of-user"] == "EPERM"


def test_no_sibling(box: Box) -> None:
    """A child of the forkserver would be reaped by nobody, and its call would never end (CLONE_PARENT)."""
    code = """
def clone():
    if syscall("clone", 0x8000 | 17, 0, 0, 0, 0) == 0:
        os._exit(0)
attempt("clone-parent", clone)
attempt("hidden", lambda: syscall("clone", 0x8000 | 0x100 | 17 | 1 << 33, 0, 0, 0, 0) or os._exit(0))
"""
    assert set(outcomes(box, code).values()) == {"EPERM"}


def test_calls_share_only_what_is_empty(box: Box) -> None:
    """Two calls at the same time share the namespaces for users, host name, cgroup names and time, and no other."""
    code = "import os, time\nfor n in sorted(os.listdir('/proc/self/ns')): print(n, os.readlink('/proc/self/ns/' + n))\ntime.sleep(0.3)"
    one, two = (
        dict(map(str.split, result.stdout.splitlines()))
        for result in box.run_together([program(started_anew(code))] * 2)
    )
    shared = {name for name in one if one[name] == two[name]}
    own = {"user"} if box.host.level == "strict" else set()
    assert shared == {"cgroup", "time", "time_for_children", "user", "uts"} - own
    assert {"ipc", "mnt", "net", "pid", "user"} <= set(one)


def test_the_next_call_is_in_new_ones(box: Box) -> None:
    """A call in the same slot finds a process, mount and message namespace of its own."""
    code = "import os\nprint([os.readlink('/proc/self/ns/' + name) for name in ('pid', 'mnt', 'ipc')], os.getpid())"
    seen = [box.out(started_anew(code)) for _ in range(2)]
    # Numbers are given out again; that the process is the second of its namespace says that it is new.
    assert all(line.endswith("] 2\n") for line in seen)
