"""The queue between gateways and workers, on Redis Streams.

Who is there. Gateways `put` calls into one of two streams, by priority. Workers share both streams by one
consumer group: `take` hands an entry to one of them, and it stays pending, on lease, until `settle`. Each
gateway has a stream of replies, into which workers write the results of its calls; each worker has a stream of
orders, by which gateways tell it what nobody wants any more.

    gateway ── put ──► calls ── take ──► worker
      ▲ │                                 │ ▲ renew, while it runs
      │ └──── cancel ─────► orders ───────┼─┘
      └────── replies ◄───────── settle ──┘

Between them stands a record of each call (`queue.lua` describes it), by the name that its tenant and its id make.
It says who waits, so that the same call put again, by a caller that tries again or by another gateway, joins the
one that runs or gets its result, which is kept for a while.

Who may die.
- A worker: what it held goes idle, and `reclaim` of another worker takes it, with `times_delivered` above 1.
  So a call may run twice. The first to settle it wins, and what the second brings is dropped: there is one
  acknowledgement to be had, and it decides. A worker that was only silent learns from `renew` what it has lost.
- A gateway: its callers went with it, and come back to another one, where they join. What it had read of its
  replies and not handled is still in its stream, but nobody reads that any more, and it expires.
- Redis: every method raises Unavailable until it is back. What `put` was told before that is unknown then, and so
  is what a new server knows; gateways put again what they still wait for, which the records make harmless.

Each method that changes something for many calls is one function inside of Redis, hence all or nothing and one
round trip. `put` needs memory and is refused by a full Redis; what makes room again is not.

What keeps the numbers right. The group's lag is the backlog, and the autoscaler reads it. Deleting single
calls (XDEL) or trimming by length spoils it. So settled and cancelled entries stay, and `trim` cuts the stream
below the oldest entry that is still pending. Times are Redis's own: an entry's id begins with the milliseconds of
its arrival, and deadlines are on that clock, which each process estimates (`now_ms`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox._redis import COMMAND_TIMEOUT_S, MAX_BLOCK_S, Command, RedisLink, by_name
from sandbox.calls import ToolCall, ToolResult, first_error, parse_call
from sandbox.errors import InvalidCall
from sandbox.keys import GROUP, KEEP_JOB_S, KEEP_S, MAIL_TTL_S, Keys
from sandbox.settings import RedisSettings

log = logging.getLogger(__name__)

#: One `take` in so many begins with the `judge` stream, so that a flood of tool calls cannot starve it.
FLOOR_SHARE = 8

#: Most entries of one read; each holds what was settled in one round trip.
_MAIL_PER_READ = 32

#: Results are kept for less time when Redis is more than half full, and hardly at all when it is nearly full.
_KEEP_LESS_AT, _KEEP_LEAST_AT, _KEEP_LEAST_S = 0.5, 0.85, 5

#: An idle time beyond any lease, which makes an entry free for the next `reclaim`.
_LONG_IDLE_MS = 86_400_000

#: A worker reads or renews every few seconds. One that was wrongly forgotten is back in the group when it does.
_FORGET_CONSUMER_S = 600


@dataclass(frozen=True, slots=True, eq=False)
class QueuedCall:
    """A call as its gateway puts it. Times are `now_ms`."""

    call: ToolCall
    record: str  # see `CallQueue.record`
    accepted_ms: int
    deadline_ms: int
    is_job: bool = False  # nobody's going away cancels it, and the result is kept for whoever asks


class Put(NamedTuple):
    """What came of putting a call."""

    #: `joined`: it was there; `kept`: with a result already; `other`: the name stands for a different call;
    #: `later`: kept, but no room for its result beside those of others; put it again
    outcome: Literal["queued", "joined", "kept", "other", "later"]
    result: bytes = b""  # the ToolResult as JSON, when kept


@dataclass(frozen=True, slots=True)
class Found:
    """What the queue knows of a call."""

    #: `later`: done, but no room for its result beside those of others; ask again
    state: Literal["done", "running", "waiting", "unknown", "later"]
    detail: bytes = b""  # done: the ToolResult as JSON; running: the worker
    due_ms: int = field(default=0, compare=False)  # running or waiting: when its answer is due


class Place(NamedTuple):
    """Where a call lies. An id alone may stand in both streams."""

    stream: str
    entry_id: str


@dataclass(frozen=True, slots=True)
class Delivery:
    """A call as a worker takes it. It is the worker's until its lease ends or it is settled."""

    entry_id: str
    stream: str
    record: str
    call: ToolCall  # `deadline_s` and `priority` are not in it: the times below and the stream say that
    accepted_ms: int
    deadline_ms: int
    times_delivered: int  # 1 for the first worker

    @property
    def place(self) -> Place:
        """What tells it from every other delivery."""
        return Place(self.stream, self.entry_id)


class Outcome(NamedTuple):
    """How a delivery ends."""

    delivery: Delivery
    result: ToolResult | None  # None: nobody wants one any more
    is_poison: bool = False  # workers did not survive it: keep the fault, and a dead letter


class DeadLetter(BaseModel):
    """A call that no worker survived."""

    model_config = ConfigDict(frozen=True)

    call: ToolCall
    tenant: str
    reason: str
    times_delivered: int
    died_ms: int  # Unix time, on Redis's clock


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
    python: str = ""  # the version that its programs run under; empty for a worker that does not say


class CallQueue:
    """The way to Redis of one process. Open it first; it reconnects by itself ever after.

    Every coroutine raises Unavailable when Redis does not serve; `open` may also raise ConfigError.
    """

    def __init__(self, settings: RedisSettings, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """`timeout_s`: how long Redis may take for what does not wait by itself."""
        self._keys = Keys(settings.namespace)
        self._streams = (self._keys.calls("tool"), self._keys.calls("judge"))
        self._link = RedisLink(settings.url, self._streams, GROUP, command_timeout_s=timeout_s)
        self._takes = 0
        self._keep_s = float(KEEP_S)
        # What the last read of each brought.
        self._replies: list[bytes] = []
        self._orders: list[bytes] = []

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

    def record(self, tenant: str, call_id: str) -> str:
        """What a call is known by in the whole service."""
        return self._keys.call(tenant, call_id)

    # ---- for gateways ----

    async def put(self, gateway: str, calls: Sequence[QueuedCall]) -> list[Put]:
        """Queue calls, or join those that are there already; the outcomes are in the order of the calls.

        After Unavailable they may be queued all the same. Putting them again is harmless.
        """
        if not calls:
            return []
        now_ms = self.now_ms()
        keys: list[str] = []
        args: list[str | int] = [self._keys.replies(gateway)]
        for queued in calls:
            keys += [self._keys.calls(queued.call.priority), queued.record]
            body = queued.call.model_dump_json(exclude=_NOT_IN_THE_ENTRY)
            digest = blake2b(body.encode(), digest_size=16).hexdigest()
            ttl_ms = max(0, queued.deadline_ms - now_ms) + KEEP_S * 1000
            keep_ms = int((KEEP_JOB_S if queued.is_job else self._keep_s) * 1000)
            job = "1" if queued.is_job else ""
            args += [digest, body, queued.accepted_ms, queued.deadline_ms, ttl_ms, keep_ms, job]
        return [
            Put(outcome.decode(), *result) for outcome, *result in await self._link.call("put", keys, *args)
        ]

    async def cancel(self, gateway: str, records: Sequence[str]) -> list[Found]:
        """Wait no longer for these calls; what nobody else waits for is stopped. Tells what was known before."""
        return await self._cancel(self._keys.replies(gateway), records)

    async def stop(self, record: str) -> Found:
        """Stop a call whoever waits for it; each of them gets an empty reply. Tells what was known before."""
        [found] = await self._cancel("", [record])
        return found

    async def _cancel(self, waiter: str, records: Sequence[str]) -> list[Found]:
        answers = await self._link.call("cancel", records, waiter, GROUP, self._keys.orders(""), MAIL_TTL_S)
        return [_found(*answer) for answer in answers]

    async def look(self, record: str) -> Found:
        """What is known of a call."""
        return _found(*await self._link.call("watch", [record], "", GROUP))

    async def watch(self, gateway: str, record: str) -> Found:
        """Wait for a call that somebody has put; unless it is done or unknown, `replies` will bring it."""
        return _found(*await self._link.call("watch", [record], self._keys.replies(gateway), GROUP))

    async def replies(self, gateway: str, block_s: float = MAX_BLOCK_S) -> list[tuple[str, bytes]]:
        """A gateway's results as (record, ToolResult JSON); if there is none, wait `block_s`, at most 1 s.

        What one read brings is forgotten by the next; one that fails or is cancelled loses nothing.
        """
        entries = await self._read_mail(self._replies, self._keys.replies(gateway), block_s)
        return [
            (record.decode(errors="replace"), result)
            for flat in entries
            for record, result in zip(flat[::2], flat[1::2], strict=True)
        ]

    async def dead_letters(self, count: int) -> list[tuple[str, DeadLetter]]:
        """The last dead letters, the newest first, by their entry."""
        (entries,) = await self._link.send(("XREVRANGE", self._keys.dead, "+", "-", "COUNT", count))
        return [(entry.decode(), DeadLetter.model_validate_json(flat[1])) for entry, flat in entries]

    async def dead_letter(self, entry: str) -> DeadLetter | None:
        """One of them."""
        (entries,) = await self._link.send(("XRANGE", self._keys.dead, entry, entry))
        return DeadLetter.model_validate_json(entries[0][1][1]) if entries else None

    async def drop_dead_letter(self, entry: str) -> bool:
        """Forget one; whether it was there."""
        (dropped,) = await self._link.send(("XDEL", self._keys.dead, entry))
        return bool(dropped)

    # ---- for workers ----

    async def take(self, consumer: str, count: int, block_s: float = MAX_BLOCK_S) -> list[Delivery]:
        """Take up to `count` calls, `tool` before `judge`; if there is none, wait `block_s`, at most 1 s.

        Cancelled calls are not handed out, but for one that was cancelled in the moment in which it came. Do not
        cancel this read: what it was to bring lies idle until you `resume`, or for a lease.
        """
        if count < 1:
            raise ValueError("count must be at least 1, and means free slots")
        self._takes += 1
        streams = self._streams[::-1] if self._takes % FLOOR_SHARE == 0 else self._streams
        taken = await self._deliveries(await self._link.call("take", streams, GROUP, consumer, count))
        if taken or block_s <= 0:
            return taken
        # A function cannot wait. COUNT is per stream: if both got a call meanwhile, both are brought.
        heads = [">"] * len(streams)
        block_ms = max(1, int(min(block_s, MAX_BLOCK_S) * 1000))
        read = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", 1, "BLOCK", block_ms, "STREAMS", *streams)
        (answer,) = await self._link.read((*read, *heads))
        taken = await self._deliveries(
            [(stream, entry, flat, 1) for stream, entries in answer or () for entry, flat in entries]
        )
        await self.hand_back(consumer, taken[count:])
        return taken[:count]

    async def resume(self, consumer: str, held: Collection[Place], count: int) -> list[Delivery]:
        """What we have taken and do not hold, up to `count`: after a `take` that failed, what its answer was to bring.

        They lie with us for a lease otherwise, and each time would count as a worker that did not survive them.
        """
        # None is missing then that this does not bring: a consumer has no more than it holds and was about to hold.
        most = len(held) + count + 1
        places = [part for place in held for part in place]
        missed = await self._deliveries(
            await self._link.call("resume", self._streams, GROUP, consumer, most, *places)
        )
        await self.hand_back(consumer, missed[count:])
        return missed[:count]

    async def settle(self, done: Sequence[Outcome]) -> list[bool]:
        """Hand results to the gateways that wait and give up the leases. Settling again is harmless.

        Tells of each whether it was ours to settle: else another worker had taken it over and was first.
        """
        if not done:
            return []
        keys, args = [self._keys.dead], [GROUP, str(MAIL_TTL_S)]
        for delivery, result, is_poison in done:
            keys += [delivery.stream, delivery.record]
            is_final = result is not None and (is_poison or not result.status.is_fault)
            letter = self._letter(delivery, result) if is_poison and result is not None else ""
            body = "" if result is None else result.model_dump_json()
            args += [delivery.entry_id, body, str(int(is_final)), letter]
        return [settled == 1 for settled in await self._link.call("settle", keys, *args)]

    def _letter(self, delivery: Delivery, result: ToolResult) -> str:
        return DeadLetter(
            call=delivery.call,
            tenant=self._keys.tenant(delivery.record),
            reason=result.reason or "",
            times_delivered=delivery.times_delivered,
            died_ms=self.now_ms(),
        ).model_dump_json()

    async def renew(self, consumer: str, deliveries: Sequence[Delivery]) -> list[Delivery]:
        """Begin the leases of running calls anew. Returns those that are not ours any more.

        Another worker has taken them over, they are settled, or nobody wants them: stop running them.
        """
        if not deliveries:
            return []
        keys = [key for held in deliveries for key in (held.stream, held.record)]
        entries = [held.entry_id for held in deliveries]
        renewed = await self._link.call("renew", keys, GROUP, consumer, *entries)
        return [held for held, ours in zip(deliveries, renewed, strict=True) if not ours]

    async def reclaim(self, consumer: str, idle_s: float, count: int) -> list[Delivery]:
        """Take over up to `count` calls that nobody has renewed for `idle_s`.

        Renew your own calls first: an idle one of your own is taken like any other.
        """
        # Not XAUTOCLAIM: it looks at ten entries for each one asked for, so that calls which run long hide
        # the idle ones behind them, and it does not tell how often a call was delivered.
        idle_ms = int(idle_s * 1000)
        return await self._deliveries(
            await self._link.call("reclaim", self._streams, GROUP, consumer, idle_ms, count)
        )

    async def hand_back(self, consumer: str, deliveries: Sequence[Delivery]) -> None:
        """Give up calls without an answer: the next `reclaim`, of anybody, finds them, and ours does not count."""
        if deliveries:
            counts = [arg for held in deliveries for arg in (held.entry_id, held.times_delivered)]
            streams = [held.stream for held in deliveries]
            await self._link.call("hand_back", streams, GROUP, consumer, _LONG_IDLE_MS, *counts)

    async def forget_consumers(self, idle_s: float = _FORGET_CONSUMER_S) -> None:
        """Take killed workers out of the group, which Redis keeps: who holds nothing and is silent for so long."""
        await self._link.call("forget_consumers", self._streams, GROUP, int(idle_s * 1000), "")

    async def orders(self, consumer: str, block_s: float = MAX_BLOCK_S) -> list[Place]:
        """The calls that this worker shall stop running; if there is none, wait `block_s`, at most 1 s."""
        mail = await self._read_mail(self._orders, self._keys.orders(consumer), block_s)
        return [Place(stream.decode(), entry.decode()) for _, stream, _, entry in mail]

    async def trim(self) -> None:
        """Forget settled calls, up to the oldest one that is still pending."""
        groups = await self._link.groups()
        await self._link.send(
            *(("XTRIM", group.stream, "MINID", "=", group.oldest_needed) for group in groups)
        )

    async def pulse(self) -> Pulse:
        """How full Redis is and how far the workers are; sets the clock as `ping` does."""
        await self._link.read_clock()
        groups = await self._link.groups()
        (info,) = await self._link.send(("INFO", "server", "memory"))
        told = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
        pulse = Pulse(
            run_id=told["run_id"],
            used_bytes=int(told["used_memory"]),
            max_bytes=int(told["maxmemory"]),
            streams={
                group.stream.rpartition(":")[2]: StreamPulse(group.waiting, group.running, group.taken_total)
                for group in groups
            },
        )
        self._keep_s = keep_s(pulse.used_bytes, pulse.max_bytes)
        return pulse

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
        await self._link.call("forget_consumers", self._streams, GROUP, 0, worker_id)

    async def workers(self) -> list[WorkerInfo]:
        """The workers that live."""
        (ids,) = await self._link.send(("ZRANGE", self._keys.workers, 0, -1))
        if not ids:
            return []
        (announced,) = await self._link.send(("MGET", *(self._keys.worker(id_.decode()) for id_ in ids)))
        infos = (_worker_info(text) for text in announced if text is not None)
        return [info for info in infos if info is not None]

    async def _read_mail(self, handled: list[bytes], key: str, block_s: float) -> list[list[bytes]]:
        """Entries that are there, without those that the last read brought, which are forgotten."""
        forget: list[Command] = [("XDEL", key, *handled)] if handled else []
        block = ("BLOCK", max(1, int(min(block_s, MAX_BLOCK_S) * 1000))) if block_s > 0 else ()
        # From the beginning, not from a cursor: a Redis that has started anew may count from below it.
        read = ("XREAD", "COUNT", _MAIL_PER_READ, *block, "STREAMS", key, "0")
        *_, answer = await self._link.read(*forget, read)
        entries = answer[0][1] if answer else []
        handled[:] = [entry for entry, _ in entries]
        return [flat for _, flat in entries]

    async def _deliveries(
        self, found: Sequence[tuple[bytes, bytes, list[bytes] | None, int]]
    ) -> list[Delivery]:
        """Read entries that are ours now. What is no call is acknowledged, or it would come back for ever."""
        taken: list[Delivery] = []
        for stream, entry_id, fields, times in found:
            try:
                taken.append(_delivery(stream, entry_id, fields or [], times))
            except (KeyError, ValueError, InvalidCall) as exc:
                why = f"{type(exc).__name__}: {exc}"[:200]
                log.warning(
                    "dropped an entry that is no call", extra={"entry": entry_id.decode(), "why": why}
                )
                await self._link.send(("XACK", stream, GROUP, entry_id))
        return taken


#: What an entry says beside the call, and what a caller that tries again may say anew.
_NOT_IN_THE_ENTRY = {"deadline_s", "priority"}


def _found(state: bytes, detail: bytes = b"", due_ms: bytes = b"0") -> Found:
    return Found(state.decode(), detail, int(due_ms))  # type: ignore[arg-type]  # its words are those of `queue.lua`


def keep_s(used_bytes: int, max_bytes: int) -> float:
    """How long results are kept: less from half of Redis's memory on, and hardly when it is nearly full."""
    share = used_bytes / max_bytes if max_bytes else 0.0
    fullness = min(1.0, max(0.0, (share - _KEEP_LESS_AT) / (_KEEP_LEAST_AT - _KEEP_LESS_AT)))
    return KEEP_S - (KEEP_S - _KEEP_LEAST_S) * fullness


def _worker_info(text: bytes) -> WorkerInfo | None:
    """What a worker says of itself; None for one whose words we do not know, as of another version."""
    try:
        return WorkerInfo.model_validate_json(text)
    except ValidationError as exc:
        log.warning("a worker says what we do not understand", extra={"why": first_error(exc)})
        return None


def _delivery(stream: bytes, entry_id: bytes, flat: list[bytes], times_delivered: int) -> Delivery:
    fields = by_name(flat)
    return Delivery(
        entry_id=entry_id.decode(),
        stream=stream.decode(),
        record=fields[b"record"].decode(),
        call=parse_call(fields[b"call"]),
        accepted_ms=int(fields[b"accepted_ms"]),
        deadline_ms=int(fields[b"deadline_ms"]),
        times_delivered=times_delivered,
    )
