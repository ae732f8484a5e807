"""What we fail at, and how a jail ends: nothing is left, nothing is a verdict, and the next call is well."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.held import descendants
from sandbox.calls import ToolResult
from sandbox.errors import JailError
from sandbox.jail import PRELOADS, Jail, Slot
from sandbox.jail import jail as jail_module
from sandbox.jail.cgroups import Group, GroupUsage

from .box import SLEEP, Box, alive, open_fds, program, until


def fill_gaps() -> list[int]:
    """Descriptors on all free numbers up to some above the highest in use."""
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    return [os.dup(0) for _ in range(highest + 3 - open_fds())]


class BadGroup:
    """A group whose file no program can enter through."""

    needs_pids = False

    def __init__(self) -> None:
        self.enter_fds = (os.open("/dev/null", os.O_RDONLY),)

    def begin(self, memory_bytes: int, processes: int) -> None:
        """Nothing."""

    def exceeded(self, cpu_s: float) -> None:
        """Nothing."""

    def end(self) -> GroupUsage:
        """Nothing was used."""
        return GroupUsage(0.0, 0, 0)

    def is_empty(self) -> bool:
        """Nobody could enter."""
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self.enter_fds[0])


class OddGroup:
    """A real group that cannot be read, in a way that nobody foresaw."""

    def __init__(self, real: Group) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def exceeded(self, cpu_s: float) -> None:
        """Fail, every time."""
        raise ValueError("a counter that is no number")


class FewWatches:
    """An epoll of a user who may have no more than so many further watches."""

    def __init__(self, real: select.epoll, watches: int) -> None:
        self._real = real
        self._watches = watches

    def register(self, fd: int, events: int) -> None:
        """Watch, or say what the kernel says."""
        if not self._watches:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._watches -= 1
        self._real.register(fd, events)

    def unregister(self, fd: int) -> None:
        """Watch no more."""
        self._real.unregister(fd)


class TestFaults:
    """What we fail at is a JailError, never a verdict, and leaves a jail that works."""

    def test_a_group_that_cannot_be_entered(self, box: Box) -> None:
        """A step that fails in the child is named with the reason."""
        group = BadGroup()
        for _ in range(3):
            with pytest.raises(JailError, match="'enter cgroup': Bad file descriptor"):
                box.do(box.jail.run(program("print(1)"), Slot(1, group)))
        group.close()
        assert box.out("print(1)") == "1\n"

    def test_a_call_that_cannot_be_watched(self, box: Box) -> None:
        """Whatever goes wrong when one call is looked at: no call beside it runs on without its limits."""
        odd = Slot(box.slots.free[0].uid, OddGroup(box.slots.free[0].group))

        async def beside() -> list[ToolResult | BaseException]:
            endless = program("while True: pass", wall_s=50, cpu_s=50)
            calls = [box.jail.run(endless, odd), box.jail.run(endless, box.slots.free[1])]
            return await asyncio.gather(*calls, return_exceptions=True)

        assert [type(result) for result in box.do(beside())] == [JailError, JailError]
        box.renew()
        assert box.out("print(1)") == "1\n"

    def test_pipes_that_another_process_has_for_a_while(self, box: Box) -> None:
        """A process that is just being started has all our descriptors; a call that ended meanwhile harms no later one."""

        async def forked_while_it_runs() -> tuple[ToolResult, int, int]:
            call = asyncio.create_task(
                box.jail.run(program("input(); print(1)", stdin="\n"), box.slots.free[0])
            )
            await asyncio.sleep(0)  # its pipes are there
            told, tell = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(tell)
                os.read(told, 1)
                os._exit(0)
            os.close(told)
            return await call, child, tell

        first, child, tell = box.do(forked_while_it_runs())
        assert first.stdout == "1\n"
        assert [box.out(f"print({n})") for n in range(5)] == [f"{n}\n" for n in range(5)]
        os.close(tell)
        os.waitpid(child, 0)

    def test_a_user_that_is_not_mapped(self, box: Box) -> None:
        """A slot beyond the jail's users has none to run as."""
        if box.host.identity.first_slot is None:
            pytest.skip("an ordinary user has one user to give")
        with pytest.raises(JailError, match="'mount /tmp': Invalid argument"):
            box.do(box.jail.run(program("print(1)"), Slot(50_000, box.slots.free[0].group)))
        assert box.out("print(1)") == "1\n"

    def test_a_limit_that_the_host_refuses(self, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without one of its limits a program does not run."""
        with monkeypatch.context() as patch:
            patch.setattr(jail_module, "OPEN_FILES", 2**40)
            with pytest.raises(JailError, match="'RLIMIT_NOFILE': Operation not permitted"):
                box.run("print(1)")
        assert descendants(box.forkserver_pid()) == []
        assert box.out("print(1)") == "1\n"

    def test_many_faults_at_once(self, box: Box) -> None:
        """Faults of calls that were started together are told apart from each other and from honest calls."""
        group = BadGroup()

        async def mixed() -> list[ToolResult | BaseException]:
            bad = [box.jail.run(program("print('never')"), Slot(n, group)) for n in range(100, 140)]
            good = [box.jail.run(program(f"print({n})"), box.slots.free[n]) for n in range(4)]
            return await asyncio.gather(*bad, *good, return_exceptions=True)

        results = box.do(mixed())
        group.close()
        assert all(isinstance(result, JailError) for result in results[:-4])
        assert [result.stdout for result in results[-4:] if isinstance(result, ToolResult)] == [
            "0\n",
            "1\n",
            "2\n",
            "3\n",
        ]

    @pytest.mark.parametrize("watches", [0, 1])
    def test_no_watches_left(self, box: Box, monkeypatch: pytest.MonkeyPatch, watches: int) -> None:
        """A user has so many watches; where they are used up the call fails, and the jail keeps nothing of it."""
        before = open_fds()
        with monkeypatch.context() as patch:
            patch.setattr(box.jail, "_epoll", FewWatches(box.jail._epoll, watches))
            with pytest.raises(JailError, match="No space left on device"):
                box.run("print(1)")
        assert open_fds() == before
        assert box.jail._idle.is_set()
        assert box.out("print(1)") == "1\n"

    def test_no_descriptors_left(self, box: Box) -> None:
        """A worker without a descriptor to spare fails the call, loses none, and runs the next one."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        before = open_fds()

        async def run_short() -> set[bool]:
            outcomes = set()
            for spare in range(10):
                gaps = fill_gaps()
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(gaps) + 1 + spare, hard))
                try:
                    result = await box.jail.run(program("print(1)", stdin="x"), box.slots.free[0])
                    outcomes.add(result.stdout == "1\n")
                except JailError as exc:
                    outcomes.add("Too many open files" not in exc.message)
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    for fd in gaps:
                        os.close(fd)
            return outcomes

        assert box.do(run_short()) == {False, True}
        assert open_fds() == before
        assert box.out("print(1)") == "1\n"

    def test_a_forkserver_that_speaks_nonsense(self) -> None:
        """A reply that is no reply ends the jail, not the worker."""
        box = Box(slots=1)
        try:
            box.jail._on_reply = None  # type: ignore[method-assign,assignment] # nothing may come this far

            async def run() -> None:
                call = asyncio.create_task(box.jail.run(program(SLEEP), box.slots.free[0]))
                await asyncio.sleep(0)
                # The forkserver answers a message of the wrong size by ending.
                box.jail._control.send(b"x")
                with pytest.raises(JailError, match="broke while the call ran"):
                    await call

            box.do(run())
        finally:
            box.close()


KILLS: dict[str, Callable[[Box], int]] = {
    "forkserver": Box.forkserver_pid,
    "nsjail": lambda box: box.jail._pid,
}


class TestEnds:
    """How a jail ends, and what is left: nothing."""

    @pytest.fixture
    def own_box(self) -> Iterator[Box]:
        """A jail that the test may end."""
        box = Box(slots=4)
        yield box
        box.close()

    @pytest.mark.parametrize("who", KILLS)
    def test_killed_while_calls_run(self, own_box: Box, who: str) -> None:
        """Every call raises JailError at once, every process is gone, and no further call is taken."""

        async def kill() -> list[int]:
            calls = [
                asyncio.create_task(own_box.jail.run(program(SLEEP), slot)) for slot in own_box.slots.free
            ]
            # The forkserver; for each call an init and a program.
            await until(lambda: len(descendants(own_box.jail._pid)) == 9)
            processes = descendants(own_box.jail._pid)
            os.kill(KILLS[who](own_box), signal.SIGKILL)
            async with asyncio.timeout(1.5):
                results = await asyncio.gather(*calls, return_exceptions=True)
            assert [str(result) for result in results] == ["the jail broke while the call ran"] * 4
            assert own_box.jail.worn.is_set()
            with pytest.raises(JailError):
                await own_box.jail.run(program("print(1)"), own_box.slots.free[0])
            await own_box.end()
            return processes

        assert not any(alive(pid) for pid in own_box.do(kill()))
        assert all(slot.group.is_empty() for slot in own_box.slots.free)
        own_box.renew()
        assert own_box.out("print(1)") == "1\n"

    def test_a_forkserver_that_hangs(self, own_box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        """When a killed call does not end, the whole jail is ended, by force."""
        monkeypatch.setattr(jail_module, "KILL_S", 0.2)
        monkeypatch.setattr(jail_module, "END_S", 0.2)
        processes = descendants(own_box.jail._pid)

        async def hang() -> None:
            os.kill(own_box.forkserver_pid(), signal.SIGSTOP)
            with pytest.raises(JailError):
                await own_box.jail.run(program("print(1)", wall_s=0.1), own_box.slots.free[0])
            await own_box.end()

        own_box.do(hang())
        assert not any(alive(pid) for pid in processes)
        own_box.renew()

    def test_close_while_calls_run(self, own_box: Box) -> None:
        """A call that runs when the jail is closed raises JailError."""

        async def close() -> BaseException | ToolResult:
            call = asyncio.create_task(own_box.jail.run(program(SLEEP), own_box.slots.free[0]))
            await until(lambda: len(descendants(own_box.jail._pid)) == 3)
            await own_box.end()
            return (await asyncio.gather(call, return_exceptions=True))[0]

        assert isinstance(own_box.do(close()), JailError)
        own_box.renew()

    def test_retire_waits_for_the_last_call(self, own_box: Box) -> None:
        """A jail that retires lets running calls finish."""

        async def retire() -> ToolResult:
            call = asyncio.create_task(
                own_box.jail.run(program("import time\ntime.sleep(0.3)\nprint(1)"), own_box.slots.free[0])
            )
            await asyncio.sleep(0)
            await own_box.end(retire=True)
            assert call.done()
            return await call

        assert own_box.do(retire()).stdout == "1\n"
        own_box.renew()

    def test_worn_after_its_time(self, own_box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        """A jail that has run its number of calls says so, and goes on until it is replaced."""
        monkeypatch.setattr(jail_module, "WORN_CALLS", 3)
        worn = []
        for _ in range(4):
            own_box.out("print(1)")
            worn.append(own_box.jail.worn.is_set())
        assert worn == [False, False, True, True]

    def test_worn_with_age(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A jail that nobody calls is replaced as well, after its time."""
        monkeypatch.setattr(jail_module, "WORN_S", 0.001)
        box = Box(slots=1)
        assert box.do(box.jail.worn.wait())
        assert box.out("print(1)") == "1\n"
        box.close()

    def test_nothing_is_left(self) -> None:
        """A jail that was opened, used and closed leaves no process, no descriptor and no group."""
        Box(slots=2).close()  # what Python itself opens on the way stays open
        before = open_fds(), set(descendants(os.getpid()))
        box = Box(slots=2)
        groups = [Path(f"/proc/self/fd/{fd}").readlink().parent for fd in box.slots.free[0].group.enter_fds]
        box.out("print(1)")
        box.run(SLEEP, wall_s=0.1)
        box.close()
        assert (open_fds(), set(descendants(os.getpid()))) == before
        assert not any(group.exists() for group in groups)

    def test_200_calls_leave_everything_as_it_was(self, own_box: Box) -> None:
        """Worker and forkserver have as many descriptors as before, and the forkserver no byte more memory."""
        kinds = [
            "print(1)",
            "1 / 0",
            "while True: print('x' * 999)",
            "import os\nos.abort()",
            "import os\nos.fork()",
        ]

        def run_all() -> None:
            for n in range(100):
                own_box.run_together(program(kinds[(n + each) % 5], wall_s=2) for each in range(2))

        def look() -> tuple[int, int, str]:
            proc = Path(f"/proc/{own_box.forkserver_pid()}")
            memory = next(
                line for line in (proc / "status").read_text().splitlines() if line.startswith("VmData")
            )
            return open_fds(), len(list((proc / "fd").iterdir())), memory

        own_box.run_together(program("print(1)") for _ in range(2))
        before = look()
        run_all()
        assert look() == before
        assert descendants(own_box.forkserver_pid()) == []


class TestStart:
    """Jails that do not start, and what they inherit."""

    def start(self, box: Box, **change: object) -> Jail:
        """Try to start another jail with a changed host."""
        return box.do(Jail.start(dataclasses.replace(box.host, **change), PRELOADS[0]))  # type: ignore[arg-type]

    def test_no_nsjail(self, box: Box, tmp_path: Path) -> None:
        """A binary that is not there is a JailError, and loses nothing."""
        before = open_fds()
        with pytest.raises(JailError, match="nsjail cannot be started"):
            self.start(box, nsjail=tmp_path / "missing")
        assert open_fds() == before

    @pytest.mark.parametrize("change", [{"nsjail": Path("/bin/false")}, {"root": Path("/proc/nowhere")}])
    def test_nsjail_that_ends(
        self, box: Box, change: dict[str, object], caplog: pytest.LogCaptureFixture
    ) -> None:
        """One that ends before it serves is a JailError; what it said is in the log."""
        before = open_fds(), set(descendants(os.getpid()))
        with pytest.raises(JailError, match="ended before it served"):
            self.start(box, **change)
        assert (open_fds(), set(descendants(os.getpid()))) == before
        said = [record.text for record in caplog.records if record.msg == "jail says"]  # type: ignore[attr-defined]
        assert bool(said) == ("root" in change)

    def test_a_filter_that_the_kernel_refuses(self, box: Box) -> None:
        """Without its filter a forkserver does not serve."""
        with pytest.raises(JailError, match="ended before it served"):
            self.start(box, filters={"none": (b"", b"")})

    def test_cancelled_while_it_starts(self, box: Box) -> None:
        """Whoever stops waiting for a jail leaves no half-started one behind."""
        before = open_fds(), set(descendants(os.getpid()))

        async def cancel() -> None:
            task = asyncio.create_task(Jail.start(box.host, PRELOADS[3]))
            await until(lambda: set(descendants(os.getpid())) != before[1])
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        box.do(cancel())
        assert (open_fds(), set(descendants(os.getpid()))) == before

    def test_the_terminal_does_not_reach_it(self, box: Box) -> None:
        """A Ctrl-C is for the worker, which drains: the jail is in a session of its own."""
        assert os.getsid(box.jail._pid) == box.jail._pid != os.getsid(0)

    def test_ignored_signals_are_not_inherited(self) -> None:
        """A worker that was started with signals ignored or blocked, as by nohup, runs programs as any other."""
        code = (
            "import signal\n"
            "for number in (signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
            "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGALRM, signal.SIGXCPU])\n"
            "from tests.sandbox.jail.box import Box\n"
            "box = Box(slots=1)\n"
            "print(box.out('import os, signal\\nprint(signal.pthread_sigmask(0, []), *map(signal.getsignal, (2, 17, 15, 1)))'), end='')\n"
            "print(box.run('import os\\nos.kill(os.getpid(), 2)').signal)\n"
            "box.close()\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[3],
            timeout=30,
            check=False,
        )
        expected = "set() <built-in function default_int_handler> 0 0 0\n2\n"
        assert (done.stdout, done.stderr) == (expected, "")


@pytest.mark.parametrize("after", range(1, 6))
def test_a_jail_that_is_given_up_while_it_starts_is_gone(box: Box, after: int) -> None:
    """However early that is, nobody waits for what its forkserver would have loaded."""
    endless = dataclasses.replace(PRELOADS[0], warm_up="while True: pass")

    async def give_up() -> set[int]:
        before = set(descendants(os.getpid()))
        starting = asyncio.create_task(Jail.start(box.host, endless))
        await until(lambda: len(set(descendants(os.getpid())) - before) >= 2)  # nsjail, and its child
        for _ in range(after**3):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        return set(descendants(os.getpid())) - before

    assert box.do(give_up()) == set()
