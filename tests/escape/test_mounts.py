"""A program cannot change what it sees of any file system, nor leave its root."""

from __future__ import annotations

import pytest

from sandbox.settings import JailSettings
from tests.sandbox.jail.box import Box

from .probe import outcomes


def test_no_mount_call(box: Box) -> None:
    """Old and new interface, also for what needs no right outside, as binding and remounting."""
    code = """
b = ctypes.create_string_buffer
attempt("tmpfs", lambda: syscall("mount", b"none", b"/tmp", b"tmpfs", 0, 0))
attempt("bind", lambda: syscall("mount", b"/python", b"/tmp", 0, 4096, 0))
attempt("remount", lambda: syscall("mount", 0, b"/", 0, 32 | 4096, 0))
attempt("proc", lambda: syscall("mount", b"proc", b"/proc", b"proc", 0, 0))
attempt("shared", lambda: syscall("mount", 0, b"/", 0, 1 << 20, 0))
for name in ("/tmp", "/proc", "/dev/shm", "/dev/null", "/"):
    attempt("umount-" + name, lambda: syscall("umount2", name.encode(), 2))
attempt("pivot", lambda: syscall("pivot_root", b"/tmp", b"/tmp"))
attempt("chroot", lambda: os.chroot("/tmp"))
attempt("fsopen", lambda: syscall("fsopen", b"tmpfs", 0))
attempt("open-tree", lambda: syscall("open_tree", -100, b"/", 1))
attempt("move-mount", lambda: syscall("move_mount", -100, b"/tmp", -100, b"/python", 0))
attempt("setattr", lambda: syscall("mount_setattr", -100, b"/", 0, struct.pack("4Q", 0, 1, 0, 0), 32))
attempt("handle", lambda: syscall("open_by_handle_at", -100, struct.pack("II8s", 8, 1, bytes(8)), 0))
"""
    assert set(outcomes(box, code).values()) == {"EPERM"}


def test_no_way_up(box: Box) -> None:
    """Every way up ends at the jail's root, which holds the jail's folders and nothing of the host."""
    code = """
home = sorted(os.listdir("/"))
for path in ("..", "../" * 50, "/proc/self/root", "/proc/self/root/../..", "/proc/self/cwd/../..", "/proc/2/root/.."):
    os.chdir("/tmp")
    print(path.replace("../" * 50, "far"), "same" if sorted(os.listdir(path)) == home else "BREACH " + str(os.listdir(path)))
print("root", *home)
"""
    found = outcomes(box, code)
    assert found.pop("root").split() == [
        "bin",
        "dev",
        "etc",
        "jail",
        "lib",
        "lib64",
        "proc",
        "python",
        "sys",
        "tmp",
        "usr",
        "var",
    ]
    assert set(found.values()) == {"same"}


def test_mounts_are_few(box: Box) -> None:
    """All that is mounted: the root and five devices, read-only, and what is the call's own."""
    mounts = [
        line.split() for line in box.out("print(open('/proc/self/mountinfo').read())").splitlines() if line
    ]
    points = {fields[4]: fields[5].split(",") for fields in mounts}
    own = {"/tmp", "/dev/shm", "/proc"}
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")}
    assert set(points) == {"/"} | devices | own
    assert all("ro" in options for point, options in points.items() if point not in own)
    assert all({"nosuid", "nodev"} <= set(points[point]) for point in own)


@pytest.mark.xfail(strict=True, reason="the kernel shows where on the host's disk a bind mount comes from")
def test_the_host_s_paths_are_not_visible(box: Box) -> None:
    """The mount table does not tell where the runtime lies on the host."""
    assert JailSettings().runtime.name not in box.out("print(open('/proc/self/mountinfo').read())")
