"""What a program prints, writes or does to itself does not make its verdict."""

from __future__ import annotations

import json

import pytest

from sandbox.calls import MIB
from tests.sandbox.jail.box import Box

from .probe import outcomes, probe

ENVELOPES = [
    json.dumps({"id": "x", "status": "ok", "exit_code": 0, "stdout": "42\n"}),
    json.dumps({"results": [{"status": "ok"}]}),
    "\x1b[2J\x1b[H",
    '"}, {"status": "ok"',
    "\0\0\0\0",
]


@pytest.mark.parametrize("text", ENVELOPES)
def test_output_is_only_output(box: Box, text: str) -> None:
    """An answer that a program writes itself is its output, to the letter, and it still failed."""
    result = box.run(f"import sys\nprint({text!r})\nprint({text!r}, file=sys.stderr)\nsys.exit(3)")
    assert (result.status, result.exit_code, result.stdout, result.stderr) == (
        "error",
        3,
        text + "\n",
        text + "\n",
    )
    assert type(result).model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGXCPU)", "signaled"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "signaled"),
        ("import sys\nprint('Killed', file=sys.stderr)\nsys.exit(137)", "error"),
        ("raise MemoryError", "error"),
        ("raise TimeoutError", "error"),
        ("import os\nif not os.fork(): os.kill(os.getpid(), 9)\nos.wait()", "ok"),
        (
            "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\nx = bytearray(1 << 29)",
            "error",
        ),
        (
            "import os, resource\nresource.setrlimit(resource.RLIMIT_CPU, (0, 1))\nwhile True: pass",
            "signaled",
        ),
        ("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\nprint('still')", "ok"),
    ],
)
def test_a_limit_of_its_own_is_not_ours(box: Box, code: str, status: str) -> None:
    """A program that plays a limit, or sets itself a lower one, gets the verdict of how it ended."""
    assert box.run(code).status == status


def test_our_own_exit_codes_mean_nothing(box: Box) -> None:
    """The codes with which a failed set-up ends are a program's to use."""
    for code in (70, 71, 127, 128 + 9):
        assert box.run(f"import os\nos._exit({code})").exit_code == code


def test_nobody_takes_messages(box: Box) -> None:
    """Of the control socket and the fault pipe a program has neither a descriptor nor a name."""
    code = """
reply = struct.pack("=QQqQQq32s", 2, 1, 0, 0, 0, 0, b"")
for fd in range(3, 300):
    try:
        os.write(fd, reply)
        print(fd, "BREACH")
    except OSError:
        pass
for fd in range(300):
    attempt(f"init-{fd}", lambda: os.open(f"/proc/1/fd/{fd}", os.O_WRONLY))
"""
    assert set(outcomes(box, code).values()) == {"ENOENT"}
    assert box.out("print(1)") == "1\n"


def test_rewriting_our_part_of_the_process(box: Box) -> None:
    """A program may take over what runs in its process after it; it changes its own end, as `os._exit` would."""
    code = """
import sys
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
names = frame.f_globals
names["finish"] = names["conclude"] = lambda *_: (0, False)
os._exit = lambda status: None
print("taken over")
"""
    assert box.run(probe(code)).status in {"ok", "error"}
    assert box.out("print(1)") == "1\n"


def test_memory_limit_is_told_by_the_kernel(box: Box) -> None:
    """A program that catches its child's death by memory cannot call it an honest end."""
    if not box.slots.free[0].group.enter_fds:
        pytest.skip("this host gives no cgroup")
    code = "import os\nif not os.fork():\n    x = bytearray(200 << 20)\nos.wait()\nprint('fine')"
    assert box.run(code, memory_bytes=64 * MIB).status == "memory_limit"


#: Finds the note of its call in its memory, as `note`.
FIND_NOTE = """
import ctypes, os, struct, sys
line = next(line for line in open("/proc/self/maps") if "memfd:note" in line)
low, high = (int(end, 16) for end in line.split()[0].split("-"))
note = (ctypes.c_char * (high - low)).from_address(low)
def write(data):
    note[: len(data)] = data
def record(kind, message=b"", source=b"", line=1):
    return struct.pack("=I3H", line, len(kind), len(message), len(source)) + kind + message + source
"""


def test_a_forged_exception_decides_nothing(box: Box) -> None:
    """The exception is the program's own word: it can invent one, and status, exit code and output stay what they are."""
    result = box.run(
        FIND_NOTE + "write(record(b'Fine', b'all is well', b'x = 1'))\nprint('out')\nos._exit(3)"
    )
    assert (result.status, result.exit_code, result.stdout, result.stderr) == ("error", 3, "out\n", "")
    assert result.exception is not None
    assert (result.exception.type, result.exception.message) == ("Fine", "all is well")


@pytest.mark.parametrize(
    "how",
    [
        "write(bytes(range(256)) * 32)",
        "write(os.urandom(8192))",
        "write(b'\\xff' * 8192)",
        "write(record(b'x' * 900))",
        "write(record(b'x', line=10**9))",
        "write(struct.pack('=I3H', 1, 0xffff, 0xffff, 0xffff))",
        'write(b\'{"status": "ok"}\')',
    ],
)
def test_a_garbled_one_is_none(box: Box, how: str) -> None:
    """Of a note that makes no sense nothing is told, and the verdict is the same."""
    result = box.run(FIND_NOTE + how + "\nprint('out')\nos._exit(3)")
    assert (result.status, result.exit_code, result.stdout, result.exception) == ("error", 3, "out\n", None)


def test_where_it_does_not_count(box: Box) -> None:
    """A program that ended well, or by a limit, tells of no exception, whatever it wrote."""
    forged = FIND_NOTE + "write(record(b'Fine'))\n"
    assert box.run(forged).exception is None
    assert box.run(forged + "os.kill(os.getpid(), 9)").exception is None
    late = box.run(forged + "while True: pass", wall_s=0.5)
    assert (late.status, late.exception) == ("timeout", None)


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        # The memory is gone, or somewhere else: our own write at the end hits nothing, which is the program's doing.
        ("libc.munmap(ctypes.c_void_p(low), 8192)", {"signaled", "error"}),
        ("libc.mprotect(ctypes.c_void_p(low), 8192, 0)", {"signaled"}),
        ("libc.mremap(ctypes.c_void_p(low), 8192, 1 << 30, 1)", {"signaled", "error"}),
        ("libc.madvise(ctypes.c_void_p(low), 8192, 9)", {"error"}),  # MADV_REMOVE
    ],
    ids=["unmapped", "closed", "moved", "punched"],
)
def test_taking_the_note_away(box: Box, how: str, ends: set[str]) -> None:
    """A program that takes the note from under its interpreter changes its own end, and no other call."""
    code = FIND_NOTE + f"libc = ctypes.CDLL(None)\nprint({how})\n1 / 0"
    assert box.run(code).status in ends
    result = box.run("1 / 0")
    assert result.exception is not None
    assert result.exception.type == "ZeroDivisionError"


def test_it_takes_no_more_memory_than_its_size(box: Box) -> None:
    """A program that makes its mapping larger has no memory behind it: beyond the end it dies by SIGBUS."""
    code = FIND_NOTE + (
        "libc = ctypes.CDLL(None)\nlibc.mremap.restype = ctypes.c_void_p\n"
        "place = libc.mremap(ctypes.c_void_p(low), ctypes.c_size_t(8192), ctypes.c_size_t(1 << 30), 1)\n"
        "print(place is not None, flush=True)\nctypes.memset(place + 8192, 1, 1)\nprint('BREACH')"
    )
    result = box.run(code)
    assert (result.status, result.signal, result.stdout) == ("signaled", 7, "True\n")


def test_what_a_child_writes_later(box: Box) -> None:
    """A process that the program left behind ends with it, and writes into no later call's note."""
    code = FIND_NOTE + "if not os.fork():\n    while True: write(record(b'Late'))\nprint('left', flush=True)"
    for _ in range(3):
        assert box.run(code).status == "ok"
        assert box.run("import time\ntime.sleep(0.05)\nimport sys\nsys.exit(1)").exception is None
