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
            arguments[test.argument] = 99 if test.operator in {"!=", "not in"} else test.operands[0]
        if rule.network in {None, box.jail.network} and rule.place != "shared":
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


#: Machine code that asks for getpid by the 32-bit numbers; the second changes to 32-bit mode first.
OLD_ENTRIES = {
    "interrupt": "b8 14000000 cd80 c3",  # mov eax, 20; int 0x80; ret
    # push 0x23; push page + 16; retfq; then in 32-bit mode: mov eax, 20; int 0x80; ud2
    "32-bit mode": "6a23 68 PAGE16 48cb" + "90" * 7 + "b8 14000000 cd80 0f0b",
}


@pytest.mark.skipif(MACHINE != "x86_64", reason="the 32-bit entry is a matter of x86")
@pytest.mark.parametrize("name", OLD_ENTRIES)
def test_the_32_bit_entry(box: Box, name: str) -> None:
    """A call by the old interrupt, whose numbers mean other calls, ends the process."""
    code = """
import mmap
LOW = 0x40  # MAP_32BIT: 32-bit code reaches no other addresses
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | LOW, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
address = ctypes.addressof(ctypes.c_char.from_buffer(page))
page.write(bytes.fromhex("CODE".replace("PAGE16", struct.pack("<I", address + 16).hex())))
print("before", flush=True)
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
""".replace("CODE", OLD_ENTRIES[name])
    result = box.run(probe(code))
    assert result.status == "signaled"
    assert result.signal in {signal.SIGSYS, signal.SIGSEGV}  # a kernel without the entry faults instead
    assert result.stdout == "before\n"


def test_the_filter_cannot_be_changed(box: Box) -> None:
    """A program can neither take its filter off nor have the kernel compile one of its own, also not in a thread or a child."""
    code = """
import threading
allow = struct.pack("HBBI", 6, 0, 0, 0x7fff0000)
buffer = ctypes.create_string_buffer(allow)
filter = struct.pack("HxxxxxxQ", 1, ctypes.addressof(buffer))
def tries(where):
    attempt(where + "-filter", lambda: syscall("prctl", 22, 2, filter, 0, 0))
    attempt(where + "-filter-high", lambda: syscall("prctl", 22 | 7 << 32, 2, filter, 0, 0))
    attempt(where + "-seccomp", lambda: syscall("seccomp", 1, 0, filter))
    attempt(where + "-strict", lambda: syscall("prctl", 22, 1, 0, 0, 0))
    attempt(where + "-off", lambda: syscall("prctl", 22, 0, 0, 0, 0))
    attempt(where + "-ptrace", lambda: syscall("ptrace", 0, 0, 0, 0))
tries("main")
thread = threading.Thread(target=tries, args=["thread"])
thread.start()
thread.join()
if not os.fork():
    tries("child")
    os._exit(0)
os.wait()
print("mode", syscall("prctl", 21, 0, 0, 0, 0))
"""
    found = outcomes(box, code)
    assert found.pop("mode") == "2"
    assert len(found) == 18
    assert set(found.values()) == {"EPERM"}


def test_both_stages_are_on(box: Box) -> None:
    """Two filters, mode 2, no new privileges; also for what the program starts."""
    look = "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('Seccomp', 'NoNewPrivs'))])"
    for code in (look, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {look!r}])"):
        assert box.out(code) == "['1', '2', '2']\n"


def test_no_modules_are_loaded(box: Box) -> None:
    """The kernel is not asked for modules: not by the old calls for bridges and vlans, which any socket takes."""
    code = """
import fcntl, socket
pair, _ = socket.socketpair()
for number in (0x8940, 0x8941, 0x89a0, 0x89a1, 0x8982, 0x8983):
    attempt(hex(number), lambda: fcntl.ioctl(pair, number, bytes(64)))
attempt("packet", lambda: syscall("socket", 17, 3, 0))
attempt("crypto", lambda: syscall("socket", 38, 5, 0))
attempt("module", lambda: syscall("finit_module", 0, b"", 0))
"""
    found = outcomes(box, code)
    assert {found.pop(name) for name in ("packet", "crypto", "module")} == {"EPERM"}
    assert set(found.values()) == {"ENOTSUP"}


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
