"""Keeping programs running: `Child`, and `Supervisor`, which starts and ends them in order.

Theory of operation. The supervisor starts programs by their command lines, just as a container does. It is one
process with one thread and one event loop, and knows nothing of what the programs do. Each is a `Child`, kept
running by a task of its own; children that start and end together are a stage.

Who may die. A child: it is started again, after a pause that doubles with every early death. A child that was
never well, and died early three times or says that its start is refused, however long it took to find out, is
given up, and the whole stack with it. All are well once the stack was ready. A child that was well and ends with 0
was asked to by somebody else, who restarts the stack part by part: its next life begins at once. Whatever a dead
child leaves in its process group is killed before its next life. The supervisor, killed: every child has asked the
kernel for SIGTERM at its parent's death (PR_SET_PDEATHSIG), so none stays behind.

That request is made between fork and exec (`preexec_fn`). A small program in between that asks and execs would
cost an interpreter's start for each child, and `preexec_fn` is dangerous only beside other threads, of which
there are none. That is also why children are awaited by pidfd and not by asyncio, which on Python 3.11 spends
a thread on each.

What children say comes to us through pipes and leaves by whole lines through an outlet, which waits for no reader.

The end goes through the stages backwards: each child gets SIGTERM and its grace, then SIGKILL. A second signal
kills everything at once. Children are in process groups of their own, so Ctrl-C and the end of a terminal reach only
the supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from sandbox.errors import ConfigError
from sandbox.outlet import Outlet

log = logging.getLogger(__name__)

_MOST_EARLY_DEATHS = 3
_REFUSED = 2  # exit code of our programs for a start that settings or host make impossible
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_LAST_LINES = 10
_PR_SET_PDEATHSIG = 1
_PIPE_BYTES = 65536  # what a pipe holds


@dataclass(frozen=True, slots=True)
class Program:
    """What to start and how long it may take to end."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    grace_s: float
    fds: Sequence[int] = ()
    well_after_s: float = 5.0  # a life as long as this was no failed start, unless it says so itself
    quiet: bool = False  # what it says is shown only when it ends unasked


class Child:
    """A program that is kept running until `stop`. `give_up` learns of what ends it before that."""

    def __init__(self, program: Program, give_up: Callable[[BaseException], None], outlet: Outlet) -> None:
        self.program = program
        self.was_well = False  # from then on it is started again, whatever it dies of
        self._give_up = give_up
        self._outlet = outlet
        self._stopping = asyncio.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._task = asyncio.create_task(self._keep_running())
        self._task.add_done_callback(self._ended)

    async def stop(self) -> None:
        """SIGTERM, then the grace, then SIGKILL; returns when nothing of it is left."""
        self._stopping.set()
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGTERM)  # Popen's own way would wait for it
        _, late = await asyncio.wait({self._task}, timeout=self.program.grace_s)
        if late:
            log.warning("child did not end in time", extra={"child": self.program.name})
            self.kill()
            await asyncio.wait({self._task})

    def kill(self) -> None:
        """End it now, with all that is in its process group, and do not start it again."""
        self._stopping.set()
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._give_up(exc)

    async def _keep_running(self) -> None:
        early_deaths = 0
        while not self._stopping.is_set():
            born = time.monotonic()
            code = await self._live()
            if self._stopping.is_set():
                break
            if code != _REFUSED and time.monotonic() - born >= self.program.well_after_s:
                self.was_well, early_deaths = True, 0
            if code == 0 and self.was_well:
                log.info("child ended", extra={"child": self.program.name, "exit_code": 0, "again_in_s": 0})
                continue
            early_deaths += 1
            if not self.was_well and (code == _REFUSED or early_deaths >= _MOST_EARLY_DEATHS):
                raise ConfigError(self._obituary(code))
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (early_deaths - 1))
            fields = {"child": self.program.name, "exit_code": code, "again_in_s": pause_s}
            if self.program.quiet:
                fields["said"] = list(self._last_lines)
            log.warning("child ended", extra=fields)
            with contextlib.suppress(TimeoutError):  # the end of the pause
                await asyncio.wait_for(self._stopping.wait(), pause_s)

    async def _live(self) -> int:
        """One life of the program; its exit code, negative for a signal."""
        self._last_lines.clear()
        outlet = None if self.program.quiet else self._outlet
        ours, theirs = os.pipe()
        with contextlib.closing(_Relay(ours, self._last_lines, outlet)):
            try:
                self._process = process = _spawn(self.program, theirs)
            except OSError as exc:
                raise ConfigError(f"{self.program.name} does not start: {exc}") from exc
            finally:
                os.close(theirs)
            await _end_of(process.pid)
            os.killpg(process.pid, signal.SIGKILL)  # its number is its own until it is waited for
            self._process = None
            return process.wait()

    def _obituary(self, code: int) -> str:
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        lines = "".join(f"\n    {line}" for line in self._last_lines) or " nothing"
        return f"{self.program.name} does not stay up ({how}). The last it said:{lines}"


def _spawn(program: Program, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        program.command,
        env=program.environ,
        pass_fds=program.fds,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        process_group=0,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 - one thread; see the theory of operation
    )


def _die_with_parent() -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def ask_kernel() -> None:
        if prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM)) != 0 or os.getppid() != parent:
            os._exit(1)  # the parent died before we asked

    return ask_kernel


async def _end_of(pid: int) -> None:
    """Returns when a child of ours has ended; it is still to be waited for."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    pidfd = os.pidfd_open(pid)
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


class _Relay:
    """What comes out of a pipe goes to an outlet by whole lines, so that children do not mix theirs."""

    def __init__(self, fd: int, last_lines: deque[str], outlet: Outlet | None) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""
        self._last_lines = last_lines
        self._outlet = outlet
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(fd, self._read)

    def close(self) -> None:
        """Pass on what is still in the pipe: one read takes all that a pipe holds."""
        if self._loop.remove_reader(self._fd):
            self._read()
        self._write([self._rest] if self._rest else [])
        os.close(self._fd)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:  # nobody holds the other end any more
            self._loop.remove_reader(self._fd)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _PIPE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)

    def _write(self, lines: list[bytes]) -> None:
        self._last_lines.extend(line.decode(errors="replace") for line in lines)
        if self._outlet is not None:
            self._outlet.pass_on(b"".join(line + b"\n" for line in lines))


@dataclass(frozen=True, slots=True)
class Stage:
    """Programs that start and end together."""

    name: str
    programs: Sequence[Program]
    #: Returns when those that come later may start. Raises SandboxError when that will not be.
    ready: Callable[[], Awaitable[None]] | None = None


class Supervisor:
    """Brings stages up one after the other, and down in the opposite order."""

    def __init__(
        self, stages: Sequence[Stage], outlet: Outlet, listeners: Sequence[socket.socket] = ()
    ) -> None:
        self._stages = stages
        self._outlet = outlet
        self._listeners = listeners
        self._children: dict[str, list[Child]] = {}

    async def run(self) -> None:
        """Return when a signal has ended the stack. Raises what ended it otherwise."""
        loop = asyncio.get_running_loop()
        end: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number, end)
        # Else we are to outlive our terminal, as under nohup.
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup, end)
        starting = asyncio.create_task(self._bring_up(end))
        try:
            await asyncio.wait({starting, end}, return_when=asyncio.FIRST_COMPLETED)
            if not end.done():
                starting.result()
            await end
        finally:
            end.cancel()  # from here on a signal is a second one
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._bring_down()

    def _on_signal(self, number: int, end: asyncio.Future[None]) -> None:
        log.info("asked to stop", extra={"signal": signal.Signals(number).name})
        if not end.done():
            end.set_result(None)
            return
        for child in itertools.chain.from_iterable(self._children.values()):
            child.kill()

    def _on_hangup(self, end: asyncio.Future[None]) -> None:
        """The terminal was closed. Its shell and the kernel may both say so, hence this is never a second signal."""
        if not end.done():
            self._on_signal(signal.SIGHUP, end)

    async def _bring_up(self, end: asyncio.Future[None]) -> None:
        def give_up(error: BaseException) -> None:
            if not end.done():
                end.set_exception(error)

        for stage in self._stages:
            log.info("starting", extra={"stage": stage.name, "programs": len(stage.programs)})
            self._children[stage.name] = [Child(program, give_up, self._outlet) for program in stage.programs]
            if stage.ready is not None:
                await stage.ready()
        if stage.ready is not None:  # the last one waits for the whole stack
            for child in itertools.chain.from_iterable(self._children.values()):
                child.was_well = True

    async def _bring_down(self) -> None:
        for listener in self._listeners:
            listener.close()
        for name, children in reversed(self._children.items()):
            log.info("stopping", extra={"stage": name})
            await asyncio.gather(*(child.stop() for child in children))
        log.info("stopped")
