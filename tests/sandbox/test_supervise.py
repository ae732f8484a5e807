"""The supervisor, with small Python programs as children, real signals and real sockets.

Each life of a child connects to the test, says its name and number, and reports what happens to it there; the
end of the connection is the end of the life. So every wait is for an event.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox import supervise
from sandbox.errors import ConfigError, Unavailable
from sandbox.outlet import Outlet
from sandbox.supervise import Child, Program, Stage, Supervisor

PROGRAM = """
import os, signal, socket, subprocess, sys, time
name, port, *ways = sys.argv[1:]
link = socket.create_connection(("127.0.0.1", int(port)))
link.sendall(f"{name} {os.getpid()}\\n".encode())
def on_term(*_):
    link.sendall(b"asked\\n")
    if "stubborn" not in ways:
        sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
if "fork" in ways:
    child = ["stay" if way == "fork" else way for way in ways]
    subprocess.Popen([sys.executable, "-c", os.environ["PROGRAM"], name + "-child", port, *child])
if "loud" in ways:
    for number in range(50_000):
        print(number, "x" * 99)
    sys.stdout.flush()
link.sendall(b"up\\n")
print("hello from", name, end="", flush=True)
while True:
    time.sleep(1000)
"""


@dataclass
class Life:
    """One life of a child."""

    name: str
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def reports(self, word: str) -> None:
        """Wait until it says this."""
        assert (await self.reader.readline()).decode().strip() == word

    async def ended(self) -> None:
        """Wait for its end."""
        while await self.reader.readline():
            pass


@dataclass
class Nursery:
    """Where children report to."""

    port: int
    lives: asyncio.Queue[Life]
    outlet_fd: int = 2
    failures: asyncio.Queue[BaseException] = field(default_factory=asyncio.Queue)
    children: list[Child] = field(default_factory=list)

    def program(self, name: str, *ways: str, grace_s: float = 30.0, **options: float) -> Program:
        command = [sys.executable, "-c", PROGRAM, name, str(self.port), *ways]
        return Program(name, command, {"PROGRAM": PROGRAM}, grace_s, **options)

    def start(self, program: Program) -> Child:
        self.children.append(Child(program, self.failures.put_nowait, Outlet(self.outlet_fd)))
        return self.children[-1]

    async def born(self) -> Life:
        """The next life that is up."""
        life = await self.lives.get()
        await life.reports("up")
        return life


@pytest.fixture
async def nursery() -> AsyncIterator[Nursery]:
    lives: asyncio.Queue[Life] = asyncio.Queue()
    writers = []

    async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        name, pid = (await reader.readline()).decode().split()
        lives.put_nowait(Life(name, int(pid), reader, writer))

    async with await asyncio.start_server(welcome, "127.0.0.1") as server:
        nursery = Nursery(server.sockets[0].getsockname()[1], lives)
        yield nursery
        for child in nursery.children:
            child.kill()
            await child.stop()
        for writer in writers:
            writer.close()


def python(code: str) -> Program:
    return Program("small", [sys.executable, "-c", code], {}, grace_s=30.0)


async def test_a_child_that_dies_is_started_again(nursery: Nursery) -> None:
    """SIGKILL ends one life, and a new process takes its place."""
    nursery.start(nursery.program("a"))
    first = await nursery.born()
    os.kill(first.pid, signal.SIGKILL)
    second = await nursery.born()
    assert second.pid != first.pid


async def test_a_child_that_was_well_is_never_given_up(nursery: Nursery) -> None:
    """However often it dies after that, it comes back."""
    nursery.start(nursery.program("a", well_after_s=0.0))
    for _ in range(5):
        os.kill((await nursery.born()).pid, signal.SIGKILL)
    await nursery.born()
    assert nursery.failures.empty()


async def test_a_child_that_somebody_restarts_is_back_at_once(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that was well and ends with 0 is no failure: no pause comes before its next life, however often."""
    monkeypatch.setattr(supervise, "_FIRST_PAUSE_S", 3600.0)
    nursery.start(nursery.program("a", well_after_s=0.0))
    for _ in range(5):
        os.kill((await nursery.born()).pid, signal.SIGTERM)
    await nursery.born()
    assert nursery.failures.empty()


async def test_a_child_that_ends_with_0_before_it_was_well_is_given_up(nursery: Nursery) -> None:
    """A program that does nothing and calls that a success would be started for ever."""
    nursery.start(python("pass"))
    assert "small does not stay up (exit code 0)" in str(await nursery.failures.get())


async def test_a_child_that_never_gets_well_is_given_up_with_its_last_words(nursery: Nursery) -> None:
    """After the third early death its exit code and its last lines make the error."""
    nursery.start(python("import sys; print('about to', flush=True); sys.exit('fail')"))
    failure = await nursery.failures.get()
    assert isinstance(failure, ConfigError)
    said = "\n    about to\n    fail"
    assert failure.message == f"small does not stay up (exit code 1). The last it said:{said}"


@pytest.mark.parametrize(
    ("code", "words"),
    [("raise SystemExit(2)", "exit code 2"), ("import os; os.kill(os.getpid(), 11)", "SIGSEGV")],
)
async def test_the_error_says_how_the_child_ended(nursery: Nursery, code: str, words: str) -> None:
    """A refused start (exit code 2) and a signal are named."""
    nursery.start(python(code))
    assert f"({words}). The last it said: nothing" in str(await nursery.failures.get())


async def test_a_refused_start_is_not_tried_again(nursery: Nursery, tmp_path: Path) -> None:
    """Exit code 2 of a child that was never well ends it at once."""
    count = tmp_path / "count"
    nursery.start(python(f"open({str(count)!r}, 'a').write('x'); raise SystemExit(2)"))
    await nursery.failures.get()
    assert count.read_text() == "x"


async def test_a_slow_refusal_is_one_too(nursery: Nursery) -> None:
    """A child that lived long enough to count as well, and then refuses its start, is given up all the same."""
    slow = Program("slow", [sys.executable, "-c", "raise SystemExit(2)"], {}, grace_s=30.0, well_after_s=0.0)
    nursery.start(slow)
    assert "slow does not stay up (exit code 2)" in str(await nursery.failures.get())


async def test_a_refusal_after_the_stack_was_ready_is_tried_again(nursery: Nursery, tmp_path: Path) -> None:
    """A child that comes back to a host which refuses it for a while ends no stack that has served."""
    away = tmp_path / "away"
    code = f"""
import os, sys
if os.path.exists({str(away)!r}):
    os.unlink({str(away)!r})
    sys.exit(2)
os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], *sys.argv[1:]])
"""
    program = Program(
        "a", [sys.executable, "-c", code, "a", str(nursery.port)], {"PROGRAM": PROGRAM}, grace_s=30.0
    )
    ready = asyncio.Event()

    async def wait_until_ready() -> None:
        await ready.wait()
        away.touch()
        os.kill(first.pid, signal.SIGKILL)  # its end is seen after we return

    running = asyncio.create_task(Supervisor([Stage("one", [program], wait_until_ready)], Outlet(2)).run())
    first = await nursery.born()
    ready.set()
    await nursery.born()
    assert not away.exists()
    os.kill(os.getpid(), signal.SIGTERM)
    await running


async def test_a_program_that_is_not_there_is_given_up(nursery: Nursery) -> None:
    """The error names the child and the file."""
    nursery.start(Program("lost", ["/nowhere/at-all"], {}, grace_s=1.0))
    with pytest.raises(ConfigError, match=r"lost does not start: .*/nowhere/at-all"):
        raise await nursery.failures.get()


async def test_stop_asks_first(nursery: Nursery) -> None:
    """A child gets SIGTERM, may finish, and is not started again."""
    child = nursery.start(nursery.program("a"))
    life = await nursery.born()
    await child.stop()
    await life.reports("asked")
    await life.ended()
    assert nursery.lives.empty()


async def test_stop_kills_after_the_grace(nursery: Nursery) -> None:
    """A child that does not end in time is killed, with all that it started."""
    child = nursery.start(nursery.program("a", "stubborn", "fork", grace_s=0.2))
    lives = [await nursery.born(), await nursery.born()]
    await child.stop()
    for life in lives:
        await life.ended()


async def test_what_a_dead_child_leaves_behind_is_killed(nursery: Nursery) -> None:
    """Processes of its group do not outlive it into its next life."""
    nursery.start(nursery.program("a", "fork"))
    lives = {life.name: life for life in (await nursery.born(), await nursery.born())}
    os.kill(lives["a"].pid, signal.SIGKILL)
    await lives["a-child"].ended()
    assert (await nursery.born()).name.startswith("a")


async def test_what_children_say_goes_to_stderr_by_whole_lines(
    nursery: Nursery, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Both stdout and stderr of a child come out of our stderr unchanged, the last line ended."""
    child = nursery.start(python("import sys, time; print('a\\xff\\nb'); sys.stdout.flush(); sys.exit('c')"))
    await nursery.failures.get()
    await child.stop()
    assert capfdbinary.readouterr() == (b"", "a\xff\nb\nc\n".encode() * 3)


async def test_nobody_need_read_what_children_say(nursery: Nursery, caplog: pytest.LogCaptureFixture) -> None:
    """A child that says more than anybody reads goes on; what is heard is whole, what is lost is counted."""
    ours, nursery.outlet_fd = os.pipe()
    nursery.start(nursery.program("a", "loud"))
    await nursery.born()  # though 5 MB do not fit into the pipe
    os.set_blocking(ours, False)
    heard = b""
    lost = 0
    while heard.count(b"\n") + lost < 50_000:
        with contextlib.suppress(BlockingIOError):
            heard += os.read(ours, 1 << 20)
        await asyncio.sleep(0)
        lost = sum(vars(record)["lines_lost"] for record in caplog.records)
    numbers = [int(line.removesuffix(b" " + b"x" * 99)) for line in heard.splitlines()]
    assert numbers == sorted(set(numbers))
    assert 0 < lost < 50_000 - 10_000
    for fd in (ours, nursery.outlet_fd):
        os.close(fd)


async def test_a_reader_that_has_gone_is_nobody(nursery: Nursery) -> None:
    """A child's life does not depend on the terminal that its supervisor was started in."""
    ours, nursery.outlet_fd = os.pipe()
    os.close(ours)
    nursery.start(nursery.program("a", "loud"))
    await nursery.born()
    os.close(nursery.outlet_fd)


async def test_a_quiet_child_is_heard_when_it_fails(
    nursery: Nursery, capfdbinary: pytest.CaptureFixture[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """What it says goes nowhere while all is well, and into the log and the error when it ends unasked."""
    code = "import sys; print('banner', flush=True); sys.exit('reason')"
    child = nursery.start(Program("q", [sys.executable, "-c", code], {}, grace_s=30.0, quiet=True))
    assert "banner\n    reason" in str(await nursery.failures.get())
    await child.stop()
    assert capfdbinary.readouterr().err == b""
    assert [vars(record)["said"] for record in caplog.records] == [["banner", "reason"]] * 2


async def test_stages_start_in_order_and_end_backwards(nursery: Nursery) -> None:
    """The second stage starts when the first is ready; at the end the first is asked when the second is gone."""
    ready = asyncio.Event()
    stubborn = nursery.program("b", "stubborn", grace_s=0.2)
    stages = [Stage("one", [nursery.program("a")], ready.wait), Stage("two", [stubborn])]
    running = asyncio.create_task(Supervisor(stages, Outlet(2)).run())
    a = await nursery.born()
    assert (a.name, nursery.lives.empty()) == ("a", True)
    ready.set()
    b = await nursery.born()

    os.kill(os.getpid(), signal.SIGTERM)
    await b.reports("asked")
    await a.reports("asked")
    with pytest.raises(ProcessLookupError):
        os.kill(b.pid, 0)
    await running


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_kills_everything(nursery: Nursery, first: signal.Signals) -> None:
    """No grace is waited for, in no stage, when somebody asks twice."""
    stages = [
        Stage("one", [nursery.program("a", "stubborn")]),
        Stage("two", [nursery.program("b", "stubborn")]),
    ]
    running = asyncio.create_task(Supervisor(stages, Outlet(2)).run())
    lives = {life.name: life for life in (await nursery.born(), await nursery.born())}
    os.kill(os.getpid(), first)
    await lives["b"].reports("asked")
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    for life in lives.values():
        await life.ended()


async def test_a_child_that_is_given_up_ends_the_stack(nursery: Nursery) -> None:
    """The others are ended in order, and the reason is raised."""
    stages = [Stage("one", [nursery.program("a")]), Stage("two", [python("raise SystemExit(2)")])]
    with pytest.raises(ConfigError, match="small does not stay up"):
        await Supervisor(stages, Outlet(2)).run()


async def test_a_stage_that_does_not_get_ready_ends_the_stack(nursery: Nursery) -> None:
    """What `ready` raises is raised, after everything has been ended."""
    lives: list[Life] = []

    async def never() -> None:
        lives.append(await nursery.born())
        raise Unavailable("not in time")

    with pytest.raises(Unavailable, match="not in time"):
        await Supervisor([Stage("one", [nursery.program("a")], never)], Outlet(2)).run()
    await lives[0].ended()


async def test_no_child_outlives_a_killed_supervisor(nursery: Nursery) -> None:
    """SIGKILL on the supervisor reaches its children as SIGTERM, by the kernel."""
    code = f"""
import asyncio
from sandbox.supervise import *
program = Program("a", {list(nursery.program("a").command)!r}, {{}}, 30.0)
async def main():
    await Supervisor([Stage("one", [program])], Outlet(2)).run()
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    life = await nursery.born()
    supervisor.kill()
    await supervisor.wait()
    await life.reports("asked")
    await life.ended()
