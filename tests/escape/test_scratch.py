"""What a program writes has a bound, lies in memory that is charged to it, and goes with it."""

from __future__ import annotations

from sandbox.calls import MIB
from tests.sandbox.jail.box import Box

from .probe import outcomes, probe

FILL = """
def fill(folder):
    written = n = 0
    try:
        while True:
            with open(f"{folder}/{n}", "wb", buffering=0) as file:
                n += 1
                for _ in range(32):
                    written += file.write(bytes(1 << 20))
    except OSError as exc:
        return written, errno.errorcode[exc.errno]
"""


def test_sizes(box: Box) -> None:
    """Both folders are full at their size, together and also with space in many files."""
    code = FILL + "print('tmp', *fill('/tmp'))\nprint('shm', *fill('/dev/shm'))"
    found = outcomes(box, code)
    tmp, shm = (outcome.split() for outcome in (found["tmp"], found["shm"]))
    assert box.host.scratch_bytes * 0.9 < int(tmp[0]) <= box.host.scratch_bytes
    assert 30 * MIB < int(shm[0]) <= 32 * MIB
    assert tmp[1] == shm[1] == "ENOSPC"


def test_inodes(box: Box) -> None:
    """Empty files, folders and links are bounded by number."""
    code = """
def make(action):
    n = 0
    try:
        while n < 100_000:
            action(n)
            n += 1
    except OSError as exc:
        return n, errno.errorcode[exc.errno]
print("folders", *make(lambda n: os.mkdir(f"/tmp/d{n}")))
print("shm", *make(lambda n: open(f"/dev/shm/{n}", "w").close()))
os.rmdir("/tmp/d0")
print("links", *make(lambda n: os.symlink("x" * 4000, f"/tmp/l{n}")))
"""
    found = outcomes(box, code)
    assert found["folders"].split()[1] == found["shm"].split()[1] == "ENOSPC"
    assert box.host.scratch_inodes - 10 < int(found["folders"].split()[0]) <= box.host.scratch_inodes
    assert int(found["shm"].split()[0]) <= 64
    assert found["links"] == "1 ENOSPC"


def test_one_file(box: Box) -> None:
    """One file is bounded too, sparse or not, and the program is told by an error, not by a signal."""
    code = """
file = open("/tmp/big", "wb")
attempt("sparse", lambda: os.truncate("/tmp/big", 1 << 40))
attempt("seek", lambda: os.pwrite(file.fileno(), b"x", 65 << 20))
attempt("allocate", lambda: os.posix_fallocate(file.fileno(), 0, 65 << 20))
"""
    assert set(outcomes(box, code).values()) <= {"EFBIG", "ENOSPC"}


def test_deep_and_long_names(box: Box) -> None:
    """Neither a tree as deep as it can be nor the longest names disturb the end of the call."""
    code = """
depth = 0
try:
    while True:
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
        depth += 1
except OSError as exc:
    print(depth, errno.errorcode[exc.errno])
"""
    assert box.run(probe(code)).usage.wall_s < 3
    assert box.out("import os\nprint(os.listdir('/tmp'))") == "['main.py']\n"


def test_all_is_given_back(box: Box) -> None:
    """After a call that filled everything, its memory is free again: what a small limit could not hold is not charged."""
    for _ in range(3):
        assert box.run(probe(FILL + "fill('/tmp'); fill('/dev/shm')")).status == "ok"
        assert box.run("x = bytearray(8 << 20)", memory_bytes=16 * MIB).status == "ok"
