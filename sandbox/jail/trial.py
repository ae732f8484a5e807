"""Tries, in a process of its own, what a jail needs from the kernel. hostcheck.py starts it as a script.

Prints one JSON object: the name of each step that was tried, and the kernel's answer where it refused, else
an empty text. What follows a refused step is not tried. Nothing outside this process changes: all is done in
new namespaces.

Rule: standard library only, and no import of ours, so that it starts in 20 ms and under any interpreter.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, _EFAULT = 22, 2, 14
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
_CLONE_NEWUSER = 0x10000000
_NAMESPACES = {
    "mount": 0x00020000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "net": 0x40000000,
    "cgroup": 0x02000000,
    "pid": 0x20000000,
}
MOUNT_STEPS = ("private mounts", "tmpfs mount", "proc mount")
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Try each step and print what happened."""
    answers = {"seccomp filter": _seccomp()}
    steps: dict[str, Callable[[], None]] = {"user namespace": lambda: _unshare(_CLONE_NEWUSER)}
    ids = os.geteuid(), os.getegid()
    steps["id mapping"] = lambda: _map_ids(*ids)
    for name, flag in _NAMESPACES.items():
        steps[f"{name} namespace"] = functools.partial(_unshare, flag)
    if _try(steps, answers):
        answers |= _in_new_pid_namespace()
    print(json.dumps(answers))


def _try(steps: Mapping[str, Callable[[], None]], answers: dict[str, str]) -> bool:
    """Do one after the other until one is refused."""
    for name, step in steps.items():
        try:
            step()
        except OSError as exc:
            answers[name] = exc.strerror or str(exc)
            return False
        answers[name] = ""
    return True


def _seccomp() -> str:
    """A kernel that knows filters calls a filter at address 0 a bad address, another a bad argument."""
    _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, None, 0, 0)
    return "" if ctypes.get_errno() == _EFAULT else os.strerror(ctypes.get_errno())


def _map_ids(uid: int, gid: int) -> None:
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"0 {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"0 {gid} 1", encoding="ascii")


def _in_new_pid_namespace() -> dict[str, str]:
    """Mount as the first process of the new pid namespace, which alone may mount its /proc."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        answers: dict[str, str] = {}
        _try(dict(zip(MOUNT_STEPS, (_make_private, _mount_tmpfs, _mount_proc), strict=True)), answers)
        os.write(writer, json.dumps(answers).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found: dict[str, str] = json.loads(file.read())
    os.waitpid(pid, 0)
    return found


def _make_private() -> None:
    _succeed(_libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None))


def _mount_tmpfs() -> None:
    _succeed(_libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None))


def _mount_proc() -> None:
    _succeed(_libc.mount(b"proc", b"/tmp", b"proc", 0, None))


def _unshare(flag: int) -> None:
    _succeed(_libc.unshare(flag))


def _succeed(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()
