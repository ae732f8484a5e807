"""The system call list holds in the jail itself: every rule is tried with the real call."""

from __future__ import annotations

import errno
import platform
import signal
from importlib import resources

import pytest

from sandbox.jail.seccomp import parse
from tests.sandbox.jail.box import Box

from .probe import outcomes, probe

MACHINE = platform.machine()
POLICY = parse(
    resources.files("sandbox.jail").joinpath("policy.seccomp").read_text(encoding="utf-8"), MACHINE
)


def test_every_rule(box: Box) -> None:
    """Each denied call answers as the policy says, with arguments for which nothing would happen if it did not."""
    rules = []
    for number, rule in enumerate(POLICY.rules):
        arguments = [0] * 6 if rule.tests else [-1] * 6
        for test in rule.tests:
            arguments[test.argument] = 3 if test.operator in {"!=", "not in"} else test.operands[0]
        if rule.network in {None, box.jail.network}:
            rules.append((f"{number}-{rule.name}", rule.number, arguments))
    code = f"""
for name, number, arguments in {rules!r}:
    try:
        print(name, syscall(number, *arguments))
    except OSError as exc:
        print(name, errno.errorcode[exc.errno])
"""
    answers = {0: "0", **errno.errorcode}
    wanted = {f"{n}-{rule.name}": answers[rule.answer] for n, rule in enumerate(POLICY.rules)}
    assert outcomes(box, code) == {name: wanted[name] for name, _, _ in rules}


def test_unknown_calls(box: Box) -> None:
    """Numbers above the newest reviewed one answer as an older kernel would, and so do those of x32."""
    code = f"""
for number in [*range({POLICY.newest + 1}, {POLICY.newest + 200}), 1 << 30, (1 << 30) + 39, (1 << 30) + 520, 2**31 - 1]:
    attempt(str(number), lambda: syscall(number, 0, 0, 0, 0, 0, 0))
"""
    assert set(outcomes(box, code).values()) == {"ENOSYS"}


@pytest.mark.skipif(MACHINE != "x86_64", reason="the 32-bit entry is a matter of x86")
def test_the_32_bit_entry(box: Box) -> None:
    """A call by the old interrupt, whose numbers mean other calls, ends the process."""
    code = """
import mmap
page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
page.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    result = box.run(probe(code))
    assert result.status == "signaled"
    assert result.signal in {signal.SIGSYS, signal.SIGSEGV}  # a kernel without the entry faults instead
    assert result.stdout == ""


def test_the_filter_cannot_be_taken_off(box: Box) -> None:
    """A program can only tighten its filter; one that allows everything changes nothing."""
    code = """
allow = struct.pack("HBBI", 6, 0, 0, 0x7fff0000)
buffer = ctypes.create_string_buffer(allow)
filter = struct.pack("HxxxxxxQ", 1, ctypes.addressof(buffer))
assert _libc.prctl(22, 2, filter, 0, 0) == 0
attempt("ptrace", lambda: syscall("ptrace", 0, 0, 0, 0))
attempt("seccomp", lambda: syscall("seccomp", 0, 0, 0))
attempt("strict-off", lambda: _libc.prctl(22, 0, 0, 0, 0) and (_ for _ in ()).throw(OSError(1, "")))
"""
    assert set(outcomes(box, code).values()) == {"EPERM"}


def test_both_stages_are_on(box: Box) -> None:
    """Two filters, mode 2, no new privileges; also for what the program starts."""
    look = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('Seccomp', 'NoNewPrivs'))])"
    for code in (look, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {look!r}])"):
        assert box.out(code) == "['1', '2', '2']\n"


def test_executing_memory_outside_of_the_scratch_folder(box: Box) -> None:
    """No anonymous file can be made, and none can be executed from shared memory."""
    code = """
import shutil, subprocess
attempt("memfd", lambda: os.memfd_create("x"))
attempt("memfd-call", lambda: syscall("memfd_create", b"x", 0))
attempt("memfd-secret", lambda: syscall(447, 0))
shutil.copy(os.path.realpath("/bin/true"), "/dev/shm/true")
attempt("shm", lambda: subprocess.run(["/dev/shm/true"]))
"""
    found = outcomes(box, code)
    assert set(found.values()) <= {"EPERM", "EACCES"}
