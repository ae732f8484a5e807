"""A program is its slot's user, ordinary inside and outside, and cannot become another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.held import descendants
from tests.sandbox.jail.box import SLEEP, Box, program, until

from .probe import outcomes

pytestmark = pytest.mark.skipif(
    "__import__('os').geteuid() != 0", reason="an ordinary user has one user to give"
)


def test_no_way_to_another_user(box: Box) -> None:
    """Neither the jail's root nor another slot's user, by any of the calls that change users."""
    code = """
for name, other in (("root", 0), ("neighbour", 2), ("nobody", 65534)):
    attempt(name + "-setuid", lambda: os.setuid(other))
    attempt(name + "-seteuid", lambda: os.seteuid(other))
    attempt(name + "-setresuid", lambda: syscall("setresuid", -1, -1, other))
    attempt(name + "-setgid", lambda: os.setgid(other))
    attempt(name + "-setresgid", lambda: syscall("setresgid", other, -1, -1))
attempt("setgroups", lambda: os.setgroups([0]))
attempt("no-groups", lambda: os.setgroups([]))
open("mine", "w").close()
attempt("chown-away", lambda: os.chown("mine", 2, -1))
attempt("chown-root", lambda: os.chown("mine", 0, 0))
"""
    found = outcomes(box, code)
    assert set(found.values()) <= {"EPERM", "EINVAL"}
    others = "EINVAL" if box.host.level == "strict" else "EPERM"  # users that its namespace does not know
    assert found["root-setuid"] == found["neighbour-setuid"] == others
    assert found["setgroups"] == found["no-groups"] == "EPERM"


def test_maps_are_closed(box: Box) -> None:
    """The maps of the user namespace are written once, by nsjail."""
    code = """
for name in ("uid_map", "gid_map", "setgroups", "projid_map"):
    attempt(name, lambda: open("/proc/self/" + name, "wb", buffering=0).write(b"0 0 1"))
"""
    assert set(outcomes(box, code).values()) <= {"EPERM", "EACCES"}


def test_fsuid_stays(box: Box) -> None:
    """The user for file access, which is changed by calls that report no error, stays as well."""
    libc = "import ctypes\nlibc = ctypes.CDLL(None)\n"
    assert (
        box.out(libc + "libc.setfsuid(0); libc.setfsgid(0)\nprint(libc.setfsuid(-1), libc.setfsgid(-1))")
        == "1 1\n"
    )


def test_no_file_gives_a_user(box: Box) -> None:
    """No file that programs can reach carries a set-user bit, and one of their own has no effect."""
    code = """
import stat, subprocess, shutil
for folder, _, names in os.walk("/"):
    if folder.startswith("/proc"):
        continue
    for name in names:
        mode = os.lstat(os.path.join(folder, name)).st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            print("BREACH", folder, name)
shutil.copy(os.path.realpath("/bin/sh"), "/tmp/sh")
attempt("caps", lambda: os.setxattr("/tmp/sh", "security.capability", bytes.fromhex("0100000200000001000000000000000000000000")))
os.chmod("/tmp/sh", 0o6777)
print("own", subprocess.run(["/tmp/sh", "-p", "-c", "echo $PPID; cat /proc/self/status"], capture_output=True, text=True).stdout.count("Uid:\\t1\\t1\\t1\\t1"))
"""
    assert outcomes(box, code, wall_s=20) == {"caps": "ENOTSUP", "own": "1"}


def test_outside_it_is_an_ordinary_user(box: Box) -> None:
    """Each slot's programs, and the jail's own root, are users of the host that own nothing."""

    async def look() -> list[int]:
        calls = [
            asyncio.create_task(box.jail.run(program(SLEEP, wall_s=1), box.slots.free[n])) for n in (0, 1)
        ]
        forkserver = box.forkserver_pid()
        await until(lambda: len({*map(uid, descendants(forkserver))}) == 3)
        found = [uid(pid) for pid in [forkserver, *descendants(forkserver)]]
        await asyncio.gather(*calls)
        return found

    first = box.host.identity.uid
    assert sorted(set(box.do(look()))) == [first, first + 1, first + 2]
    assert first >= 100_000


def uid(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("Uid:")))
