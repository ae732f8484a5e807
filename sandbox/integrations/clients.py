"""The clients behind adapters that frameworks make from a configuration, and by the hundred: they share one.

A framework knows a URL and not who opens a client, and ends without saying so. So there is one `SandboxClient` for
each event loop and set of options, closed when the loop ends, and one blocking client for each process, closed when
that ends. Each has the few connections of a client, however many tools and environments use it.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, TypeVar, Unpack

from sandbox.client import DEFAULT_URL, BlockingClient, ClientOptions, SandboxClient
from sandbox.errors import from_wire
from sandbox.grade import Grader
from sandbox.grading.math import MathTask

T = TypeVar("T")

_Options = tuple[tuple[str, object], ...]


class _Key(NamedTuple):
    loop: asyncio.AbstractEventLoop
    url: str
    options: _Options


class _Open(NamedTuple):
    client: SandboxClient
    life: AsyncGenerator[None]  # kept, since whoever forgets it ends it


_open: dict[_Key, _Open] = {}


async def client_of_loop(url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> SandboxClient:
    """The client of the running event loop for this service, open as long as the loop lives."""
    key = _Key(asyncio.get_running_loop(), url, _sorted(options))
    if key not in _open:
        client = SandboxClient(url, **options)
        _open[key] = _Open(client, _while_loop_lives(key, client))
        await anext(_open[key].life)  # nothing in it waits, so nobody sees the client unopened
    return _open[key].client


async def _while_loop_lives(key: _Key, client: SandboxClient) -> AsyncGenerator[None]:
    """A loop that is shut down (`asyncio.run` does) ends the generators that were begun in it, and so this one."""
    try:
        async with client:
            yield
    finally:
        del _open[key]


def blocking_client(url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> BlockingClient:
    """The client of this process for code without an event loop, for all its threads, open until the process ends."""
    return _of_process(SandboxClient.blocking, url, options)


def is_right(task: MathTask, url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> bool | str:
    """Whether an answer is the reference, or the reason why nobody knows. Raises the SandboxError of a fault.

    The graders of a process share a client of their own.
    """
    [grade] = _of_process(Grader.blocking, url, options).math([task])
    if grade.error is not None:
        raise from_wire(grade.error.name, grade.error.message)
    return grade.reason if grade.correct is None else grade.correct


def _of_process(opened: Callable[..., AbstractContextManager[T]], url: str, options: ClientOptions) -> T:
    process = os.getpid()  # a fork has no thread of its parent's, so nothing that its parent opened
    with _making:
        key = (process, opened, url, _sorted(options))
        if key not in _of_processes:
            stack = ExitStack()
            _of_processes[key] = stack.enter_context(opened(url, **options))
            atexit.register(_close, process, stack)
        found: T = _of_processes[key]
        return found


def _close(process: int, stack: ExitStack) -> None:
    if os.getpid() == process:
        stack.close()


_making = threading.Lock()
_of_processes: dict[tuple[object, ...], Any] = {}


def _sorted(options: ClientOptions) -> _Options:
    return tuple(sorted(options.items()))
