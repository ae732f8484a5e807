"""One warm jail: nsjail around a forkserver (at level `process` the forkserver alone), and the calls that run in it.

Theory of operation. `Jail.start` spawns nsjail with one end of a socket pair as the forkserver's control socket and
waits until it serves. `Jail.run` sends one request and the call's descriptors, reads both output pipes while the
program runs, and waits for the reply that nothing of the call is left; fork.c describes the messages. Any number of
calls run at once in one jail, each in a slot of its own.

We decide and the kernel tells. Wall clock, output bytes and, between the kernel's own bounds, CPU time and memory are
ours to watch; the request KILL ends a call. How it ended comes from its wait status and from its slot's counters.
Nothing is read from the program but its two output pipes, and those are bytes: counted, cut, decoded with
replacement, never parsed; and its note of bounded form (note.py), which decides nothing.

Who may die: a program, at any time. The forkserver or nsjail: every call in the jail raises JailError, `worn` is set
and the pool starts another jail. We: the forkserver reads end of file and ends with all that it started.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import itertools
import json
import logging
import math
import os
import random
import select
import signal
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sandbox.calls import MIB, CallStatus, Network, ToolCall, ToolResult, Usage
from sandbox.errors import JailError
from sandbox.jail.cgroups import GroupUsage
from sandbox.jail.host import Host, Slot
from sandbox.jail.note import blank, read_files, read_note
from sandbox.jail.policy import DEVICES, SYSTEM, hashing, nsjail_argv, plain_command
from sandbox.jail.preload import Preload
from sandbox.jail.scratch import Scratch
from sandbox.jail.streams import Output, output_pipe, pack_payload, sealed
from sandbox.jail.watched import Watched, anonymous_bytes, children_of, sockets_of, tasks_of

log = logging.getLogger("sandbox.jail")

START_S = 60.0  # a forkserver with everything loaded needs about 3 s on a busy core
# A killed call that is not gone by then takes the jail with it, unless it still uses CPU time: hundreds of processes
# with tens of thousands of mappings each, which is what 2 GiB hold, take the kernel 3 s, and more beside others.
KILL_S = 15.0
KILL_TIMES = 8  # it must end after so many times of these all the same
END_S = 2.0  # a jail that does not end by itself by then is killed
WATCH_S = 0.1  # how often a running call's group is looked at; most calls end before the first time
OPEN_FILES = 256
FILE_BYTES = 64 * MIB
#: Of IP in one call: the kernel makes those that wait to be accepted, and charges them to nobody.
MOST_SOCKETS = 2048
#: Tasks of our own user that may start while an ordinary user's jail at level `process` serves.
OTHERS_TO_COME = 256
THREAD_STACK_BYTES = 8 * MIB  # counted as data from the start, though hardly any of it is ever used
# After so many calls, or so long, a jail is replaced: a fresh address layout and hash seed, and no leak grows old.
WORN_CALLS = 5000
WORN_S = 1800.0

# struct request and struct reply of fork.c
_REQUEST = struct.Struct("=11Q")
_REPLY = struct.Struct("=QQqQQq32s")
_RUN, _KILL = 1, 2
_READY, _ENDED, _FAILED, _STARTED = 1, 2, 3, 4
_KEEP_UID = 2**64 - 1


@dataclass(slots=True)
class _Reply:
    kind: int
    wait_status: int
    cpu_us: int
    wall_us: int
    error: int
    where: str


@dataclass(frozen=True, slots=True)
class _Message:
    """Something to send to the forkserver, and what to close when it is sent."""

    content: bytes
    fds: array.array[int] | None
    theirs: Sequence[int]


@dataclass(slots=True)
class _Run:
    """What the jail keeps of a call while it runs."""

    number: int
    call: ToolCall
    slot: Slot
    outputs: tuple[Output, Output]
    note: int
    ended: asyncio.Future[_Reply]
    pid: int = 0  # of its init, then of its program, where the forkserver was asked to tell
    decided: CallStatus | None = None
    is_killed: bool = False
    due_s: float = math.inf  # on the loop's clock: where its wall limit is
    timers: list[asyncio.TimerHandle] = field(default_factory=list)


class Jail:
    """Runs calls. Made by `start`; `worn` is set when it broke or has served its time, and `close` ends it."""

    def __init__(
        self, host: Host, preload: Preload, network: Network = "none", hash_seed: int | None = None
    ) -> None:
        self.preload = preload
        self.network = network
        self.hash_seed = hash_seed
        self.worn = asyncio.Event()
        self.is_broken = False
        self.host = host
        self._loop = asyncio.get_running_loop()
        self._runs: dict[int, _Run] = {}
        self._open_outputs: dict[int, tuple[_Run, Output]] = {}
        self._numbers = itertools.count(1)
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._idle = asyncio.Event()
        self._idle.set()
        self._outbox: deque[_Message] = deque()
        self._warm_bytes = 0
        self._others = 0  # tasks that the kernel counts together with a call's
        self._control: socket.socket
        # Of our own: to watch and to forget two pipes takes the event loop ten system calls, and this two.
        self._epoll: select.epoll
        self._pid: int
        self._pidfd: int | None
        self.forkserver_pid: int  # by our own numbers
        self._forkserver_fd: int | None = None
        self._worn_timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None  # the next one, while anything runs
        self._messages: int  # where nsjail and the forkserver complain
        self._is_silent = False
        self._spawn()

    @classmethod
    async def start(
        cls, host: Host, preload: Preload, network: Network = "none", hash_seed: int | None = None
    ) -> Jail:
        """Start a jail and wait until it serves. Raises JailError with what nsjail or the forkserver said."""
        if host.level == "process" and network != "none":
            raise JailError("a call's own network takes a net namespace, which the level process has not")
        try:
            jail = cls(host, preload, network, hash_seed)
        except OSError as exc:
            raise JailError(
                f"{'nsjail' if host.nsjail else 'the forkserver'} cannot be started: {exc}"
            ) from exc
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(jail._ready)
        except TimeoutError as exc:
            await jail.close()
            raise JailError(f"the {preload.name} forkserver was not ready after {START_S:.0f} s") from exc
        except BaseException:  # also when we are cancelled: nobody else knows of this jail yet
            await jail.close()
            raise
        return jail

    def _spawn(self) -> None:
        with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
            control, their_control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.callback(control.close)
            epoll = select.epoll()
            ours.callback(epoll.close)
            theirs.callback(their_control.close)
            control.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # READY and STARTED name processes
            # Pipes, as a program's own streams will be: Python decides on buffering and seeking when it starts.
            empty, never_written = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, empty)
            os.close(never_written)
            messages, their_messages = os.pipe2(os.O_CLOEXEC)
            ours.callback(os.close, messages)
            theirs.callback(os.close, their_messages)
            control.setblocking(False)
            os.set_blocking(messages, False)
            argv, environment = self._command()
            pid = os.posix_spawn(
                argv[0],
                argv,
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, empty, 0),
                    (os.POSIX_SPAWN_DUP2, their_messages, 1),
                    (os.POSIX_SPAWN_DUP2, their_messages, 2),
                    (os.POSIX_SPAWN_DUP2, their_control.fileno(), 3),
                ],
                # A Ctrl-C at our terminal is for us: running calls are to finish. And whoever started us may have
                # ignored signals, which programs would inherit, and which would lose us the ends of children.
                setsid=True,
                setsigmask=[],
                setsigdef=signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP},
            )
            try:
                pidfd = self._pidfd = os.pidfd_open(pid)
            except OSError:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                raise
            self._control, self._epoll, self._messages, self._pid = control, epoll, messages, pid
            ours.pop_all()
        forkserver_filter, program_filter = self.host.filters[self.network]
        config = {
            "modules": self.preload.modules,
            "warm_up": self.preload.warm_up,
            "user_namespaces": self.host.level == "strict",
            "loopback": self.network == "loopback",
            "environment": hashing(self.hash_seed),  # for a program's own interpreters
            "files": self._files(),
            "forkserver_filter": forkserver_filter.hex(),
            "program_filter": program_filter.hex(),
        }
        self._loop.add_reader(self._control.fileno(), self._on_control)
        self._loop.add_reader(self._epoll.fileno(), self._on_outputs)
        self._loop.add_reader(self._messages, self._on_message)
        self._loop.add_reader(pidfd, self._on_exit)
        self._send(json.dumps(config).encode())

    def _command(self) -> tuple[list[str], dict[str, str]]:
        host = self.host
        if host.nsjail is None:
            return plain_command(host.root, self.hash_seed)
        argv = nsjail_argv(host.nsjail, host.root, host.identity, host.level, self.network, self.hash_seed)
        return argv, {}

    def _files(self) -> dict[str, Any] | None:
        """What the forkserver and its programs may open, where they see the host's files."""
        if self.host.scratch is None:
            return None
        readable = [str(self.host.root), *filter(os.path.exists, SYSTEM)]
        return {
            "abi": self.host.landlock_abi,
            "scratch": str(self.host.scratch),
            "readable": readable,
            "devices": DEVICES,
        }

    # ---- a call ----

    async def run(self, call: ToolCall, slot: Slot) -> ToolResult:
        """Run one call in a slot that nothing else uses, and return when nothing of it is left.

        Cancelled, it kills the call and still waits for its end. Raises JailError when the set-up of the call failed or
        the jail broke: then the program may or may not have run, and no verdict is known.
        """
        try:
            return await self._run(call, slot)
        except (JailError, asyncio.CancelledError):
            if self.is_broken:  # what runs in the slot ends with the jail, and the slot is free only then
                await _finished(self._gone)
            raise
        finally:
            if slot.scratch is not None and not slot.scratch.is_gone():
                await _removed(slot.scratch)

    async def _run(self, call: ToolCall, slot: Slot) -> ToolResult:
        if self.is_broken:
            raise JailError("the jail broke")
        try:
            slot.group.begin(call.limits.memory_bytes, call.limits.processes)
            run = self._begin(call, slot)
        except OSError as exc:
            raise JailError(f"the call cannot be started: {exc}") from exc
        try:
            return await self._verdict(run)
        finally:
            os.close(run.note)

    async def _verdict(self, run: _Run) -> ToolResult:
        group = run.slot.group
        try:
            reply = await asyncio.shield(run.ended)
        except asyncio.CancelledError:
            self._end(run, None)
            await _finished(run.ended)
            raise
        finally:
            self._forget(run)
        try:
            usage = group.end()
            is_empty = group.is_empty()
        except OSError as exc:
            raise JailError(f"the call's group cannot be read: {exc}") from exc
        if reply.kind == _FAILED and not (reply.error == errno.ENOMEM and usage.oom_kills):
            raise JailError(f"setting up the call failed at '{reply.where}': {os.strerror(reply.error)}")
        if not is_empty:
            self._break()
            raise JailError("a process outlived its call")
        return verdict(run, reply, usage)

    def _begin(self, call: ToolCall, slot: Slot) -> _Run:
        ours: list[int] = []
        theirs: list[int] = []
        watched: list[int] = []
        try:
            output_pipe(ours, theirs)
            output_pipe(ours, theirs)
            # A file of its own for each call, also when it is empty: flags and times of a shared one would pass from
            # call to call, and those of /dev/null, opened out here, are the host's.
            theirs.append(sealed("stdin", call.stdin.encode()))
            theirs.append(sealed("payload", pack_payload(call)))
            ours.append(blank(len(call.fetch_files)))
            if slot.scratch is not None:
                theirs.append(slot.scratch.begin())
            for fd in ours[:2]:
                self._epoll.register(fd, select.EPOLLIN)
                watched.append(fd)
        except BaseException:
            for fd in watched:
                self._epoll.unregister(fd)
            _close_all(ours + theirs)
            raise
        out, err, stdin, payload, *scratch = theirs
        note = ours.pop()
        fds = array.array("i", [stdin, out, err, payload, note, *slot.group.enter_fds, *scratch])
        limit, keep = call.limits.output_bytes, call.keep_bytes
        outputs = (Output(ours[0], limit, keep), Output(ours[1], limit, keep))
        run = _Run(next(self._numbers), call, slot, outputs, note, self._loop.create_future())
        self._runs[run.number] = run
        self._idle.clear()
        for fd, output in zip(ours, outputs, strict=True):
            self._open_outputs[fd] = run, output
        run.due_s = self._loop.time() + call.limits.wall_s
        if call.limits.wall_s <= WATCH_S:
            self._end_when_due(run)
        if self._look is None:
            self._look = self._loop.call_later(WATCH_S, self._look_at_all)
        self._send(self._request(run.number, call, slot), fds, theirs)
        return run

    def _request(self, number: int, call: ToolCall, slot: Slot) -> bytes:
        limits = call.limits
        return _REQUEST.pack(
            _RUN,
            number,
            _KEEP_UID if slot.uid is None else slot.uid,
            # Behind our own watch, which counts all processes and is exact to WATCH_S.
            math.ceil(limits.cpu_s) + 1,
            FILE_BYTES,
            OPEN_FILES,
            self.most_processes(limits.processes, slot),
            0 if slot.group.enter_fds else 2 * limits.memory_bytes + limits.processes * THREAD_STACK_BYTES,
            self.host.scratch_bytes,
            self.host.scratch_inodes,
            slot.group.needs_pids or self.network == "loopback",
        )

    def most_processes(self, limit: int, slot: Slot) -> int:
        """RLIMIT_NPROC of a call: with one uid for all, the kernel counts those of every slot, and ours, together."""
        return limit if slot.uid is not None else limit + 3 * self.host.slots + 1 + self._others

    def _on_outputs(self) -> None:
        for fd, events in self._epoll.poll(0):
            if self.is_broken:
                return
            run, output = self._open_outputs[fd]
            try:
                if events & select.EPOLLIN and output.read():
                    continue
            except BlockingIOError:  # the program has opened its stdout to read, and was quicker
                continue
            self._stop_watching(fd)
            if output.exceeded:
                self._end(run, CallStatus.OUTPUT_LIMIT)
            else:
                output.close()

    def _stop_watching(self, fd: int) -> None:
        """Before the pipe is closed, which is not enough: it is in the epoll until the last process has closed it.

        One that is just being started has all our descriptors for a moment; and the next call's pipe has this number.
        """
        del self._open_outputs[fd]
        if not self._epoll.closed:
            self._epoll.unregister(fd)

    def _look_at_all(self) -> None:
        """Look at all that runs, every WATCH_S: most calls end before a clock of their own would have rung."""
        self._look = None
        for run in list(self._runs.values()):
            self._watch(run)
            if self.is_broken:
                return
            if not run.timers and run.due_s - self._loop.time() <= WATCH_S:
                self._end_when_due(run)
        if self._runs:
            self._look = self._loop.call_later(WATCH_S, self._look_at_all)

    def _end_when_due(self, run: _Run) -> None:
        run.timers.append(self._loop.call_at(run.due_s, self._end, run, CallStatus.TIMEOUT))

    def _watch(self, run: _Run) -> None:
        try:
            exceeded = run.slot.group.exceeded(run.call.limits.cpu_s)
            if self.network == "loopback" and sockets_of(run.pid) > MOST_SOCKETS:
                exceeded = CallStatus.MEMORY_LIMIT
        except Exception:  # whatever it is, the calls beside it would not be watched either
            log.exception("a call cannot be watched")
            self._break()
            return
        if exceeded is not None:
            self._end(run, exceeded)

    def _end(self, run: _Run, decided: CallStatus | None) -> None:
        """Kill a call; the first reason stands."""
        if run.decided is None:
            run.decided = decided
        if run.is_killed or run.ended.done():
            return
        run.is_killed = True
        self._send(_REQUEST.pack(_KILL, run.number, *[0] * 9))
        self._wait_for_end(run, -math.inf, KILL_TIMES)

    def _wait_for_end(self, run: _Run, seen_s: float, times: int) -> None:
        """Break the jail if a killed call stands still. To take down what it made is work, and counts as the call's."""
        try:
            used_s = run.slot.group.end().cpu_s
        except OSError:
            log.exception("a killed call cannot be watched")
            self._break()
            return
        if used_s > seen_s and times:
            run.timers.append(self._loop.call_later(KILL_S, self._wait_for_end, run, used_s, times - 1))
        else:
            self._break()

    def _send(self, content: bytes, fds: array.array[int] | None = None, theirs: Sequence[int] = ()) -> None:
        """Send now, or as soon as the forkserver has read what waits before: the socket holds some 300 messages."""
        self._outbox.append(_Message(content, fds, theirs))
        if len(self._outbox) == 1:
            self._flush()

    def _flush(self) -> None:
        while self._outbox:
            message = self._outbox[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, message.fds)] if message.fds else []
            try:
                self._control.sendmsg([message.content], rights)
            except BlockingIOError:
                self._loop.add_writer(self._control.fileno(), self._go_on)
                return
            except OSError as exc:
                log.warning("the forkserver takes no messages", extra={"error": str(exc)})
                self._break()
                return
            self._outbox.popleft()
            _close_all(message.theirs)

    def _go_on(self) -> None:
        self._loop.remove_writer(self._control.fileno())
        self._flush()

    def _forget(self, run: _Run) -> None:
        self._runs.pop(run.number, None)
        for timer in run.timers:
            timer.cancel()
        for output in run.outputs:
            if output.fd is not None:
                if output.fd in self._open_outputs:
                    self._stop_watching(output.fd)
                output.drain()
        if not self._runs:
            self._idle.set()
        if run.number >= WORN_CALLS:
            self.worn.set()

    # ---- what the jail says ----

    def _on_control(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while not self.is_broken:
                try:
                    data, ancillary, _flags, _address = self._control.recvmsg(
                        _REPLY.size, socket.CMSG_SPACE(12)
                    )
                except BlockingIOError:
                    raise
                except OSError as exc:
                    log.warning("the control socket broke", extra={"error": str(exc)})
                    data = b""
                if len(data) != _REPLY.size:
                    self._break()
                    return
                self._on_reply(data, ancillary)

    def _on_reply(self, data: bytes, ancillary: list[tuple[int, int, bytes]]) -> None:
        kind, number, wait_status, cpu_us, wall_us, error, where = _REPLY.unpack(data)
        if kind == _READY and not self._ready.done():
            self._on_ready(_sender(ancillary))
            return
        if not _is_sound(kind, wait_status, error):
            log.warning("the forkserver says what it never says", extra={"kind": kind, "number": number})
            self._break()
            return
        run = self._runs.get(number)
        if run is None:
            return  # forgotten: the jail broke under it
        if kind == _STARTED:
            run.pid = wait_status or _sender(ancillary)
            if isinstance(run.slot.group, Watched):
                run.slot.group.watch(run.pid, self._warm_bytes)
        elif not run.ended.done():
            text = where.partition(b"\0")[0].decode("ascii", "replace")
            run.ended.set_result(_Reply(kind, wait_status, cpu_us, wall_us, error, text))

    def _on_ready(self, forkserver: int) -> None:
        try:
            self._forkserver_fd = os.pidfd_open(forkserver)
        except OSError as exc:
            log.warning("no handle on the forkserver", extra={"error": str(exc)})
            self._break()
            return
        self.forkserver_pid = forkserver
        self._loop.add_reader(self._forkserver_fd, self._on_forkserver_exit)
        if self.host.place.kind == "none":
            self._warm_bytes = anonymous_bytes(forkserver)
        if self.host.level == "process" and self.host.identity.first_slot is None:
            self._others = tasks_of(self.host.identity.uid) + OTHERS_TO_COME
        # Jails that started together should not all be replaced at the same time.
        self._worn_timer = self._loop.call_later(WORN_S * random.uniform(0.8, 1.2), self.worn.set)
        self._ready.set_result(None)

    def _on_message(self) -> None:
        """What nsjail and the forkserver write on their stderr. Programs have streams of their own."""
        try:
            text = os.read(self._messages, 4096)
        except BlockingIOError:
            return
        if not text:
            self._loop.remove_reader(self._messages)
            self._is_silent = True
            self._end_if_gone()
            return
        log.warning(
            "jail says", extra={"preload": self.preload.name, "text": text.decode("utf-8", "replace").strip()}
        )

    def _on_forkserver_exit(self) -> None:
        """As PID 1 of the jail it ends last."""
        assert self._forkserver_fd is not None
        self._loop.remove_reader(self._forkserver_fd)
        os.close(self._forkserver_fd)
        self._forkserver_fd = None
        self._end_if_gone()

    def _on_exit(self) -> None:
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        with contextlib.suppress(ChildProcessError):  # the kernel has reaped it, where our SIGCHLD is ignored
            os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self._pidfd = None
        self._end_if_gone()

    def _end_if_gone(self) -> None:
        """The forkserver ends first, unless somebody killed nsjail; at level `process`, the guardians end last.

        Forkserver and guardians hold the pipe for messages, and no program does.
        """
        self._break()
        if self._pidfd is None and self._forkserver_fd is None and self._is_silent:
            os.close(self._messages)
            self._gone.set_result(None)

    # ---- the end ----

    def _break(self) -> None:
        """End the jail at once; whatever runs in it has no verdict."""
        if self.is_broken:
            return
        self.is_broken = True
        self.worn.set()
        for timer in (self._worn_timer, self._look):
            if timer is not None:
                timer.cancel()
        self._loop.remove_reader(self._control.fileno())
        self._loop.remove_writer(self._control.fileno())
        while self._outbox:
            _close_all(self._outbox.popleft().theirs)
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._control.close()  # the forkserver reads end of file, and everything below it dies with it
        error = JailError("the jail broke while the call ran")
        if not self._ready.done():
            self._ready.set_exception(JailError(f"the {self.preload.name} forkserver ended before it served"))
        for run in self._runs.values():
            if not run.ended.done():
                run.ended.set_exception(error)
        if self._forkserver_fd is None:
            self._kill()  # it does not listen yet, and holds nothing
        else:
            self._loop.call_later(END_S, self._kill)

    def _kill(self) -> None:
        if self._forkserver_fd is None and self._pidfd is not None and self.host.nsjail is not None:
            _kill_children(self._pid)
        for pidfd in (self._forkserver_fd, self._pidfd):
            if pidfd is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and we are about to be told
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    async def retire(self) -> None:
        """Close when the last call has ended; start no further one."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """End the jail and wait until it is gone. A call that still runs raises JailError."""
        self._break()
        self._ready.exception()  # seen: whoever started us was told
        await _finished(self._gone)


def _kill_children(pid: int) -> None:
    """Kill what a child of ours has started, which dies with it only from a certain moment of its own start."""
    os.kill(pid, signal.SIGSTOP)  # so that it starts nothing more
    try:
        _, status = os.waitpid(pid, os.WUNTRACED)
    except ChildProcessError:  # the kernel has reaped it, where our SIGCHLD is ignored
        return
    for child in children_of(pid) if os.WIFSTOPPED(status) else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def _is_sound(kind: int, wait_status: int, error: int) -> bool:
    """Whether fork.c can have said this of a call. A program that escaped into its forkserver says anything."""
    if kind == _ENDED:
        return 0 <= wait_status <= 0xFFFF and (os.WIFEXITED(wait_status) or os.WIFSIGNALED(wait_status))
    if kind == _FAILED:
        return 0 < error < 4096  # the kernel's own bound of an errno
    return kind == _STARTED


def _sender(ancillary: list[tuple[int, int, bytes]]) -> int:
    """The process that a message names, by our own numbers."""
    pid, _uid, _gid = struct.unpack("=iII", ancillary[0][2])
    return int(pid)


async def _removed(scratch: Scratch) -> None:
    """Remove a scratch folder, in a thread: a program may have made a million files. Raises JailError."""
    removal = asyncio.ensure_future(asyncio.to_thread(scratch.remove))
    await _finished(removal)
    if (failure := removal.exception()) is not None:
        raise JailError(f"the scratch folder of a call cannot be removed: {failure}") from failure


async def _finished(future: asyncio.Future[Any]) -> None:
    """Wait for the end of what we have killed, also when we are cancelled meanwhile, once or more often."""
    cancelled = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as exc:
            cancelled = exc
    future.exception()  # seen: a jail that broke has ended its calls as well
    if cancelled is not None:
        raise cancelled


def verdict(run: _Run, reply: _Reply, usage: GroupUsage) -> ToolResult:
    """What came of a call, by counters first and exit codes last."""
    cpu_s = max(reply.cpu_us / 1e6, usage.cpu_s)
    code = os.waitstatus_to_exitcode(reply.wait_status)
    # A decision counts where it ended the program. After a pause of ours the clock can run out before we have read
    # that the program ended long ago.
    was_ended = code == -signal.SIGKILL or reply.wall_us >= run.call.limits.wall_s * 1e6
    if run.decided is not None and was_ended:
        status = run.decided
    elif any(output.exceeded for output in run.outputs):
        status = CallStatus.OUTPUT_LIMIT
    elif usage.oom_kills:
        status = CallStatus.MEMORY_LIMIT
    elif cpu_s >= run.call.limits.cpu_s:
        status = CallStatus.TIMEOUT
    elif code < 0:
        status = CallStatus.SIGNALED
    else:
        status = CallStatus.ERROR if code else CallStatus.OK
    if reply.kind == _FAILED:  # killed for its memory while its walls went up
        code = -signal.SIGKILL
    stdout, stderr = run.outputs
    ended_by_itself = status in {CallStatus.OK, CallStatus.ERROR}
    return ToolResult(
        id=run.call.id,
        status=status,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=stdout.text(),
        stderr=stderr.text(),
        stdout_truncated=stdout.is_cut,
        stderr_truncated=stderr.is_cut,
        stdout_tail=stdout.tail(),
        stderr_tail=stderr.tail(),
        exception=read_note(run.note, run.call.code) if status is CallStatus.ERROR else None,
        files=read_files(run.note, run.call.fetch_files) if ended_by_itself and run.call.fetch_files else {},
        stdout_bytes=stdout.written,
        stderr_bytes=stderr.written,
        usage=Usage(wall_s=reply.wall_us / 1e6, cpu_s=cpu_s, memory_peak_bytes=usage.memory_peak_bytes),
    )
