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
