"""Level `process`: what it claims holds, on hosts that allow no namespace.

The programs run on three hosts, each a process that sees what it needs at a place open to every user: root as it is;
root in a container, which has the capabilities that Docker gives, no cgroups, and a filter that refuses namespaces and
mounts as Docker's does; and an ordinary user behind the same filter.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.held import descendants
from sandbox.calls import MIB, Limits, ToolCall
from sandbox.errors import ConfigError, JailError
from sandbox.jail import PRELOADS, Jail, host
from sandbox.jail.seccomp import compile_filter, parse
from sandbox.jail.selftest import check_walls
from sandbox.settings import JailSettings

from .box import SLEEP, SPIN, Box, alive, open_fds, until
from .elsewhere import report_from_elsewhere
from .test_watched import EXPECTED as WATCHED
from .test_watched import GROW, NONE, ORDINARY
from .test_watched import PROGRAMS as LIMITED

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="it takes root to show hosts with other users"),
    pytest.mark.skipif(
        host.landlock_abi() < 2, reason="this kernel has no Landlock that can move files (Linux 5.19)"
    ),
]

#: What Docker gives root unless told otherwise.
DOCKER = (
    "+chown,+dac_override,+fsetid,+fowner,+mknod,+net_raw,+setgid,+setuid,+setfcap,+setpcap,+net_bind_service,"
    "+sys_chroot,+kill,+audit_write"
)
HOSTS = ("root", "container", "ordinary")

#: Name -> program and what it must print. Programs find what the worker tells them in `told`.
TELL = "import json, os, sys\ntold = json.load(sys.stdin)\ndef refused(action):\n    try: action()\n    except OSError: return True\n    return False\n"
ORDINARY_PROGRAMS = {
    "print": ("print(6 * 7)", "42\n"),
    "own file": ("print(open(__file__).read() == open('main.py').read(), sys.path[0] == os.getcwd())", "True True\n"),
    "scratch": (
        ("import tempfile, pathlib, shutil\nfolder = pathlib.Path(tempfile.mkdtemp())\n(folder / 'a').write_text('x')\n"
        "shutil.copy2(folder / 'a', folder / 'b'); os.rename(folder / 'b', 'c'); os.symlink('c', 'd')\n"
        "print(open('d').read(), folder.parent == pathlib.Path.cwd() == pathlib.Path.home())"),
        "x True\n",
    ),
    "devices": ("print(open('/dev/null', 'w').write('x'), len(open('/dev/urandom', 'rb').read(8)))", "1 8\n"),
    "subprocess": ("import subprocess\nprint(subprocess.check_output('echo $((6*7)) | cat', shell=True, text=True))", "42\n\n"),
    "another interpreter": (
        ("import subprocess\ncode = 'import numpy; print(numpy.arange(3).sum())'\n"
        "print(subprocess.check_output([sys.executable, '-c', code], text=True))"),
        "3\n\n",
    ),
    "threads": ("import threading\nt = threading.Thread(target=print, args=(1,)); t.start(); t.join()", "1\n"),
    "pipes": (
        ("import multiprocessing as m\na, b = m.Pipe()\np = m.get_context('fork').Process(target=b.send, args=(5,)); p.start()\n"
        "print(a.recv()); p.join(); print(p.exitcode)"),
        "5\n0\n",
    ),
    "asyncio": ("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 3)))", "3\n"),
}  # fmt: skip
WALLS = {
    "files that are not its own": (
        ("names = ['/etc/shadow', '/etc/passwd', '/proc/1/environ', '/proc/self/status', '/proc/cpuinfo', told['file'], told['source']]\n"
        "print([name for name in names if not refused(lambda: open(name))])"),
        "[]\n",
    ),
    "folders that are not its own": (
        ("print([name for name in ['/', '/etc', '/proc', '/proc/self/fd', '/dev', '/tmp', '/home', '..', told['folder']]\n"
        "       if not refused(lambda: os.listdir(name))])"),
        "[]\n",
    ),
    "writing outside": (
        ("places = ['/tmp', '/var/tmp', '/dev/shm', '/run/lock', '..', told['folder'], os.environ['PYTHONPATH']]\n"
        "print([place for place in places if not refused(lambda: open(place + '/probe', 'w'))\n"
        "       or not refused(lambda: os.mkdir(place + '/probe'))\n"
        "       or not refused(lambda: os.symlink('main.py', place + '/probe'))])"),
        "[]\n",
    ),
    "changing what it can name": (
        ("open('own', 'w').close()\nname = told['file']\n"
        "print(refused(lambda: os.unlink(name)), refused(lambda: os.truncate(name, 0)), refused(lambda: os.rename(name, 'stolen')),\n"
        "      refused(lambda: os.rename('own', name)), refused(lambda: os.link(name, 'stolen')))"),
        "True True True True True\n",
    ),
    "the worker's memory and environment": (
        ("files = [f'/proc/{pid}/{name}' for pid in told['pids'] + [os.getppid()] for name in ('environ', 'mem', 'maps', 'cmdline', 'fd/0', 'cwd/x')]\n"
        "print([name for name in files if not refused(lambda: open(name))])"),
        "[]\n",
    ),
    "signals": (
        ("import fcntl, signal\npids = told['pids'] + [1, os.getppid()]\n"
        "for pid in pids:  # a pipe whose owner they are, and that kills by its news\n"
        "    read_end, write_end = os.pipe()\n"
        "    fcntl.fcntl(read_end, 10, 9); refused(lambda: fcntl.fcntl(read_end, fcntl.F_SETOWN, pid))\n"
        "    fcntl.fcntl(read_end, fcntl.F_SETFL, os.O_ASYNC); os.write(write_end, b'x')\n"
        "near = [pid for pid in range(max(2, os.getpid() - 2000), os.getpid() + 2000) if not refused(lambda: os.kill(pid, 0))]\n"
        "print([pid for pid in pids if not refused(lambda: os.kill(pid, 9))], near == [os.getpid()])\n"
        "try: os.kill(-1, 9)\nexcept OSError: pass"),
        "[] True\n",
    ),
    "how others are run": (
        ("import resource\nbad = []\nfor pid in told['pids'] + [os.getppid()]:\n"
        "    bad += [name for name, action in {\n"
        "        'nice': lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),\n"
        "        'cores': lambda: os.sched_setaffinity(pid, {0}),\n"
        "        'scheduler': lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),\n"
        "        'limits': lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (9, 9)),\n"
        "    }.items() if not refused(action)]\n"
        "bad += [] if refused(lambda: os.setpriority(os.PRIO_USER, told['owner'] or 1, 19)) else ['user']\n"
        "print(bad)"),
        "[]\n",
    ),
    "sockets": (
        ("import socket\nprint([f for f in range(1, 46) if not refused(lambda: socket.socket(f, socket.SOCK_STREAM))\n"
        "       or not refused(lambda: socket.socket(f, socket.SOCK_DGRAM))], len(socket.socketpair()))"),
        "[] 2\n",
    ),
    "system calls": (
        ("import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "calls = {'ptrace': (0, 0, 0, 0), 'mount': (b'none', b'.', b'tmpfs', 0, 0), 'unshare': (0x10000000,), 'setns': (0, 0),\n"
        "         'chroot': (b'.',), 'shmget': (0, 4096, 0o1600), 'memfd_create': (b'x', 0), 'inotify_init': ()}\n"
        "print([name for name, arguments in calls.items() if getattr(libc, name)(*arguments) != -1],\n"
        "      [number for number in (444, 445, 446) if libc.syscall(number, 0, 0, 1) != -1 or ctypes.get_errno() != 1])"),
        "[] []\n",
    ),
    "other users": (
        ("print(refused(lambda: os.setuid(0)), refused(lambda: os.setresuid(0, 0, 0)), refused(lambda: os.setgid(0)),\n"
        "      refused(lambda: os.setgroups([0])), os.getuid() == told['uid'])"),
        "True True True True True\n",
    ),
}  # fmt: skip
OUTLIVING = {
    "a daemon": "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        for fd in range(3): os.close(fd)\n        time.sleep(60)\n    os._exit(0)\nos.wait()\n",
    "stopped children": "import signal\nfor _ in range(3):\n    pid = os.fork()\n    if not pid: os.setsid(); os.kill(os.getpid(), signal.SIGSTOP)\n    os.waitpid(pid, os.WUNTRACED)\n",
    "a fork bomb": "try:\n    while True: os.fork()\nexcept OSError: time.sleep(60)\n",
    "those that fork for ever": "for _ in range(8):\n    if not os.fork():\n        while True:\n            if os.fork(): os._exit(0)\ntime.sleep(0.2)\n",
    "those that kill all they can": "import signal\nfor _ in range(4):\n    if not os.fork():\n        os.setsid()\n        while True:\n            try: os.kill(-1, 9)\n            except OSError: pass\ntime.sleep(60)\n",
    "a reaper of its own": "import ctypes\nctypes.CDLL(None).prctl(36, 1, 0, 0, 0)\nif not os.fork():\n    if not os.fork(): time.sleep(60)\n    os._exit(0)\nos.wait()\n",
    "those whose parent was killed": "import signal\nif not os.fork():\n    if not os.fork(): time.sleep(60)\n    time.sleep(60)\nos.kill(os.getpid(), 9)\n",
}  # fmt: skip
SHAPED = (
    "os.mkdir('closed', 0); os.makedirs('a/b'); os.symlink(told['folder'], 'a/link'); os.symlink('/', 'root')\n"
    "open('a/kept', 'w').write('x'); os.chmod('a/kept', 0)\nopen(b'\\xff\\n', 'w').close()\n"
    "for _ in range(3000): os.mkdir('0'); os.chdir('0')\nprint('made')"
)


# ---- what runs on each of the hosts ----


def children_of(box: Box) -> list[int]:
    """All that lives below the forkserver."""
    return [pid for pid in descendants(box.jail._pid) if alive(pid)]


def facts(box: Box, folder: Path) -> dict[str, Any]:
    """What programs are told of the host: the pids that they must not reach, and what its worker owns."""
    return {
        "pids": [os.getpid(), os.getppid(), box.jail._pid],
        "uid": box.slots.free[0].uid or os.geteuid(),
        "owner": os.geteuid(),
        "folder": str(folder),
        "file": str(folder / "owned"),
        "source": __file__,
    }


def run_all(box: Box, folder: Path) -> dict[str, Any]:
    """Every program, with what came of it and what was left."""
    told = json.dumps(facts(box, folder))
    results: dict[str, Any] = {}
    for name, (code, _) in (ORDINARY_PROGRAMS | WALLS).items():
        results[name] = dump(box, name, TELL + code, stdin=told, wall_s=20)
    for name, code in OUTLIVING.items():
        text = f"import os, time\n{code}"
        results[name] = dump(
            box, name, text, processes=20, wall_s=20 if name.startswith("those whose") else 2
        )
    for name, (code, limits) in LIMITED.items():
        results[f"limit {name}"] = dump(
            box, name, code, **{"memory_bytes": 128 * MIB, "wall_s": 20, **limits}
        )
    results["shaped"] = dump(box, "shaped", TELL + SHAPED, stdin=told, wall_s=20)
    neighbour = (
        "while not os.path.isdir('../1'): pass\n"
        "print(refused(lambda: os.listdir('../1')), refused(lambda: open('../1/main.py')), refused(lambda: open('../1/new', 'w')))\n"
    )
    results["together"] = [
        result.model_dump(mode="json")
        for result in box.run_together(
            [
                ToolCall(code="import time\ntime.sleep(1)\nprint('alive')", limits=Limits(wall_s=20)),
                ToolCall(code=TELL + neighbour + WALLS["signals"][0], stdin=told, limits=Limits(wall_s=20)),
            ]
        )
    ]
    return results


def dump(box: Box, name: str, code: str, **call: Any) -> dict[str, Any]:
    """Run one program; its result, the processes that outlived it, and what is left of its scratch folder."""
    assert box.host.scratch is not None
    result = box.run(code, **call)
    left = [len(children_of(box)), sorted(path.name for path in box.host.scratch.iterdir())]
    return {"name": name, "left": left, **result.model_dump(mode="json")}


async def kill_all(box: Box, who: Callable[[Box], int]) -> dict[str, Any]:
    """Kill a process of ours while calls run that have started daemons, and wait till none of theirs is left."""
    code = f"import os, time\n{OUTLIVING['a daemon']}\ntime.sleep(60)"
    calls = [asyncio.create_task(box.jail.run(ToolCall(code=code), slot)) for slot in box.slots.free]
    # For each call a guardian, the program, and its daemon.
    await until(lambda: len(children_of(box)) == 3 * len(calls))
    processes = [box.jail._pid, *children_of(box)]
    os.kill(who(box), signal.SIGKILL)
    errors = [str(error) for error in await asyncio.gather(*calls, return_exceptions=True)]
    await box.jail.close()
    await until(lambda: not any(alive(pid) for pid in processes))  # a guardian's pipe is closed as it ends
    assert box.host.scratch is not None
    return {
        "errors": errors,
        "left": [path.name for path in box.host.scratch.iterdir()],
    }


def guardian(box: Box) -> int:
    """One of the forkserver's children."""
    pid = box.jail._pid
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()[0])


KILLED = {"forkserver": lambda box: box.jail._pid, "guardian": guardian}


def serve_until_killed(runtime: str, place: str) -> None:
    """A worker of its own with a call that runs for long; it says who lives, and never ends."""
    box = Box(slots=1, settings=process_level(runtime), **({} if place == "host" else {"place": NONE}))
    code = f"import os, time\n{OUTLIVING['a daemon']}\ntime.sleep(60)"

    async def serve() -> None:
        call = asyncio.create_task(box.jail.run(ToolCall(code=code), box.slots.free[0]))
        await until(lambda: len(children_of(box)) == 3)
        print(json.dumps([box.jail._pid, *children_of(box)]), box.host.scratch, flush=True)
        await call

    box.do(serve())


def kill_worker(runtime: str, place: str) -> dict[str, Any]:
    """Kill a worker while a call runs, and wait till nothing of it is left. The next worker sweeps its folder."""
    code = f"from tests.sandbox.jail.test_level_process import *\nserve_until_killed({runtime!r}, {place!r})"
    worker = subprocess.Popen([sys.executable, "-s", "-B", "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    pids, _, scratch = worker.stdout.readline().strip().rpartition(" ")
    worker.kill()
    worker.wait()
    while any(alive(pid) for pid in json.loads(pids)):
        os.sched_yield()
    found = Path(scratch).exists()
    Box(slots=1, settings=process_level(runtime)).close()
    return {"processes": len(json.loads(pids)), "found": found, "left": Path(scratch).exists()}


def process_level(runtime: str | Path) -> JailSettings:
    """Settings of this level."""
    return JailSettings(level="process", runtime=Path(runtime))


def report(runtime: str, place: str) -> dict[str, Any]:
    """Everything, whoever we are."""
    change = {} if place == "host" else {"place": NONE}
    Box(slots=1, settings=process_level(runtime), **change).close()  # what Python opens on the way stays open
    fds = open_fds()
    with tempfile.TemporaryDirectory(prefix="owned-") as name:
        folder = Path(name)
        (folder / "owned").write_text("x")
        (folder / "owned").chmod(0o640)
        os.utime(folder / "owned", (1, 1))
        box = Box(slots=4, settings=process_level(runtime), **change)
        box.do(check_walls(box.jail, box.slots.free[0]))
        results = run_all(box, folder)
        about = (folder / "owned").stat()
        owned = [oct(about.st_mode & 0o777), about.st_mtime, sorted(path.name for path in folder.iterdir())]
        killed = {}
        for who, find in KILLED.items():
            killed[who] = box.do(kill_all(box, find))
            box.renew()
        after = box.out("print('well')")
        box.close()
    assert box.host.scratch is not None
    return {
        "uid": os.geteuid(),
        "results": results,
        "owned": owned,
        "killed": killed,
        "worker": kill_worker(runtime, place),
        "after": after,
        "left": [box.host.scratch.exists(), len(descendants(os.getpid())), open_fds() - fds],
    }


def refuse_namespaces() -> None:
    """As Docker's filter does: no new namespace, no way into another, no mount; clone3, whose flags it cannot see, is not there."""
    machine = os.uname().machine
    text = "\n".join(
        f"all {answer} {x86_64} {aarch64} {rest}"
        for answer, x86_64, aarch64, rest in [
            ("EPERM", 272, 97, "unshare"),
            ("EPERM", 308, 268, "setns"),
            ("EPERM", 165, 40, "mount"),
            ("EPERM", 166, 39, "umount2"),
            ("EPERM", 155, 41, "pivot_root"),
            ("EPERM", 56, 220, "clone arg0 & 0x7e020000"),
            ("ENOSYS", 435, 435, "clone3"),
        ]
    )
    program = compile_filter(parse(f"{text}\nnewest 999", machine), "all", "none", machine)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(22, 2, ctypes.c_char_p(header), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no filter")


# ---- the three hosts ----


def run_on(kind: str) -> dict[str, Any]:
    """The report of one host."""
    users = {
        "root": ["env"],
        "container": ["setpriv", f"--bounding-set=-all,{DOCKER}", "--inh-caps=-all"],
        "ordinary": ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", f"--groups={ORDINARY},100"],
    }

    def command(folder: Path, python: list[str]) -> list[str]:
        place = "host" if kind == "root" else "none"
        main = textwrap.dedent(f"""
            import json
            from tests.sandbox.jail.test_level_process import report
            print(json.dumps(report('{folder}/runtime', '{place}')))
        """)
        behind = [*users[kind], *python, main]
        if kind == "root":
            return behind
        # The filter before the user: it takes a privilege to put one up without giving up privileges for good.
        first = f"import os\nfrom tests.sandbox.jail.test_level_process import refuse_namespaces\nrefuse_namespaces()\nos.execvp({behind[0]!r}, {behind!r})"
        return [*python, first]

    return report_from_elsewhere(command, 240)


@pytest.fixture(scope="module", params=HOSTS)
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What each host reported."""
    if request.param == "ordinary" and host.landlock_abi() < host.SCOPE_ABI:
        pytest.skip("this kernel's Landlock does not bound signals (Linux 6.12)")
    return {"host": request.param, **run_on(request.param)}


def test_who_it_was(told: dict[str, Any]) -> None:
    """An ordinary user's worker is one, and the others are root."""
    assert told["uid"] == (ORDINARY if told["host"] == "ordinary" else 0)


@pytest.mark.parametrize("name", ORDINARY_PROGRAMS | WALLS)
def test_programs(told: dict[str, Any], name: str) -> None:
    """Ordinary programs run as elsewhere; others find each wall standing."""
    result = told["results"][name]
    assert (result["status"], result["stdout"], result["stderr"]) == (
        "ok",
        (ORDINARY_PROGRAMS | WALLS)[name][1],
        "",
    )


@pytest.mark.parametrize("name", LIMITED)
def test_limits(told: dict[str, Any], name: str) -> None:
    """Each limit holds, and what is within it is left alone; without shares, shared memory counts for each process."""
    expected = WATCHED[name]
    if name == "memory that forks share" and told["host"] != "root":
        expected = "memory_limit"
    result = told["results"][f"limit {name}"]
    assert result["status"] == expected, result


@pytest.mark.parametrize("name", [*OUTLIVING, *WALLS, "shaped"])
def test_nothing_outlives_its_call(told: dict[str, Any], name: str) -> None:
    """No process of the call is left when its result is there, and no scratch folder."""
    assert told["results"][name]["left"] == [0, []]


def test_what_was_shaped(told: dict[str, Any]) -> None:
    """A program could make the tree that was removed, and the folder that it linked to was not."""
    assert told["results"]["shaped"]["stdout"] == "made\n"
    assert told["owned"][2] == ["owned"]


def test_what_the_worker_owns(told: dict[str, Any]) -> None:
    """Neither modes nor times of it were changed, though an ordinary user's programs are its owner."""
    assert told["owned"][:2] == ["0o640", 1.0]


def test_calls_at_the_same_time(told: dict[str, Any]) -> None:
    """A neighbour is neither seen by signals nor ended by them, and its scratch folder is closed."""
    sleeper, killer = told["results"]["together"]
    assert (sleeper["status"], sleeper["stdout"]) == ("ok", "alive\n")
    assert (killer["status"], killer["stdout"]) == ("ok", "True True True\n" + WALLS["signals"][1])


@pytest.mark.parametrize("who", KILLED)
def test_killed_while_calls_run(told: dict[str, Any], who: str) -> None:
    """Every call raises JailError, nothing of them is left when the jail is gone, and the next jail is well."""
    assert told["killed"][who] == {
        "errors": ["the jail broke while the call ran"] * 4,
        "left": [],
    }
    assert told["after"] == "well\n"


def test_a_killed_worker(told: dict[str, Any]) -> None:
    """Forkserver, guardian, program and daemon end with it; its folder is there until the next worker comes."""
    assert told["worker"] == {"processes": 4, "found": True, "left": False}


def test_nothing_is_left(told: dict[str, Any]) -> None:
    """A worker that ends leaves no folder, no process and no descriptor."""
    assert told["left"] == [False, 0, 0]


# ---- what it refuses ----


@pytest.fixture
def reachable() -> JailSettings:
    """The runtime at a place that all users can reach."""
    settings = process_level(JailSettings().runtime)
    if host.process_lack(settings.runtime / "root", is_root=True) is not None:
        pytest.skip("the runtime of this checkout lies where only root can enter")
    return settings


def test_no_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without it is refused, with the remedy."""
    monkeypatch.setattr(host, "landlock_abi", lambda: 0)
    with pytest.raises(
        ConfigError, match=r"level process: the kernel has no Landlock; boot Linux 5\.13 or newer"
    ):
        host.prepare(process_level(JailSettings().runtime), 1)


def test_an_ordinary_user_needs_scopes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Below version 6 one user's programs could signal each other and the worker."""
    monkeypatch.setattr(host, "landlock_abi", lambda: 5)
    lack = host.process_lack(tmp_path, is_root=False)
    assert lack is not None
    assert "6.12" in lack[1]


def test_a_closed_runtime(tmp_path: Path) -> None:
    """Where slots' users cannot reach the runtime, the folder in the way is named."""
    (tmp_path / "closed").mkdir(mode=0o700)
    lack = host.process_lack(tmp_path / "closed", is_root=True)
    assert lack is not None
    assert "SANDBOX_JAIL__RUNTIME" in lack[1]


def test_capabilities() -> None:
    """Each that is not there is named."""
    assert host.capabilities_lacking("Name:\tx\nCapEff:\t00000000a80425fb\n") == []
    assert host.capabilities_lacking("CapEff:\t0000000000000100\n")[:2] == ["CHOWN", "DAC_OVERRIDE"]


def test_no_network_of_its_own(reachable: JailSettings) -> None:
    """A call that asks for a loopback device is refused: it would be the host's."""
    box = Box(slots=1, settings=reachable)
    with pytest.raises(JailError, match="net namespace"):
        box.do(Jail.start(box.host, PRELOADS[0], "loopback"))
    box.close()


def test_too_many_slots(reachable: JailSettings) -> None:
    """Each slot takes two uids."""
    with pytest.raises(ConfigError, match="uids for 2047"):
        host.prepare(reachable, 2048)


@pytest.mark.parametrize("kind", [each.name for each in PRELOADS])
def test_each_preload(reachable: JailSettings, kind: str) -> None:
    """Every forkserver warms up behind its walls, and runs a program."""
    box = Box(kind, slots=1, settings=reachable)
    assert box.out("import tempfile, os\nprint(tempfile.gettempdir() == os.getcwd())") == "True\n"
    box.close()


def test_cancelled_and_timed_out(reachable: JailSettings) -> None:
    """Whoever stops waiting for a call gets its slot back when nothing of it is left."""
    box = Box(slots=1, settings=reachable)

    async def cancel() -> None:
        call = asyncio.create_task(box.jail.run(ToolCall(code=SLEEP), box.slots.free[0]))
        await until(lambda: len(children_of(box)) == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    box.do(cancel())
    assert children_of(box) == []
    assert box.run(SPIN, wall_s=0.2).status == "timeout"
    assert box.run(GROW, memory_bytes=64 * MIB).status == "memory_limit"
    box.close()
