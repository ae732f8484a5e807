"""The root that all calls see can only be read, by whatever way one comes to a file."""

from __future__ import annotations

from pathlib import Path

from tests.sandbox.jail.box import Box

from .probe import outcomes


def test_nothing_can_be_made_or_changed(box: Box) -> None:
    """In no folder can a file be made, and none that is there can be written, renamed, linked, or touched."""
    code = """
folders = [f for f, _, _ in os.walk("/") if not f.startswith(("/proc", "/tmp", "/dev/shm"))]
made = []
for folder in folders:
    try:
        open(folder + "/probe", "w")
        made.append(folder)
    except OSError:
        pass
print("folders", len(folders), "BREACH" if made else "closed", made)
target = os.path.realpath("/python/bin/python3")
attempt("write", lambda: open(target, "r+b"))
attempt("append", lambda: open("/jail/forkserver.py", "a"))
attempt("truncate", lambda: os.truncate("/jail/forkserver.py", 0))
attempt("unlink", lambda: os.unlink("/jail/init"))
attempt("rename", lambda: os.rename("/jail/init", "/jail/init2"))
attempt("replace", lambda: os.rename("main.py", "/jail/forkserver.py"))
attempt("link-in", lambda: os.link("main.py", "/jail/main.py"))
attempt("link-out", lambda: os.link("/jail/init", "/tmp/init"))
attempt("symlink", lambda: os.symlink("/tmp", "/jail/tmp"))
attempt("chmod", lambda: os.chmod("/jail", 0o777))
attempt("fchmod", lambda: os.fchmod(os.open("/jail/init", os.O_RDONLY), 0o777))
attempt("utime", lambda: os.utime("/jail/init"))
attempt("xattr", lambda: os.setxattr("/jail/init", "user.x", b"1"))
attempt("mkdir", lambda: os.mkdir("/jail/x"))
attempt("by-path-fd", lambda: open(f"/proc/self/fd/{os.open(target, os.O_PATH)}", "r+b"))
attempt("by-read-fd", lambda: open(f"/proc/self/fd/{os.open(target, os.O_RDONLY)}", "wb"))
attempt("own-exe", lambda: open("/proc/self/exe", "r+b"))
import mmap
fd = os.open(target, os.O_RDONLY)
attempt("shared-map", lambda: mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_WRITE))
attempt("sendfile", lambda: os.sendfile(fd, os.open("main.py", os.O_RDONLY), 0, 10))
attempt("copy-range", lambda: os.copy_file_range(os.open("main.py", os.O_RDONLY), fd, 10))
attempt("splice", lambda: os.splice(os.pipe()[0], fd, 10))
attempt("clone-range", lambda: __import__("fcntl").ioctl(fd, 0x40049409, os.open("main.py", os.O_RDONLY)))
attempt("fallocate", lambda: os.posix_fallocate(fd, 0, 10))
"""
    found = outcomes(box, code, wall_s=20)
    assert found.pop("folders").split(maxsplit=1)[1] == "closed []"
    assert set(found.values()) <= {
        "EROFS",
        "EACCES",
        "EPERM",
        "ETXTBSY",
        "EBADF",
        "EXDEV",
        "PermissionError",
        "EINVAL",
        "ENOTSUP",
    }


def test_a_private_map_stays_private(box: Box) -> None:
    """What a program writes into its own copy of a page of the interpreter, nobody else reads."""
    code = """
import mmap
target = os.path.realpath("/python/bin/python3")
private = mmap.mmap(os.open(target, os.O_RDONLY), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
private[:4] = b"EVIL"
attempt("advise", lambda: private.madvise(getattr(mmap, "MADV_REMOVE", 9)))
print("file", open(target, "rb").read(4).hex())
"""
    assert outcomes(box, code)["file"] == b"\x7fELF".hex()
    assert (box.host.root / "python/bin/python3").read_bytes()[:4] == b"\x7fELF"


def test_devices(box: Box) -> None:
    """There are five devices, they work, and nothing of the host's nodes can be changed."""
    code = """
import fcntl
names = sorted(os.listdir("/dev"))
print("names", *names)
for name in ("null", "zero", "full", "random", "urandom"):
    attempt("utime-" + name, lambda: os.utime("/dev/" + name))
    attempt("chmod-" + name, lambda: os.chmod("/dev/" + name, 0o777))
    attempt("xattr-" + name, lambda: os.setxattr("/dev/" + name, "user.x", b"1"))
for number in (0x5206, 0x5204, 0x5203, 0x5207):  # clear, take, add to and reseed the host's entropy
    attempt(f"random-{number}", lambda: fcntl.ioctl(os.open("/dev/urandom", os.O_RDWR), number, bytes(16)))
print("null", open("/dev/null", "wb").write(b"x"), open("/dev/null", "rb").read())
print("zero", open("/dev/zero", "rb").read(3))
attempt("full", lambda: open("/dev/full", "wb", buffering=0).write(b"x"))
print("urandom", len(open("/dev/urandom", "rb").read(8)))
"""
    before = {name: Path("/dev", name).stat() for name in ("null", "full")}
    found = outcomes(box, code)
    assert found.pop("names") == "fd full null random shm stderr stdin stdout urandom zero"
    assert (found.pop("null"), found.pop("zero"), found.pop("urandom")) == (
        "1 b''",
        "b'\\x00\\x00\\x00'",
        "8",
    )
    assert found.pop("full") == "ENOSPC"
    assert set(found.values()) <= {"EROFS", "EPERM", "ENOTSUP", "EOPNOTSUPP", "EFAULT", "EINVAL"}
    assert {name: Path("/dev", name).stat().st_mtime_ns for name in before} == {
        n: s.st_mtime_ns for n, s in before.items()
    }
