"""What programs that push at a wall have in common: they try, and print what came of it."""

from __future__ import annotations

import platform
from typing import Any

from tests.sandbox.jail.box import Box

#: Runs before each probe. `attempt` prints one line; `syscall` raises OSError as libc's wrappers in Python do.
PRELUDE = """
import ctypes, errno, os, platform, struct, sys
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
NR = NUMBERS

def syscall(name, *arguments):
    number = NR[name] if isinstance(name, str) else name
    ctypes.set_errno(0)
    result = _libc.syscall(ctypes.c_long(number), *(
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    ))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def attempt(name, action):
    try:
        result = action()
    except OSError as exc:
        print(name, errno.errorcode[exc.errno], flush=True)
    except Exception as exc:
        print(name, type(exc).__name__, flush=True)
    else:
        print(name, "BREACH", repr(result)[:200], flush=True)
"""

#: Calls that Python has no function for, by machine.
_NUMBERS = {
    "x86_64": {
        "clone": 56, "clone3": 435, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155,
        "fsopen": 430, "open_tree": 428, "move_mount": 429, "mount_setattr": 442, "keyctl": 250, "add_key": 248,
        "request_key": 249, "ptrace": 101, "process_vm_readv": 310, "pidfd_getfd": 438, "kcmp": 312,
        "shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "inotify_init1": 294, "capset": 126,
        "setgroups": 116, "setresuid": 117, "setresgid": 119, "memfd_create": 319, "ioprio_set": 251,
        "open_by_handle_at": 304, "rt_sigqueueinfo": 129, "seccomp": 317, "process_madvise": 440, "fchownat": 260,
        "open": 2, "openat": 257, "openat2": 437, "fcntl": 72, "fsync": 74, "fdatasync": 75, "sync_file_range": 277,
        "msync": 26, "sync": 162, "fadvise64": 221, "tee": 276, "vmsplice": 278, "setxattr": 188, "lsetxattr": 189,
        "fsetxattr": 190, "setxattrat": 463, "prctl": 157, "futex": 202, "utimensat": 280, "vfork": 58,
        "socket": 41, "socketpair": 53, "finit_module": 313, "madvise": 28, "clock_nanosleep": 230, "prlimit64": 302,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41,
        "fsopen": 430, "open_tree": 428, "move_mount": 429, "mount_setattr": 442, "keyctl": 219, "add_key": 217,
        "request_key": 218, "ptrace": 117, "process_vm_readv": 270, "pidfd_getfd": 438, "kcmp": 272,
        "shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "inotify_init1": 26, "capset": 91,
        "setgroups": 159, "setresuid": 147, "setresgid": 149, "memfd_create": 279, "ioprio_set": 30,
        "open_by_handle_at": 265, "rt_sigqueueinfo": 138, "seccomp": 277, "process_madvise": 440, "fchownat": 54,
        "openat": 56, "openat2": 437, "fcntl": 25, "fsync": 82, "fdatasync": 83, "sync_file_range": 84,
        "msync": 227, "sync": 81, "fadvise64": 223, "tee": 77, "vmsplice": 75, "setxattr": 5, "lsetxattr": 6,
        "fsetxattr": 7, "setxattrat": 463, "prctl": 167, "futex": 98, "utimensat": 88,
        "socket": 198, "socketpair": 199, "finit_module": 273, "madvise": 233, "clock_nanosleep": 115, "prlimit64": 261,
    },
}  # fmt: skip


def probe(code: str) -> str:
    """A program with the words above."""
    return PRELUDE.replace("NUMBERS", repr(_NUMBERS[platform.machine()])) + code


def started_anew(code: str) -> str:
    """The program, run by an interpreter that it starts in its place: a fresh one may read its own /proc."""
    return f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {code!r}])"


def outcomes(box: Box, code: str, *, anew: bool = False, **call: Any) -> dict[str, str]:
    """Run a probe that must end well; its lines as name and outcome. A wall that gave way fails here."""
    whole = probe(code)
    lines = box.out(started_anew(whole) if anew else whole, **call).splitlines()
    assert lines, "the probe tried nothing"
    assert not [line for line in lines if "BREACH" in line]
    return {name: outcome for name, _, outcome in (line.partition(" ") for line in lines)}
