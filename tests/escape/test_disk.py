"""A program reads files of the runtime through the page cache, and has no other way to the host's disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sandbox.jail.box import Box

from .probe import outcomes, probe

TARGET = "/jail/init"


def is_cached(file: Path) -> bool:
    """Whether the first page of a file is in memory."""
    fd = os.open(file, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError as exc:
        pytest.skip(f"the runtime's file system does not tell what it keeps in memory: {exc}")
    finally:
        os.close(fd)


def test_nothing_is_evicted(box: Box) -> None:
    """A program cannot have the runtime's files read from the disk again, by a neighbour or by the next call."""
    file = box.host.root / "etc/passwd"
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    if is_cached(file):
        pytest.skip("nobody can evict the file, which another program on this host holds")
    os.pread(fd, 1, 0)
    code = """
import mmap
fd = os.open("/etc/passwd", os.O_RDONLY)
attempt("fadvise", lambda: os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED))
attempt("fadvise-call", lambda: syscall("fadvise64", fd, 0, 0, 4))
block = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
for name, advice in (("DONTNEED", 4), ("FREE", 8), ("REMOVE", 9), ("COLD", 20), ("PAGEOUT", 21)):
    try:
        block.madvise(advice)
    except OSError:
        pass
print("tried", fd > 2)
"""
    assert outcomes(box, code) == {"fadvise": "EINVAL", "fadvise-call": "EINVAL", "tried": "True"}
    assert is_cached(file)
    os.close(fd)


def test_what_is_cached_is_not_told(box: Box) -> None:
    """Which files were read by others, the kernel does not say: it would tell one call what the other did."""
    file = os.open(box.host.root / "etc/passwd", os.O_RDONLY)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(file)
    code = """
import mmap
resident = ctypes.create_string_buffer(1)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
page = ctypes.c_void_p(_libc.mmap(None, 4096, 1, 2, os.open("/etc/passwd", os.O_RDONLY), 0))
print("resident", _libc.mincore(page, ctypes.c_size_t(4096), resident), resident[0])
fd = os.open("/etc/passwd", os.O_RDONLY)
attempt("no-wait", lambda: os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT))
attempt("cachestat", lambda: syscall(451, fd, struct.pack("QQ", 0, 4096), bytes(40), 0))
attempt("blocks", lambda: __import__("fcntl").ioctl(fd, 0xc020660b, struct.pack("QQIIII", 0, 1 << 40, 0, 0, 4, 0) + bytes(224)))
"""
    found = outcomes(box, code)
    assert found.pop("resident") == "0 b'\\x01'"  # as of every file that is not the program's own
    assert set(found.values()) == {"ENOTSUP", "EPERM"}


def test_no_direct_reads(box: Box) -> None:
    """The page cache cannot be left out: reading past it, again and again, takes the disk from everybody else."""
    code = f"""
import fcntl
path = {TARGET.encode()!r}
fd = os.open(path, os.O_RDONLY)
if "open" in NR:
    attempt("open", lambda: syscall("open", path, os.O_DIRECT))
attempt("openat", lambda: syscall("openat", -100, path, os.O_DIRECT))
attempt("openat2", lambda: syscall("openat2", -100, path, struct.pack("QQQ", os.O_DIRECT, 0, 0), 24))
attempt("read-and-drop", lambda: os.preadv(fd, [bytearray(1)], 0, 0x80))
attempt("set", lambda: fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT))
attempt("set-more", lambda: syscall("fcntl", fd, 4, os.O_DIRECT | os.O_APPEND))
"""
    found = outcomes(box, code)
    assert found.pop("openat2") == "ENOSYS"
    assert found.pop("read-and-drop") == "ENOTSUP"
    assert set(found.values()) == {"EINVAL"}


def test_no_way_to_wait_for_the_disk(box: Box) -> None:
    """Asking for a flush succeeds and does nothing: all that a program can write lies in memory.

    A flush of a file of the runtime is one of the host's disk, which takes it from others, and cannot be killed. That the
    kernel is not asked shows in that it does not complain of a descriptor that is not there.
    """
    code = """
for name in ("fsync", "fdatasync", "sync_file_range"):
    print(name, syscall(name, 999, 0, 0, 7))
print("msync", syscall("msync", 1, 4096, 4))
attempt("sync", lambda: syscall("sync"))
"""
    assert box.out(probe(code)).splitlines() == [
        *(f"{name} 0" for name in ("fsync", "fdatasync", "sync_file_range", "msync")),
        "sync EPERM",
    ]


def test_databases_and_maps_work(box: Box) -> None:
    """What asks for flushes for good reasons goes on as before."""
    code = """
import mmap, os, sqlite3, tempfile
with sqlite3.connect("data.db") as base:
    base.execute("pragma synchronous = extra")
    base.execute("create table t (x)")
    base.execute("insert into t values (42)")
print(sqlite3.connect("data.db").execute("select x from t").fetchall())
with open("map", "w+b") as file:
    file.truncate(4096)
    block = mmap.mmap(file.fileno(), 4096)
    block[:4] = b"text"
    block.flush()
    os.fsync(file.fileno())
print(open("map", "rb").read(4), os.posix_fadvise(os.open("map", os.O_RDONLY), 0, 0, os.POSIX_FADV_SEQUENTIAL))
"""
    assert box.out(code) == "[(42,)]\nb'text' None\n"


def test_no_pages_of_files_in_pipes(box: Box) -> None:
    """A page of the page cache never becomes a part of a pipe, from where kernel bugs have written into it."""
    code = """
import socket
fd = os.open("/etc/passwd", os.O_RDONLY)
read_end, write_end = os.pipe()
pair, _ = socket.socketpair()
attempt("sendfile-pipe", lambda: os.sendfile(write_end, fd, 0, 100))
attempt("sendfile-socket", lambda: os.sendfile(pair.fileno(), fd, 0, 100))
attempt("splice", lambda: os.splice(fd, write_end, 100))
attempt("tee", lambda: syscall("tee", read_end, write_end, 100, 0))
attempt("vmsplice", lambda: syscall("vmsplice", write_end, struct.pack("QQ", id(fd), 100), 1, 0))
"""
    assert set(outcomes(box, code).values()) == {"EINVAL", "EPERM"}


def test_copying_goes_on_without(box: Box) -> None:
    """What would use these calls copies by reading and writing, as it does on systems that have none of them."""
    code = """
import asyncio, shutil, socket, subprocess
open("a", "wb").write(bytes(range(256)) * 1000)
shutil.copyfile("a", "b")
shutil.copy2("a", "c")
shutil.copytree("/etc", "d")
subprocess.run(["cp", "-a", "a", "e"], check=True)
print(*(open(name, "rb").read() == open("a", "rb").read() for name in "bce"))
one, two = socket.socketpair()
print(one.sendfile(open("a", "rb"), count=1000), len(two.recv(2000)))
"""
    assert box.out(code) == "True True True\n1000 1000\n"
