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
from typing import Any, TypeVar, Unpack

from sandbox.client import DEFAULT_URL, BlockingClient, ClientOptions, SandboxClient
from sandbox.errors import from_wire
from sandbox.grade import Grader
from sandbox.grading.math import MathGrade, MathTask

T = TypeVar("T")
C = TypeVar("C", SandboxClient, Grader)


async def client_of_loop(url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> SandboxClient:
    """The client of the running event loop for this service, open as long as the loop lives."""
    return await _of_loop(SandboxClient, url, options)


async def is_right_in_loop(
    task: MathTask, url: str = DEFAULT_URL, **options: Unpack[ClientOptions]
) -> bool | str:
    """`is_right` for who has an event loop. Its graders share a client of their own."""
    grader = await _of_loop(Grader, url, options)
    [grade] = await grader.math([task])
    return _known(grade)


async def _of_loop(opened: type[C], url: str, options: ClientOptions) -> C:
    key = (asyncio.get_running_loop(), opened, url, _sorted(options))
    if key not in _of_loops:
        made = opened(url, **options)
        life = _while_loop_lives(key, made)
        _of_loops[key] = made, life  # which is kept, since whoever forgets it ends it
        await anext(life)  # nothing in it waits, so nobody sees the client unopened
    found: C = _of_loops[key][0]
    return found


async def _while_loop_lives(key: tuple[object, ...], made: SandboxClient | Grader) -> AsyncGenerator[None]:
    """A loop that is shut down (`asyncio.run` does) ends the generators that were begun in it, and so this one."""
    try:
        async with made:
            yield
    finally:
        del _of_loops[key]


_of_loops: dict[tuple[object, ...], tuple[Any, AsyncGenerator[None]]] = {}


def blocking_client(url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> BlockingClient:
    """The client of this process for code without an event loop, for all its threads, open until the process ends."""
    return _of_process(SandboxClient.blocking, url, options)


def is_right(task: MathTask, url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> bool | str:
    """Whether an answer is the reference, or the reason why nobody knows. Raises the SandboxError of a fault.

    The graders of a process share a client of their own.
    """
    [grade] = _of_process(Grader.blocking, url, options).math([task])
    return _known(grade)


def _known(grade: MathGrade) -> bool | str:
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


def _sorted(options: ClientOptions) -> tuple[tuple[str, object], ...]:
    return tuple(sorted(options.items()))
