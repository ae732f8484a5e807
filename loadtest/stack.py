"""Starts the whole stack the way a person does, by `sandbox up`, and stops it again.

`standin_stack` starts one without jails: gateways and Redis are the real ones, and a stand-in answers (`standin.py`).

Theory of operation. The supervisor gets a session of its own, so that Ctrl-C in our terminal reaches us alone
and the stop has one order: we leave the `with` block, the supervisor gets SIGTERM, drains, and ends what it
started. After `_STOP_S`, or at a second Ctrl-C, it gets a second SIGTERM, at which it kills all that it started;
one that does not is killed itself. SIGTERM and SIGHUP to us leave the `with` block as well. The supervisor's log
goes to a file whose end is quoted when the start fails; its stdout is read to the end by a thread, so that a full
pipe can never stop it.
"""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, NamedTuple

from loadtest.processes import Use, used_by
from sandbox import ConfigError

_START_S = 60.0  # the first start of all compiles byte code
_STOP_S = 60.0  # longer than the workers' grace
_KILL_S = 5.0
_SETTLE_S = 60.0
_LOOK_S = 0.5
_STILL = 0.05  # of a core, for all jails: nothing is loaded any more
_STILL_LOOKS = 3  # one after the other: what waits for a core that others use looks idle, too
_LISTENING = re.compile(r"listening on (?P<url>http://\S+)")


class Stack(NamedTuple):
    """A service that runs."""

    url: str
    pid: int  # of its supervisor, whose descendants are all of it


@contextmanager
def own_stack(*options: str) -> Iterator[Stack]:
    """Run `sandbox up` on a free port, with further options of it.

    Raises ConfigError with the end of the log when it does not start.
    """
    with _running([sys.executable, "-m", "sandbox", "up", "--port", "0", *options]) as stack:
        yield stack


async def settle(stack: Stack) -> None:
    """Wait until a stack has started what it starts behind its first answers: forkservers, seconds of CPU.

    Nobody outside of a worker is told when it has, so the CPU of its jails is looked at. Raises ConfigError when they
    have not come to rest after a while.
    """
    give_up_at = time.monotonic() + _SETTLE_S
    used_s, still = _jails_s(stack), 0
    while still < _STILL_LOOKS:
        if time.monotonic() > give_up_at:
            raise ConfigError(f"the jails still load libraries after {_SETTLE_S:.0f} s; is the machine busy?")
        await asyncio.sleep(_LOOK_S)
        before_s, used_s = used_s, _jails_s(stack)
        still = still + 1 if used_s - before_s <= _STILL * _LOOK_S else 0


def _jails_s(stack: Stack) -> float:
    return used_by(stack.pid).get("jail", Use()).cpu_s


@contextmanager
def service_at(url: str) -> Iterator[str]:
    """The URL of a service: the one that is given, or, where none is, of a stack of our own."""
    if url:
        yield url
    else:
        with own_stack() as stack:
            asyncio.run(settle(stack))
            yield stack.url


@contextmanager
def standin_stack(*options: str) -> Iterator[Stack]:
    """Run a service in which `python -m loadtest.standin` answers, with further options of its command `up`.

    Raises ConfigError with the end of the log when it does not start.
    """
    with _running([sys.executable, "-m", "loadtest.standin", "up", *options]) as stack:
        yield stack


@contextmanager
def _running(command: list[str]) -> Iterator[Stack]:
    with _end_in_order(signal.SIGTERM, signal.SIGHUP), tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield Stack(_wait_for_url(process, log), process.pid)
        finally:
            _stop(process)


def _wait_for_url(process: subprocess.Popen[bytes], log: IO[bytes]) -> str:
    first_line: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read_all() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            first_line.put(lines.readline().decode(errors="replace"))
            for _ in lines:
                pass

    threading.Thread(target=read_all, name="stdout of sandbox up", daemon=True).start()
    try:
        line = first_line.get(timeout=_START_S)
    except queue.Empty:
        raise ConfigError(f"the stack did not start within {_START_S:.0f} s:\n{_end_of(log)}") from None
    listening = _LISTENING.match(line)
    if listening is None:
        raise ConfigError(f"the stack did not start:\n{_end_of(log)}")
    return listening["url"]


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt, SystemExit):
        process.terminate()  # asked twice, it kills all that it started
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_S)
        raise
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_of(log: IO[bytes], length: int = 12) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - 10_000))
    return "\n".join(log.read().decode(errors="replace").splitlines()[-length:])


@contextmanager
def _end_in_order(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals end the block as Ctrl-C does, and then us with their own exit codes.

    An exception out of a handler would leave asyncio's tasks where they are; Ctrl-C it knows, and ends them in order.
    """
    came: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        came.append(number)
        interrupt = signal.getsignal(signal.SIGINT)  # asyncio's own, while a loop runs
        (interrupt if callable(interrupt) else signal.default_int_handler)(signal.SIGINT, frame)

    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        if came:
            sys.exit(128 + came[0])
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
