"""A program has its three streams, and no other descriptor of ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.held import descendants
from tests.sandbox.jail.box import SLEEP, Box, program, until

from .probe import outcomes, probe


def test_three_streams(box: Box) -> None:
    """Nothing is open above 2, by number or by name, at the start and after exec."""
    code = """
found = []
for fd in range(3, 70000):
    try:
        os.fstat(fd)
        found.append(fd)
    except OSError:
        pass
print("above", *found)
for fd in range(3, 1001):
    try:
        os.write(fd, b'{"status": "ok"}')
        print("wrote", "BREACH", fd)
    except OSError as exc:
        assert exc.errno == errno.EBADF
print("streams", *(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0] for fd in range(3)))
"""
    for anew in (False, True):
        assert outcomes(box, code, anew=anew) == {"above": "", "streams": "/memfd pipe pipe"}


def test_stdin_can_only_be_read(box: Box) -> None:
    """The file behind stdin takes no write, by no way of opening it, and holds no more than the input."""
    code = """
import fcntl
attempt("write", lambda: os.write(0, b"x"))
attempt("pwrite", lambda: os.pwrite(0, b"x", 0))
attempt("truncate", lambda: os.ftruncate(0, 0))
attempt("grow", lambda: os.posix_fallocate(0, 0, 1 << 20))
again = os.open("/proc/self/fd/0", os.O_RDWR)
attempt("reopened-write", lambda: os.write(again, b"x"))
attempt("reopened-truncate", lambda: os.ftruncate(again, 0))
attempt("reopened-grow", lambda: os.posix_fallocate(again, 0, 1 << 20))
attempt("punch", lambda: _libc.fallocate(again, 3, ctypes.c_long(0), ctypes.c_long(4096)) and (_ for _ in ()).throw(OSError(ctypes.get_errno(), "")))
print("content", repr(open(0).read()))
"""
    found = outcomes(box, code, stdin="given")
    assert found.pop("content") == "'given'"
    assert set(found.values()) <= {"EPERM", "EBADF", "EINVAL"}


def test_streams_are_no_files_of_the_host(box: Box) -> None:
    """Whatever a program does to the files behind its streams, no file of the host has other times or modes."""
    code = """
for fd in range(3):
    for name, change in (
        ("touch", lambda: os.utime(fd)),
        ("touch-call", lambda: syscall("utimensat", fd, 0, 0, 0)),
        ("set-time", lambda: os.utime(fd, (1, 1))),
        ("mode", lambda: os.fchmod(fd, 0o600)),
        ("owner", lambda: os.fchown(fd, 1, 1)),
    ):
        try:
            change()
        except OSError:
            pass
print("mounts", *(line.split()[1] in {fields.split()[0] for fields in open("/proc/self/mountinfo")}
                  for fd in range(3) for line in open(f"/proc/self/fdinfo/{fd}") if line.startswith("mnt_id")))
"""
    devices = [Path("/dev", name) for name in ("null", "zero", "full", "random", "urandom")]
    before = [path.stat() for path in devices]
    # Not one of them lies on a mount that leads anywhere.
    assert outcomes(box, code) == {"mounts": "False False False"}
    assert [path.stat() for path in devices] == before


def test_a_program_that_reads_its_own_output(box: Box, caplog: pytest.LogCaptureFixture) -> None:
    """It may be quicker than we are with what it has written, which fails nothing out here."""
    code = """
import os, time
ours = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
until = time.monotonic() + 0.5
while time.monotonic() < until:
    os.write(1, b"x")
    try:
        os.read(ours, 100)
    except BlockingIOError:
        pass
os.write(1, b"left")
"""
    result = box.run(code, output_bytes=4 << 20)
    assert result.status == "ok"
    assert result.stdout.endswith("left")
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_flags_of_a_stream_are_the_call_s_own(box: Box) -> None:
    """What one call sets on its streams, the next one does not find."""
    code = """
import fcntl
for fd in range(3):
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NONBLOCK | os.O_APPEND | os.O_ASYNC)
    fcntl.fcntl(fd, 10, 42)
    fcntl.fcntl(fd, fcntl.F_SETOWN, os.getpid())
"""
    look = "import fcntl\nprint([(fcntl.fcntl(fd, 3) & ~0o100000, fcntl.fcntl(fd, 11), fcntl.fcntl(fd, 9)) for fd in range(3)])"
    before = box.out(look)
    assert box.run(probe(code)).status == "ok"
    assert box.out(look) == before == "[(2, 0, 0), (1, 0, 0), (1, 0, 0)]\n"


def test_the_init_holds_none(box: Box) -> None:
    """The first process of a call has no descriptor at all, so that nothing in it keeps a pipe open."""

    def inits() -> list[int]:
        return [
            pid
            for pid in descendants(box.forkserver_pid())
            if Path(f"/proc/{pid}/comm").read_text(encoding="ascii") == "init\n"
        ]

    def held(pid: int) -> list[str]:
        return [fd.name for fd in Path(f"/proc/{pid}/fd").iterdir()]

    async def look() -> list[list[str]]:
        call = asyncio.create_task(box.jail.run(program(SLEEP, wall_s=0.5), box.slots.free[0]))
        await until(lambda: bool(inits()))
        found = [held(pid) for pid in inits()]
        await call
        return found

    assert box.do(look()) == [[]]


def test_the_forkserver_holds_nothing_of_the_host(box: Box) -> None:
    """Whoever took over the forkserver would find its control socket and namespaces, and no file of the host."""
    folder = Path(f"/proc/{box.forkserver_pid()}/fd")
    kinds = {str(fd.readlink()).partition(":")[0] for fd in folder.iterdir()}
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")}
    assert {kind for kind in kinds if not kind.endswith("/jail/init")} <= {
        "anon_inode",
        "pipe",
        "socket",
        "net",
        "pid",
    } | devices
