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
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from functools import cache
from typing import NamedTuple, Unpack

from sandbox.client import DEFAULT_URL, BlockingClient, ClientOptions, SandboxClient

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
    with _making:
        # A fork has no thread of its parent's, so none of its clients.
        return _blocking(os.getpid(), url, _sorted(options))


_making = threading.Lock()


@cache
def _blocking(process: int, url: str, options: _Options) -> BlockingClient:  # noqa: ARG001 - a part of the key
    stack = ExitStack()
    fields = ClientOptions(**dict(options))  # type: ignore[typeddict-item]
    client = stack.enter_context(SandboxClient.blocking(url, **fields))
    atexit.register(stack.close)
    return client


def _sorted(options: ClientOptions) -> _Options:
    return tuple(sorted(options.items()))
