"""The wire to Redis below the queue: two pools of connections, one clock, and one meaning for every failure.

Commands and blocking reads have pools of their own, so that a read that waits holds nobody up. redis-py must
not repeat anything for us: after a timeout a command may well have run, and its retry would push once more.
So each command is sent at most once, and whatever goes wrong rises as `Unavailable`, with the cause kept.
What may be repeated is for the caller to know.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from sandbox._connect import connect, is_no_master, mistake
from sandbox.errors import ConfigError, Unavailable
from sandbox.process import LateTimer

log = logging.getLogger(__name__)

T = TypeVar("T")

Command = tuple[str | bytes | int, ...]

#: The first version with BLMPOP and with the lag of a group. Every Valkey calls itself Redis 7.2.
FLOOR = (7, 0)

#: The longest that one blocking read waits; proxies cut what is silent for long, and a shutdown waits for it.
MAX_BLOCK_S = 1.0

#: An answer that takes longer counts as none. Redis needs microseconds, and 100 ms to fork for a snapshot.
COMMAND_TIMEOUT_S = 2.0

#: Turns of the loop that an exchange still has when its time is over; it takes seven with a Redis that answers at once.
_LAST_TURNS = 8

#: Longer than the longest block by what a busy event loop may lag, for a read that is given up loses replies.
_READ_TIMEOUT_S = MAX_BLOCK_S + 3.0

#: What Redis answers when it has started anew.
_NO_FUNCTION = "Function not found"

#: What Redis answers when the stream or the group is gone: to a read, to a read that waited, to XINFO.
_NO_GROUP = ("NOGROUP", "UNBLOCKED", "no such key")


@dataclass(frozen=True, slots=True)
class Group:
    """Where a consumer group stands in one stream."""

    stream: str
    waiting: int  # its lag: entries that it has not delivered
    running: int  # entries delivered and not acknowledged
    taken_total: int | None  # entries ever delivered; None when Redis cannot tell
    last_delivered: str
    oldest_needed: str  # the oldest pending id, or the last delivered one when none is pending


class RedisLink:
    """Connections to one Redis, made when needed and again after a failure. `close` ends them.

    `streams` and their `group` are there whenever a command needs them: what fails for want of a group has
    not run, so the group is made and the command sent again. What has no answer after `command_timeout_s`, the
    way to Redis included, is Unavailable.
    """

    def __init__(
        self,
        url: str,
        streams: Sequence[str] = (),
        group: str = "",
        command_timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> None:
        self._streams = streams
        self._group = group
        self._command_timeout_s = command_timeout_s
        self._connections = connect(url, command_timeout_s)
        self._offset_ms: float | None = None

    async def open(self) -> None:
        """Check that a Redis which is new enough lets us in, make the streams, and read the clock.

        Raises ConfigError when it never will be, and Unavailable when it is not there now.
        """
        try:
            (info,) = await self.send(("INFO", "server"))
            version = info.decode().partition("redis_version:")[2].split()[0]
            if tuple(int(part) for part in version.split(".")[:2]) < FLOOR:
                raise ConfigError(f"Redis {version} is too old; 7.0 is needed, or any Valkey")
            with _one_meaning():
                await self._create_groups()
            await self.read_clock()
        except Unavailable as exc:
            if wrong := mistake(exc):
                raise ConfigError(wrong) from exc
            raise Unavailable(f"cannot reach Redis: {exc.__cause__}", retry_after_s=1.0) from exc.__cause__

    async def close(self) -> None:
        """Close all connections. A blocking read that still waits ends with Unavailable."""
        await self._connections.close()

    def now_ms(self) -> int:
        """Redis's clock, from our monotonic one and the offset that was last measured."""
        assert self._offset_ms is not None, "open() measures the clock"
        return int(time.monotonic() * 1000 + self._offset_ms)

    async def read_clock(self) -> None:
        """Measure how far our monotonic clock is from Redis's, at first to within half of a round trip.

        Later only what an answer disproves is corrected: one that was long on its way tells little.
        """
        before = time.monotonic()
        ((seconds, microseconds),) = await self.send(("TIME",))
        after = time.monotonic()
        told_ms = int(seconds) * 1000 + int(microseconds) / 1000
        least, most = told_ms - after * 1000, told_ms - before * 1000
        known = (least + most) / 2 if self._offset_ms is None else self._offset_ms
        self._offset_ms = min(max(known, least), most)

    async def send(self, *commands: Command) -> list[Any]:
        """Send commands in one round trip and return their RESP2 answers.

        After Unavailable some of them may have run.
        """
        return await self._with_group(lambda: self._send(commands))

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        return await self._exchange(self._connections.commands, self._command_timeout_s, commands)

    async def read(self, *commands: Command) -> list[Any]:
        """Like `send`, for commands of which the last one may wait for up to MAX_BLOCK_S."""
        return await self._with_group(
            lambda: self._exchange(self._connections.reads, _READ_TIMEOUT_S, commands)
        )

    async def call(self, function: str, keys: Sequence[str], *args: str | bytes | int) -> Any:
        """Run a function of `queue.lua`, which is all or nothing; after a timeout it may be all."""
        library, version = _library()
        command = ("FCALL", f"{function}_{version}", len(keys), *keys, *args)
        try:
            (answer,) = await self.send(command)
        except Unavailable as exc:
            if not str(exc.__cause__).endswith(_NO_FUNCTION):
                raise
            await self.send(("FUNCTION", "LOAD", "REPLACE", library))
            (answer,) = await self.send(command)
        return answer

    async def groups(self) -> list[Group]:
        """Where the group stands in each stream, in one round trip.

        The order matters to whoever trims: if nothing is pending *after* the last delivered id was read, then
        all up to that id is settled. The other way round, a call taken in between would be cut off.
        """
        asked = [
            (("XINFO", "GROUPS", stream), ("XPENDING", stream, self._group), ("XLEN", stream))
            for stream in self._streams
        ]
        answers = iter(await self.send(*(command for commands in asked for command in commands)))
        return [
            _group(stream, self._group, *told)
            for stream, told in zip(self._streams, zip(answers, answers, answers, strict=True), strict=True)
        ]

    async def _with_group(self, exchange: Callable[[], Awaitable[T]]) -> T:
        with _one_meaning():
            try:
                return await exchange()
            except ResponseError as exc:
                if not str(exc).startswith(_NO_GROUP):
                    raise
                await self._create_groups()
                return await exchange()

    async def _create_groups(self) -> None:
        """Make the streams and the group where they are not there, so that the group sees every entry."""
        for stream in self._streams:
            try:
                create = ("XGROUP", "CREATE", stream, self._group, "0", "MKSTREAM")
                await self._send([create])
            except ResponseError as exc:
                if not str(exc).startswith("BUSYGROUP"):  # it is there
                    raise
            else:
                log.info("consumer group made", extra={"stream": stream})

    async def _exchange(self, client: Redis, timeout_s: float, commands: Sequence[Command]) -> list[Any]:
        # Not through redis-py's pipeline: that takes as long again, and quotes the failed command in its exception, and
        # with it a part of somebody's program.
        pool = client.connection_pool
        async with self._within(timeout_s):
            connection = await pool.get_connection()  # type: ignore[no-untyped-call]
            try:
                await connection.send_packed_command(connection.pack_commands(commands))
                answers = [await _answer(connection) for _ in commands]
            finally:
                await pool.release(connection)
            for answer in answers:
                if isinstance(answer, ResponseError):
                    raise answer
        return answers

    @asynccontextmanager
    async def _within(self, timeout_s: float) -> AsyncIterator[None]:
        """One bound for all steps of an exchange: a free connection, the way to Redis, the answer."""
        try:
            async with asyncio.timeout(None) as bound:
                timer = LateTimer(timeout_s, _LAST_TURNS, functools.partial(bound.reschedule, 0.0))
                try:
                    yield
                finally:
                    timer.cancel()
        except TimeoutError as exc:
            raise TimeoutError(f"no answer within {timeout_s:g} s") from exc
        except RedisError as exc:
            if is_no_master(exc):
                log.warning("Redis is no master any more")
                await self._connections.close()
            raise


async def _answer(connection: AbstractConnection) -> Any:
    """The next one, also where it is an error: those behind it must be read before the connection is used again."""
    try:
        return await connection.read_response()
    except ResponseError as exc:
        return exc


def by_name(flat: Sequence[Any]) -> dict[bytes, Any]:
    """Redis's maps come as name, value, name, value."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _group(stream: str, name: str, infos: list[list[Any]], pending: list[Any], length: int) -> Group:
    info = next(info for info in map(by_name, infos) if info[b"name"] == name.encode())
    running, oldest_pending = pending[0], pending[1]
    last_delivered = info[b"last-delivered-id"].decode()
    # No lag means that somebody deleted entries by hand. What is left of the stream bounds it from above.
    waiting = length - running if info[b"lag"] is None else info[b"lag"]
    oldest_needed = oldest_pending.decode() if running else last_delivered
    # A group that has read nothing yet has no count.
    taken_total = 0 if last_delivered == "0-0" else info[b"entries-read"]
    return Group(stream, waiting, running, taken_total, last_delivered, oldest_needed)


@functools.cache
def _library() -> tuple[str, str]:
    """The functions as Redis loads them, and the end of their names, so that several versions can share a Redis."""
    text = Path(__file__).with_name("queue.lua").read_text(encoding="utf-8")
    version = blake2b(text.encode(), digest_size=4).hexdigest()
    return text.replace("@VERSION@", version), version


@contextmanager
def _one_meaning() -> Iterator[None]:
    """Turn all that redis-py raises into Unavailable; the message names the kind, for it may reach strangers.

    An error that Redis answers is of this sort too: OOM, LOADING, READONLY, MISCONF, NOAUTH say that it does
    not serve us now. RuntimeError is what uvloop raises for a write after a connection was reset,
    and AttributeError what redis-py raises where another task has closed the connection between two of its steps.

    A cancellation rises also when redis-py swallowed it: before Python 3.12 its `asyncio.wait_for` around a write
    returns what is done instead, and a loop that was to end would go on for ever.
    """
    task = asyncio.current_task()
    assert task is not None
    cancellations = task.cancelling()
    try:
        yield
    except (RedisError, OSError, RuntimeError, AttributeError) as exc:
        if task.cancelling() > cancellations:
            raise asyncio.CancelledError from exc
        raise Unavailable(f"Redis does not serve us ({type(exc).__name__})", retry_after_s=1.0) from exc
    if task.cancelling() > cancellations:
        raise asyncio.CancelledError
