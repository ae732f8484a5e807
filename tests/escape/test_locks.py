"""Files that all calls can open say nothing from one call to another."""

from __future__ import annotations

import pytest

from tests.sandbox.jail.box import Box, program

from .probe import outcomes, probe

FILES = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/random",
    "/dev/urandom",
    "/python/bin/python3",
    "/etc/passwd",
    "/",
]

#: How a lock is taken: by process, by open file, by the old call, as a lease.
LOCKS = {
    "process": "fcntl.fcntl(fd, fcntl.F_SETLK, struct.pack('hhqqi4x', KIND, 0, 0, 7, 0))",
    "open file": "fcntl.fcntl(fd, 37, struct.pack('hhqqi4x', KIND, 0, 0, 7, 0))",
    "flock": "fcntl.flock(fd, fcntl.LOCK_NB | (fcntl.LOCK_EX if KIND == fcntl.F_WRLCK else fcntl.LOCK_SH))",
    "lease": "fcntl.fcntl(fd, 1024, KIND)",
}

#: Takes one kind of lock on every file that lets it, and holds them.
_HOLD = """
import fcntl, time
kept = []
for path in FILES:
    for mode in (os.O_RDONLY, os.O_RDWR):
        try:
            fd = os.open(path, mode)
            kept.append(fd)
            LOCK
        except OSError:
            pass
time.sleep(0.7)
"""

#: Asks in every way whether somebody holds one, each time with a new open file.
_ASK = """
import fcntl, time
time.sleep(WAIT_S)
def ask(name, path, mode, action):
    try:
        fd = os.open(path, mode)
    except OSError as exc:
        return print(path, mode, name, "open", exc.errno)
    try:
        action(fd)
        print(path, mode, name, "free")
    except OSError as exc:
        print(path, mode, name, errno.errorcode[exc.errno])
    os.close(fd)
for path in FILES:
    for mode in (os.O_RDONLY, os.O_RDWR):
        for KIND in (fcntl.F_RDLCK, fcntl.F_WRLCK):
            for name, lock in LOCKS.items():
                ask(f"{name} {KIND}", path, mode, lambda fd: eval(lock))
            for command in (5, 36):
                ask(f"get {command} {KIND}", path, mode, lambda fd: fcntl.fcntl(fd, command, struct.pack("hhqqi4x", KIND, 0, 0, 7, 0)))
        for command in (1025, 1035):
            ask(f"hint {command}", path, mode, lambda fd: print(fcntl.fcntl(fd, command, bytes(8))))
    print(path, os.stat(path).st_mtime_ns, os.stat(path).st_ctime_ns, os.stat(path).st_nlink)
"""


def lock_probe(text: str, **words: str) -> str:
    """A probe with its words filled in."""
    for word, value in {"FILES": repr(FILES), "LOCKS": repr(LOCKS), **words}.items():
        text = text.replace(word, value)
    return probe(text)


@pytest.mark.parametrize("kind", ["fcntl.F_RDLCK", "fcntl.F_WRLCK"])
@pytest.mark.parametrize("lock", LOCKS)
def test_locks_of_a_neighbour(box: Box, lock: str, kind: str) -> None:
    """Whoever asks gets the same answers beside a call that holds locks on all files as alone."""
    alone = box.out(lock_probe(_ASK, WAIT_S="0"))
    hold = lock_probe(_HOLD, LOCK=LOCKS[lock].replace("KIND", kind))
    held, beside = box.run_together([program(hold), program(lock_probe(_ASK, WAIT_S="0.2"))])
    assert (held.status, beside.status) == ("ok", "ok")
    assert beside.stdout == alone
    assert len(alone.splitlines()) > 200


def test_locks_that_a_program_needs_work(box: Box) -> None:
    """In its own folder a program can lock against itself, as databases do."""
    code = (
        "import fcntl, os\nf = open('lock', 'w')\nfcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "if not os.fork():\n    try:\n        fcntl.lockf(open('lock', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n    except BlockingIOError:\n        print('locked', flush=True)\n"
        "    os._exit(0)\nos.wait()"
    )
    assert box.out(code) == "locked\n"


@pytest.mark.parametrize("path", ["/tmp", "/python", "/dev/null", "/"])
def test_no_watches(box: Box, path: str) -> None:
    """No file can be watched for what others do with it."""
    code = f"""
import fcntl
attempt("inotify", lambda: syscall("inotify_init1", 0))
attempt("fanotify", lambda: syscall({{"x86_64": 300}}.get(platform.machine(), 262), 0, 0))
attempt("dnotify", lambda: fcntl.fcntl(os.open({path!r}, os.O_RDONLY), 1026, 0x8000001f))
attempt("lease", lambda: fcntl.fcntl(os.open({path!r}, os.O_RDONLY), 1024, fcntl.F_RDLCK))
"""
    assert set(outcomes(box, code).values()) <= {"EPERM"}


def test_reading_leaves_no_time(box: Box) -> None:
    """Reading a file does not change when it was last read."""
    look = "import os\nprint([os.stat(path).st_atime_ns for path in ('/etc/passwd', '/usr/bin', '/jail/forkserver.py')])"
    before = box.out(look)
    box.out(
        "import os\nopen('/etc/passwd').read(); os.listdir('/usr/bin'); open('/jail/forkserver.py').read()"
    )
    assert box.out(look) == before
