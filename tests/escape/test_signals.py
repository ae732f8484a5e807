"""A program can signal, trace and steer its own processes, and no others."""

from __future__ import annotations

import os
import signal
import subprocess

from sandbox.jail.policy import Identity
from tests.sandbox.jail.box import Box, program

from .probe import outcomes, probe


def test_nobody_else_is_there(box: Box) -> None:
    """No number names a process of the host or of another call, whatever is asked of it."""
    code = """
import resource, signal
pids = [*range(3, 2000), 4000, 10**6, 4194303]
attempts = {
    "kill": lambda pid: os.kill(pid, 0),
    "term": lambda pid: os.kill(pid, 15),
    "group": lambda pid: os.killpg(pid, 9),
    "queue": lambda pid: syscall("rt_sigqueueinfo", pid, 10, bytes(128)),
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "affinity": lambda pid: os.sched_setaffinity(pid, {0}),
    "limit": lambda pid: resource.prlimit(pid, resource.RLIMIT_CPU),
    "session": lambda pid: os.getsid(pid),
}
for name, action in attempts.items():
    reached = []
    for pid in pids:
        try:
            action(pid)
            reached.append(pid)
        except (OSError, ValueError):
            pass
    print(name, "BREACH" if reached else "nobody", *reached)
"""
    assert set(outcomes(box, code, wall_s=20).values()) == {"nobody"}


def test_the_init_does_not_care(box: Box) -> None:
    """Signals to the init are refused or ignored, so that the call ends as it would have."""
    code = """
import signal, time
for number in range(1, 65):
    if number not in (32, 33):
        try:
            os.kill(1, number)
            print(number, "sent")
        except OSError as exc:
            print(number, errno.errorcode[exc.errno])
print("alive", os.getppid())
"""
    found = outcomes(box, code)
    assert found.pop("alive") == "0"
    assert set(found.values()) <= {"EPERM", "sent"}
    assert box.out("print(1)") == "1\n"


def test_an_init_of_the_same_user(box: Box) -> None:
    """Where there is one user for all, the init is still out of reach: a limit on its CPU time would end the call."""
    identity = Identity(box.host.identity.uid, box.host.identity.gid, None)
    one_user = Box(slots=1, identity=identity)
    code = """
import resource
for number in range(16):
    attempt(f"look-{number}", lambda: resource.prlimit(1, number))
attempt("limit", lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)))
attempt("limit-call", lambda: syscall("prlimit64", 1 | 1 << 32, 0, struct.pack("QQ", 1, 1), 0))
attempt("priority", lambda: os.setpriority(os.PRIO_PROCESS, 1, 19))
attempt("schedule", lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)))
attempt("cores", lambda: os.sched_setaffinity(1, {0}))
attempt("disk", lambda: syscall("ioprio_set", 1, 1, 3 << 13))
attempt("memory", lambda: open("/proc/1/oom_score_adj", "w"))
attempt("trace", lambda: syscall("ptrace", 16, 1, 0, 0))
print("user", os.getuid(), resource.prlimit(0, resource.RLIMIT_CORE), resource.prlimit(os.getpid(), resource.RLIMIT_CORE))
"""
    try:
        found = outcomes(one_user, code)
    finally:
        one_user.close()
    assert found.pop("user") == "0 (0, 0) (0, 0)"
    assert set(found.values()) <= {"EPERM", "ENOENT"}


def test_killing_everything(box: Box) -> None:
    """A program that kills all that it can reach kills its own children; a call beside it ends well."""
    killer = probe(
        "import signal, subprocess, time\nchildren = [subprocess.Popen(['sleep', '60']) for _ in range(3)]\n"
        "for number in (15, 9): os.kill(-1, number)\nprint([child.wait() for child in children])"
    )
    killed, other = box.run_together(
        [program(killer), program("import time\ntime.sleep(0.4)\nprint('well')")]
    )
    assert (killed.stdout, other.stdout) == ("[-15, -15, -15]\n", "well\n")


def test_killing_everything_spares_the_host(box: Box) -> None:
    """A process of the host with the same user as the program is not reached."""
    user = box.host.identity.first_slot or os.geteuid()
    with subprocess.Popen(["sleep", "60"], user=user) as bystander:
        box.run(
            "import os\nfor number in (15, 9):\n    try: os.kill(-1, number)\n    except ProcessLookupError: pass"
        )
        assert bystander.poll() is None
        bystander.send_signal(signal.SIGKILL)


def test_no_look_into_processes(box: Box) -> None:
    """Debugging and everything like it is refused, even among the program's own."""
    code = """
child = os.fork()
if not child:
    import time
    time.sleep(5)
attempt("attach", lambda: syscall("ptrace", 16, child, 0, 0))
attempt("seize", lambda: syscall("ptrace", 0x4206, child, 0, 0))
attempt("traceme", lambda: syscall("ptrace", 0, 0, 0, 0))
attempt("read", lambda: syscall("process_vm_readv", child, 0, 0, 0, 0, 0))
attempt("kcmp", lambda: syscall("kcmp", child, os.getpid(), 0, 0, 0))
attempt("pidfd", lambda: os.pidfd_open(child))
attempt("getfd", lambda: syscall("pidfd_getfd", 0, 0, 0))
attempt("memory-of-child", lambda: open(f"/proc/{child}/mem", "rb"))
os.kill(child, 9)
"""
    assert set(outcomes(box, code).values()) <= {"EPERM", "EACCES", "ENOENT"}


def test_no_signal_by_a_descriptor(box: Box) -> None:
    """A file's owner, who is signalled when there is input, can only be a process that the program sees."""
    code = """
import fcntl
read_end, write_end = os.pipe()
for pid in (1, 3, 1000):
    attempt(f"owner-{pid}", lambda: fcntl.fcntl(read_end, fcntl.F_SETOWN, pid) and 0)
fcntl.fcntl(read_end, 10, 9)
fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_ASYNC)
os.write(write_end, b"x")
print("owner", fcntl.fcntl(read_end, fcntl.F_GETOWN) in (0, 1))
"""
    text = box.out(probe(code))
    assert text.splitlines()[-1] == "owner True"
    assert "owner-3 ESRCH" in text
    assert "owner-1000 ESRCH" in text


def test_queued_signals_are_counted_for_each_call(box: Box) -> None:
    """A program that queues all it may leaves its neighbours theirs."""
    queue = """
import ctypes, os, signal, time
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, [40])
queued = 0
while queued < MOST and libc.sigqueue(os.getpid(), 40, None) == 0:
    queued += 1
print(queued, flush=True)
time.sleep(WAIT)
"""
    greedy = program(queue.replace("MOST", "10**6").replace("WAIT", "0.6"))
    modest = program("import time\ntime.sleep(0.3)" + queue.replace("MOST", "50").replace("WAIT", "0"))
    most, few = box.run_together([greedy, modest])
    assert 0 < int(most.stdout) <= 1024
    assert few.stdout == "50\n"
