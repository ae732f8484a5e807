"""In /proc a program sees itself, and nothing of the host, the init, the forkserver or other calls."""

from __future__ import annotations

from tests.sandbox.jail.box import Box, program

from .probe import outcomes, probe, started_anew


def test_only_its_own_processes(box: Box) -> None:
    """No other process is listed or can be looked at by number, and nothing but processes is there at all."""
    code = """
print("listed", *sorted(os.listdir("/proc")))
others = []
for pid in [1, *range(3, 3000)]:
    try:
        os.stat(f"/proc/{pid}")
        others.append(pid)
    except OSError:
        pass
print("others", *others)
for name in ("sys", "kallsyms", "kcore", "meminfo", "loadavg", "stat", "net", "bus", "irq", "keys", "locks", "timer_list",
             "sysrq-trigger", "cmdline", "cpuinfo", "uptime", "version", "vmallocinfo", "modules", "swaps", "interrupts"):
    attempt(name, lambda: os.stat("/proc/" + name).st_mode)
"""
    for anew in (False, True):
        found = outcomes(box, code, anew=anew)
        assert (found.pop("listed"), found.pop("others")) == ("2 self thread-self", "")
        # `net` is a link into the process's own folder.
        assert found.pop("net", "ENOENT") == "ENOENT"
        assert set(found.values()) == {"ENOENT"}


def test_the_init_is_out_of_reach(box: Box) -> None:
    """The process that holds the call together cannot be read, traced or stopped."""
    code = """
for name in ("mem", "maps", "environ", "fd", "root", "cwd", "exe", "ns/mnt", "auxv", "syscall", "stack", "oom_score_adj"):
    attempt(name, lambda: os.open("/proc/1/" + name, os.O_RDONLY))
attempt("ptrace", lambda: syscall("ptrace", 16, 1, 0, 0))
attempt("read-memory", lambda: syscall("process_vm_readv", 1, 0, 0, 0, 0, 0))
"""
    for anew in (False, True):
        assert set(outcomes(box, code, anew=anew).values()) <= {"ENOENT", "EACCES", "EPERM"}


def test_its_own_folder_tells_nothing_of_the_worker(box: Box) -> None:
    """Environment and command line, also those that the process was started with, hold what we put there."""
    code = (
        "print(open('/proc/self/environ', 'rb').read().split(b'\\0'))\nprint(open('/proc/self/cmdline', 'rb').read())\n"
        "import os\nprint(sorted(os.environ))"
    )
    environ, cmdline, names = box.out(started_anew(code)).splitlines()
    allowed = {
        "HOME",
        "LANG",
        "OMP_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PATH",
        "PYTHONPATH",
        "PYTHONUTF8",
        "LC_CTYPE",
    }
    assert {entry.partition(b"=")[0].decode() for entry in eval(environ)} <= allowed | {""}
    assert set(eval(names)) <= allowed
    assert eval(cmdline).split(b"\0")[:2] == [b"/python/bin/python3", b"-c"]


def test_network_files_show_no_neighbour(box: Box) -> None:
    """The sockets of a call that runs at the same time in the same jail are in another list."""
    holder = "import socket, time\nkept = [socket.socketpair() for _ in range(20)]\ntime.sleep(0.5)"
    looker = "import time\ntime.sleep(0.2)\nprint(len(open('/proc/self/net/unix').readlines()), open('/proc/self/net/dev').read().count(':'))"
    held, looked = box.run_together([program(holder), program(looker)])
    assert (held.status, looked.stdout) == ("ok", "1 1\n")


def test_the_next_call_finds_no_sockets(box: Box) -> None:
    """Sockets that were in flight in a circle when a call ended are collected by the kernel in a moment."""
    leave = probe(
        "import socket, array\na, b = socket.socketpair()\nc, d = socket.socketpair()\n"
        "a.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [b.fileno(), d.fileno()]))])\n"
        "os._exit(0)"
    )
    assert box.run(leave).status == "ok"
    while box.out("print(len(open('/proc/self/net/unix').readlines()))") != "1\n":
        pass
