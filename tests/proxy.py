"""A way to a server that a test can break: a proxy which passes, holds, swallows or resets what goes through it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

#: Where bytes go.
Way = Literal["to_server", "to_client"]

BOTH: tuple[Way, Way] = ("to_server", "to_client")

#: A port of 127.0.0.1, or a Unix socket.
Place = int | Path


@dataclass(eq=False, slots=True)
class _Pair:
    """One connection of a client, and ours to the server for it."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    dead: set[Way] = field(default_factory=set)


class Proxy:
    """Passes everything until told otherwise. What it is told holds for the connections there are and for new ones.

    A connection that has lost bytes stays lost in that direction, also when the proxy is healed, and neither end hears
    that the other has closed it: that is what a host or a router which vanished looks like.
    """

    def __init__(self, server: Place) -> None:
        self.server = server  # of the connections to come; a test may change it
        self._pairs: set[_Pair] = set()
        self._dropped: set[Way] = set()
        self._open = {way: asyncio.Event() for way in BOTH}
        self._swallowed = {way: asyncio.Event() for way in BOTH}
        self._tasks: set[asyncio.Task[None]] = set()
        self.place: Place = 0  # where clients connect
        self.release()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._pairs)

    def drop(self, *ways: Way) -> None:
        """Swallow what comes from now on, silently; in both directions if none is named."""
        self._dropped = set(ways or BOTH)
        for event in self._swallowed.values():
            event.clear()

    async def swallowed(self, way: Way) -> None:
        """Return when something was swallowed since `drop`."""
        await self._swallowed[way].wait()

    def heal(self) -> None:
        """Swallow nothing more of new connections, and of those that have lost nothing."""
        self._dropped = set()

    def hold(self, *ways: Way) -> None:
        """Let bytes wait until `release`; in both directions if none is named."""
        for way in ways or BOTH:
            self._open[way].clear()

    def release(self) -> None:
        """Let go on what was held, in order."""
        for event in self._open.values():
            event.set()

    def reset(self) -> None:
        """End all connections by RST, at both ends."""
        for writer in (end for pair in self._pairs for end in pair.writers):
            if writer.is_closing():
                continue
            sock = writer.get_extra_info("socket")
            if sock.family != socket.AF_UNIX:
                linger_for_no_time = struct.pack("ii", 1, 0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_for_no_time)
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one client until it ends."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            server_reader, server_writer = await _connect(self.server)
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair((writer, server_writer))
        self._pairs.add(pair)
        await asyncio.gather(
            self._pump("to_server", reader, server_writer, pair),
            self._pump("to_client", server_reader, writer, pair),
        )
        self._pairs.remove(pair)
        for end in pair.writers:
            end.close()

    async def end(self) -> None:
        """End what is still connected."""
        self.release()
        self.reset()
        await asyncio.gather(*self._tasks)

    async def _pump(
        self, way: Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: _Pair
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                await self._open[way].wait()
                if way in self._dropped:
                    pair.dead.add(way)
                if way in pair.dead:
                    self._swallowed[way].set()
                    continue
                sink.write(data)
                await sink.drain()
        if way not in pair.dead | self._dropped:
            sink.close()


async def _connect(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(place, Path):
        return await asyncio.open_unix_connection(place)
    return await asyncio.open_connection("127.0.0.1", place)


@asynccontextmanager
async def proxy_to(server: Place, listen: Place = 0) -> AsyncIterator[Proxy]:
    """A proxy at `place`, which is a free port of 127.0.0.1 unless `listen` says otherwise."""
    proxy = Proxy(server)
    if isinstance(listen, Path):
        listener = await asyncio.start_unix_server(proxy.accept, listen)
        proxy.place = listen
    else:
        listener = await asyncio.start_server(proxy.accept, "127.0.0.1", listen)
        proxy.place = listener.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        listener.close()
        await proxy.end()
        await listener.wait_closed()
