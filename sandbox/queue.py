"""The queue between gateways and workers, on Redis Streams.

Who is there. Gateways `put` calls into one of two streams, by priority. Workers share both streams by one
consumer group: `take` hands an entry to one of them, and it stays pending, on lease, until `settle`. Each
gateway has one list into which workers push the results of its calls, and one task that reads it (`replies`).

    gateway ── put: XADD ──► stream ── take: XREADGROUP ──► worker
       ▲                                                       │ renew: XCLAIM JUSTID, while it runs
       └──── replies: BLMPOP ◄── list ◄── settle: RPUSH, then XACK

Who may die.
- A worker: what it held goes idle, and `reclaim` of another worker takes it, with `times_delivered` above 1.
  So a call may run twice, and its gateway may get two results: it keeps the first, and drops the other by id.
- A gateway: its clients went with it. Workers settle its calls into a list that expires.
- Redis: every method raises Unavailable until it is back. If it comes back empty, the streams and the group
  are made anew by whoever misses them; the gateways' callers see their deadlines pass, and send again.

What keeps the numbers right. The group's lag is the backlog, and the autoscaler reads it. Deleting single
entries (XDEL) or trimming by length spoils it. So settled entries stay, and `trim` cuts the stream below the
oldest entry that is still pending. Times are Redis's own: an entry's id begins with the milliseconds of its
arrival, and deadlines are on that clock, which each process estimates (`now_ms`).

An entry has four fields: `call` (the ToolCall as JSON), `reply_to`, `accepted_ms`, `deadline_ms`. An element
of a reply list is the call's id, a space, and the ToolResult as JSON, which the gateway need not parse.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox._redis import MAX_BLOCK_S, Command, RedisLink, by_name
from sandbox.calls import ToolCall, ToolResult, first_error, parse_call
from sandbox.errors import InvalidCall
from sandbox.keys import GROUP, REPLY_TTL_S, Keys
from sandbox.settings import RedisSettings

log = logging.getLogger(__name__)

#: One `take` in so many begins with the `judge` stream, so that a flood of tool calls cannot starve it.
_FLOOR_SHARE = 8

#: Most replies of one read: enough to share a round trip, and few enough of the largest (12 MB) to hold at once.
_REPLIES_PER_READ = 32

#: An idle time beyond any lease, which makes an entry free for the next `reclaim`.
_LONG_IDLE_MS = 86_400_000

#: Holds what was handed back, so that the worker which gave it up can leave the group.
_NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class QueuedCall:
    """A call as its gateway puts it. Times are `now_ms`."""

    call: ToolCall
    reply_to: str  # id of the gateway process that waits
    accepted_ms: int
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Delivery:
    """A call as a worker takes it. It is the worker's until its lease ends or it is settled."""

    entry_id: str
    stream: str
    call: ToolCall
    reply_to: str
    accepted_ms: int
    deadline_ms: int
    times_delivered: int  # 1 for the first worker


@dataclass(frozen=True, slots=True)
class Backlog:
    """How full the queue is."""

    waiting: int  # calls that no worker has taken
    running: int  # calls taken and not settled
    oldest_wait_s: float  # age of the oldest call that waits; 0 when none does


@dataclass(frozen=True, slots=True)
class StreamPulse:
    """Where the workers stand in the stream of one priority."""

    waiting: int  # calls that no worker has taken
    running: int  # calls taken and not settled
    taken_total: int | None  # calls ever taken; None when somebody deleted entries, so that Redis cannot tell


@dataclass(frozen=True, slots=True)
class Pulse:
    """What Redis tells of itself and of the streams."""

    run_id: str  # names one life of one server, and so changes with a restart or a failover
    used_bytes: int
    max_bytes: int  # above it Redis refuses calls; 0: no bound
    streams: dict[str, StreamPulse]  # by priority


class WorkerInfo(BaseModel):
    """What a worker tells of itself. Fields of a newer worker are left out, so that versions can mix."""

    model_config = ConfigDict(frozen=True)

    id: str
    slots: int
    busy: int
    level: str  # the isolation that its jails have
    draining: bool
    started_at: float  # Unix time
    version: str


class CallQueue:
    """The way to Redis of one process. Open it first; it reconnects by itself ever after.

    Every coroutine raises Unavailable when Redis does not serve; `open` may also raise ConfigError.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._keys = Keys(settings.namespace)
        self._streams = (self._keys.calls("tool"), self._keys.calls("judge"))
        self._link = RedisLink(settings.url, self._streams, GROUP)
        self._takes = 0

    async def open(self) -> None:
        """Connect, check the server's version, make streams and group if need be, and read the clock."""
        await self._link.open()

    async def close(self) -> None:
        """Close the connections. End your blocking reads first: one that still waits raises Unavailable."""
        await self._link.close()

    def now_ms(self) -> int:
        """The time on Redis's clock, estimated without asking."""
        return self._link.now_ms()

    async def ping(self) -> None:
        """Make sure that Redis answers, and set the clock by it."""
        await self._link.read_clock()

    async def put(self, calls: Sequence[QueuedCall]) -> None:
        """Queue calls in one round trip.

        After Unavailable some of them may be queued all the same. They run, and their replies find nobody.
        """
        await self._link.send(*(_entry(self._keys.calls(queued.call.priority), queued) for queued in calls))

    async def take(self, consumer: str, count: int, block_s: float = MAX_BLOCK_S) -> list[Delivery]:
        """Take up to `count` calls, `tool` before `judge`; if there is none, wait `block_s`, at most 1 s.

        Do not cancel it: what it was to bring would lie idle for a lease.
        """
        if count < 1:
            raise ValueError("count must be at least 1, and means free slots")
        self._takes += 1
        streams = self._streams[::-1] if self._takes % _FLOOR_SHARE == 0 else self._streams
        for stream in streams:
            # What was taken goes out at once: if another read failed now, it would lie idle for a lease.
            if taken := await self._read(consumer, count, 0, stream):
                return taken
        if block_s <= 0:
            return []
        # COUNT is per stream: if both got a call meanwhile, both are brought, also when one was asked for.
        taken = await self._read(consumer, 1, block_s, *streams)
        await self.hand_back(taken[count:])
        return taken[:count]

    async def settle(self, done: Sequence[tuple[Delivery, ToolResult]]) -> None:
        """Hand results to the gateways that wait and give up the leases, in one round trip.

        Replies stand before acknowledgements, and all of it is one transaction: a Redis that is out of memory
        refuses the reply but not the acknowledgement, and the call would be lost. Settling again is harmless.
        """
        replies: dict[str, list[str]] = defaultdict(list)
        acks: dict[str, list[str]] = defaultdict(list)
        for delivery, result in done:
            replies[delivery.reply_to].append(f"{result.id} {result.model_dump_json()}")
            acks[delivery.stream].append(delivery.entry_id)
        commands: list[Command] = []
        for gateway, elements in replies.items():
            key = self._keys.replies(gateway)
            commands += [("RPUSH", key, *elements), ("EXPIRE", key, REPLY_TTL_S)]
        commands += [("XACK", stream, GROUP, *ids) for stream, ids in acks.items()]
        if commands:
            await self._link.send(*commands, atomic=True)

    async def forget(self, deliveries: Sequence[Delivery]) -> None:
        """Give up calls that their gateways have answered. A full Redis takes this where it takes no reply."""
        await self._link.send(*(("XACK", given.stream, GROUP, given.entry_id) for given in deliveries))

    async def renew(self, consumer: str, deliveries: Sequence[Delivery]) -> None:
        """Begin the leases of running calls anew. One that was settled or trimmed meanwhile is left alone.

        A call that another worker has reclaimed becomes ours again, and then runs at both.
        """
        ids: dict[str, list[str]] = defaultdict(list)
        for delivery in deliveries:
            ids[delivery.stream].append(delivery.entry_id)
        claims: list[Command] = [
            ("XCLAIM", stream, GROUP, consumer, 0, *entries, "JUSTID") for stream, entries in ids.items()
        ]
        await self._link.send(*claims)

    async def reclaim(self, consumer: str, idle_s: float, count: int) -> list[Delivery]:
        """Take over up to `count` calls that nobody has renewed for `idle_s`.

        Renew your own calls first: an idle one of your own is taken like any other.
        """
        # Not XAUTOCLAIM: it looks at ten entries for each one asked for, so that calls which run long hide
        # the idle ones behind them, and it does not tell how often a call was delivered.
        reclaimed: list[Delivery] = []
        idle_ms = int(idle_s * 1000)
        for stream in self._streams:
            if len(reclaimed) == count:
                break
            limit = count - len(reclaimed)
            (idle,) = await self._link.send(("XPENDING", stream, GROUP, "IDLE", idle_ms, "-", "+", limit))
            if idle:
                times = {entry_id: delivered + 1 for entry_id, _, _, delivered in idle}
                (entries,) = await self._link.send(("XCLAIM", stream, GROUP, consumer, idle_ms, *times))
                reclaimed += await self._deliveries(stream, entries, times)
        return reclaimed

    async def hand_back(self, deliveries: Sequence[Delivery]) -> None:
        """Give up calls without an answer: the next `reclaim`, of anybody, finds them, and ours does not count."""
        idle = ("IDLE", _LONG_IDLE_MS)
        await self._link.send(
            *(
                ("XCLAIM", held.stream, GROUP, _NOBODY, 0, held.entry_id, *idle,
                 "RETRYCOUNT", held.times_delivered - 1, "JUSTID")
                for held in deliveries
            )
        )  # fmt: skip

    async def trim(self) -> None:
        """Forget settled calls, up to the oldest one that is still pending."""
        groups = await self._link.groups()
        await self._link.send(
            *(("XTRIM", group.stream, "MINID", "=", group.oldest_needed) for group in groups)
        )

    async def replies(self, gateway: str, block_s: float = MAX_BLOCK_S) -> list[tuple[str, bytes]]:
        """A gateway's results as (call id, ToolResult JSON); if there is none, wait `block_s`, at most 1 s.

        Do not cancel it: Redis has already forgotten what it was to bring.
        """
        pop: tuple[str | int, ...] = (1, self._keys.replies(gateway), "LEFT", "COUNT", _REPLIES_PER_READ)
        if block_s > 0:
            popped = await self._link.read("BLMPOP", max(0.001, min(block_s, MAX_BLOCK_S)), *pop)
        else:
            popped = await self._link.read("LMPOP", *pop)
        if popped is None:
            return []
        parts = [element.partition(b" ") for element in popped[1]]
        if not all(result for _, _, result in parts):
            log.warning("dropped a reply that is none", extra={"gateway": gateway})
        return [(call_id.decode(errors="replace"), result) for call_id, _, result in parts if result]

    async def backlog(self) -> Backlog:
        """How many calls wait and run, and how long the oldest of the waiting has waited."""
        groups = await self._link.groups()
        waiting = [group for group in groups if group.waiting]
        firsts = await self._link.send(
            *(("XRANGE", group.stream, f"({group.last_delivered}", "+", "COUNT", 1) for group in waiting)
        )
        now_ms = self.now_ms()
        ages_ms = [now_ms - int(entry_id.split(b"-")[0]) for first in firsts for entry_id, _ in first]
        return Backlog(
            waiting=sum(group.waiting for group in groups),
            running=sum(group.running for group in groups),
            oldest_wait_s=max([0, *ages_ms]) / 1000,
        )

    async def announce(self, info: WorkerInfo, ttl_s: float) -> None:
        """Say that a worker lives. The word holds for `ttl_s`, so say it again before that."""
        now_ms, ttl_ms = self.now_ms(), int(ttl_s * 1000)
        index = self._keys.workers
        await self._link.send(
            ("SET", self._keys.worker(info.id), info.model_dump_json(), "PX", ttl_ms),
            ("ZADD", index, now_ms + ttl_ms, info.id),
            ("ZREMRANGEBYSCORE", index, "-inf", now_ms),
            # A key without expiry counts as one that never ends, which GT does not touch: hence NX first.
            ("PEXPIRE", index, ttl_ms, "NX"),
            ("PEXPIRE", index, ttl_ms, "GT"),
        )

    async def retire(self, worker_id: str) -> None:
        """Take a worker that takes no more calls off the list.

        Its consumer leaves the group too, unless calls are pending with it: Redis would forget those with it.
        """
        await self._link.send(("DEL", self._keys.worker(worker_id)), ("ZREM", self._keys.workers, worker_id))
        held = await self._link.send(
            *(("XPENDING", stream, GROUP, "-", "+", 1, worker_id) for stream in self._streams)
        )
        free = [stream for stream, pending in zip(self._streams, held, strict=True) if not pending]
        await self._link.send(*(("XGROUP", "DELCONSUMER", stream, GROUP, worker_id) for stream in free))

    async def workers(self) -> list[WorkerInfo]:
        """The workers that live."""
        (ids,) = await self._link.send(("ZRANGE", self._keys.workers, 0, -1))
        if not ids:
            return []
        (announced,) = await self._link.send(("MGET", *(self._keys.worker(id_.decode()) for id_ in ids)))
        infos = (_worker_info(text) for text in announced if text is not None)
        return [info for info in infos if info is not None]

    async def _read(self, consumer: str, count: int, block_s: float, *streams: str) -> list[Delivery]:
        block = ("BLOCK", max(1, int(min(block_s, MAX_BLOCK_S) * 1000))) if block_s > 0 else ()
        heads = [">"] * len(streams)
        answer = await self._link.read(
            "XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, *block, "STREAMS", *streams, *heads
        )
        taken: list[Delivery] = []
        for stream, entries in answer or ():
            taken += await self._deliveries(stream.decode(), entries, {})
        return taken

    async def _deliveries(
        self, stream: str, entries: Sequence[tuple[bytes, list[bytes]]], times: Mapping[bytes, int]
    ) -> list[Delivery]:
        """Read entries that are ours now. What is no call is acknowledged, or it would come back for ever."""
        taken, garbage = [], []
        for entry_id, fields in entries:
            try:
                taken.append(_delivery(stream, entry_id, fields, times.get(entry_id, 1)))
            except (KeyError, ValueError, InvalidCall) as exc:
                garbage.append(entry_id)
                why = f"{type(exc).__name__}: {exc}"[:200]
                log.warning(
                    "dropped an entry that is no call", extra={"entry": entry_id.decode(), "why": why}
                )
        if garbage:
            await self._link.send(("XACK", stream, GROUP, *garbage))
        return taken

    async def pulse(self) -> Pulse:
        """How full Redis is and how far the workers are; sets the clock as `ping` does."""
        await self._link.read_clock()
        groups = await self._link.groups()
        (info,) = await self._link.send(("INFO", "server", "memory"))
        told = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
        return Pulse(
            run_id=told["run_id"],
            used_bytes=int(told["used_memory"]),
            max_bytes=int(told["maxmemory"]),
            streams={
                group.stream.rpartition(":")[2]: StreamPulse(group.waiting, group.running, group.taken_total)
                for group in groups
            },
        )


def _worker_info(text: bytes) -> WorkerInfo | None:
    """What a worker says of itself; None for one whose words we do not know, as of another version."""
    try:
        return WorkerInfo.model_validate_json(text)
    except ValidationError as exc:
        log.warning("a worker says what we do not understand", extra={"why": first_error(exc)})
        return None


def _entry(stream: str, queued: QueuedCall) -> Command:
    return (
        "XADD", stream, "*",
        "call", queued.call.model_dump_json(),
        "reply_to", queued.reply_to,
        "accepted_ms", queued.accepted_ms,
        "deadline_ms", queued.deadline_ms,
    )  # fmt: skip


def _delivery(stream: str, entry_id: bytes, flat: list[bytes], times_delivered: int) -> Delivery:
    fields = by_name(flat)
    return Delivery(
        entry_id=entry_id.decode(),
        stream=stream,
        call=parse_call(fields[b"call"]),
        reply_to=fields[b"reply_to"].decode(),
        accepted_ms=int(fields[b"accepted_ms"]),
        deadline_ms=int(fields[b"deadline_ms"]),
        times_delivered=times_delivered,
    )
