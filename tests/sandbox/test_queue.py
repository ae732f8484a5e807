"""The queue on real servers: what it promises while all is well, and when workers or Redis die.

Time is not waited for. An entry is made idle, a key made to expire, by a stranger's connection.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.calls import Base64File, CallStatus, Limits, ToolCall, ToolResult
from sandbox.errors import ConfigError, Unavailable
from sandbox.keys import GROUP, Keys
from sandbox.queue import Backlog, CallQueue, Delivery, QueuedCall, StreamPulse, WorkerInfo
from sandbox.settings import RedisSettings

KEYS = Keys("test")
TOOL, JUDGE = KEYS.calls("tool"), KEYS.calls("judge")
TIGHT = 3.0  # seconds within which a failure must show; the slowest of ours takes 2


@pytest.fixture
async def open_queue(redis_server) -> AsyncIterator[Callable[[], Any]]:
    """Opens queues as other processes would, and closes them after the test."""
    queues: list[CallQueue] = []

    async def open_one() -> CallQueue:
        queue = CallQueue(redis_server.settings)
        queues.append(queue)
        await queue.open()
        return queue

    yield open_one
    for queue in queues:
        await queue.close()


@pytest.fixture
async def queue(open_queue) -> CallQueue:
    """An open queue on a fresh Redis."""
    return await open_queue()


def calls(queue: CallQueue, *names: str, priority: str = "tool") -> list[QueuedCall]:
    """Calls of one gateway, accepted now and due in a minute."""
    now_ms = queue.now_ms()
    return [
        QueuedCall(
            ToolCall(id=name, code=f"print({name!r})", priority=priority), "gw-1", now_ms, now_ms + 60_000
        )
        for name in names
    ]


def ok(delivery: Delivery) -> tuple[Delivery, ToolResult]:
    """The delivery with a result for it."""
    return delivery, ToolResult(id=delivery.call.id, status=CallStatus.OK, exit_code=0)


def names(deliveries: Sequence[Delivery]) -> list[str]:
    """Ids of the calls."""
    return [delivery.call.id for delivery in deliveries]


def make_idle(redis_server, delivery: Delivery, idle_s: float) -> None:
    """Let a lease look as if nobody had renewed it for so long, without touching owner or count."""
    entry_id = delivery.entry_id
    with redis_server.client() as stranger:
        (pending,) = stranger.xpending_range(delivery.stream, GROUP, entry_id, entry_id, 1)
        stranger.xclaim(
            delivery.stream, GROUP, pending["consumer"], 0, [entry_id], idle=int(idle_s * 1000), justid=True
        )


def lag(redis_server, stream: str) -> int | None:
    """What an autoscaler reads."""
    with redis_server.client() as stranger:
        (group,) = stranger.xinfo_groups(stream)
        return group["lag"]


async def test_a_call_goes_to_a_worker_and_its_result_to_the_gateway_that_asked(queue: CallQueue) -> None:
    """Everything put arrives at the worker as it was, and the result only at the gateway that waits for it."""
    put = calls(queue, "a")
    await queue.put(put)
    (delivery,) = await queue.take("w", 5)
    assert delivery.call == put[0].call
    assert (delivery.reply_to, delivery.accepted_ms, delivery.deadline_ms, delivery.times_delivered) == (
        *("gw-1", put[0].accepted_ms, put[0].deadline_ms),
        1,
    )
    done = ok(delivery)
    await queue.settle([done])
    assert await queue.replies("gw-2", block_s=0) == []
    ((call_id, result),) = await queue.replies("gw-1")
    assert call_id == "a"
    assert ToolResult.model_validate_json(result) == done[1]
    assert await queue.backlog() == Backlog(waiting=0, running=0, oldest_wait_s=0)


async def test_calls_come_in_order_and_no_more_than_asked(queue: CallQueue) -> None:
    """Workers get the oldest calls first, never more than they have slots, and none twice."""
    await queue.put(calls(queue, *"abcde"))
    assert names(await queue.take("w1", 2)) == ["a", "b"]
    assert names(await queue.take("w2", 2)) == ["c", "d"]
    assert names(await queue.take("w1", 2)) == ["e"]
    assert await queue.take("w1", 2, block_s=0) == []


async def test_many_results_come_in_one_read(queue: CallQueue) -> None:
    """What was settled together is read together, in the order of settling, for each gateway its own."""
    now_ms = queue.now_ms()
    put = [QueuedCall(ToolCall(id=f"{i}", code=""), f"gw-{i % 2}", now_ms, now_ms) for i in range(60)]
    await queue.put(put)
    await queue.settle([ok(delivery) for delivery in await queue.take("w", 60)])
    assert [name for name, _ in await queue.replies("gw-0")] == [f"{i}" for i in range(0, 60, 2)]
    assert [name for name, _ in await queue.replies("gw-1")] == [f"{i}" for i in range(1, 60, 2)]


async def test_empty_hands_do_nothing(queue: CallQueue) -> None:
    """Nothing to put, settle or renew is no error, and a take of nothing is refused, since Redis would give all."""
    await queue.put([])
    await queue.settle([])
    await queue.renew("w", [])
    with pytest.raises(ValueError, match="free slots"):
        await queue.take("w", 0)


async def test_a_waiting_worker_is_woken(queue: CallQueue, open_queue) -> None:
    """A worker that waits gets a call of either priority as soon as it is put, and not at the end of its wait."""
    gateway = await open_queue()
    for priority in ("tool", "judge"):
        waiting = asyncio.create_task(queue.take("w", 3))
        await gateway.put(calls(gateway, priority, priority=priority))
        assert names(await waiting) == [priority]


async def test_a_waiting_gateway_is_woken(queue: CallQueue, open_queue) -> None:
    """A gateway that waits for replies gets one as soon as it is there."""
    waiting = asyncio.create_task(queue.replies("gw-1"))
    worker = await open_queue()
    await worker.put(calls(worker, "a"))
    await worker.settle([ok(delivery) for delivery in await worker.take("w", 1)])
    assert [name for name, _ in await waiting] == ["a"]


async def test_waiting_for_nothing_ends(queue: CallQueue) -> None:
    """A blocking read that finds nothing returns empty, also after the shortest of waits."""
    assert await queue.take("w", 1, block_s=0.0001) == []
    assert await queue.replies("gw-1", block_s=0.0001) == []


async def test_tool_calls_go_first_and_judge_calls_keep_a_share(queue: CallQueue) -> None:
    """While both wait, seven takes of eight serve a tool call and the eighth a judge call."""
    await queue.put(calls(queue, *(f"judge-{i}" for i in range(20)), priority="judge"))
    await queue.put(calls(queue, *(f"tool-{i}" for i in range(20))))
    order = [names(await queue.take("w", 1))[0].split("-")[0] for _ in range(16)]
    assert order == [*["tool"] * 7, "judge"] * 2


async def test_judge_calls_run_when_no_tool_call_waits(queue: CallQueue) -> None:
    """A share is no wall: with tool calls done, judge calls take all the slots."""
    await queue.put([*calls(queue, "j1", "j2", priority="judge"), *calls(queue, "t1")])
    assert names(await queue.take("w", 5)) == ["t1"]
    assert names(await queue.take("w", 5)) == ["j1", "j2"]


class _Racing(CallQueue):
    """Two calls come just after the worker has seen that both streams are empty."""

    async def _read(self, consumer: str, count: int, block_s: float, *streams: str) -> list[Delivery]:
        if block_s > 0:
            await self.put([*calls(self, "j", priority="judge"), *calls(self, "t")])
        return await super()._read(consumer, count, block_s, *streams)


async def test_a_race_gives_no_worker_more_than_it_asked_for(redis_server) -> None:
    """Of two calls that come at once to a worker with one slot, the other is free for anybody, as if undelivered."""
    queue = _Racing(redis_server.settings)
    await queue.open()
    assert names(await queue.take("w", 1)) == ["t"]
    (other,) = await queue.reclaim("w2", idle_s=3600, count=5)
    assert (other.call.id, other.times_delivered) == ("j", 1)
    await queue.close()


async def test_a_dead_workers_calls_go_to_another(redis_server, queue: CallQueue) -> None:
    """Calls of a worker process that was killed are reclaimed by another, as delivered for the second time."""
    await queue.put([*calls(queue, "t1", "t2"), *calls(queue, "j", priority="judge")])
    program = f"""
import asyncio
from sandbox.queue import CallQueue
from sandbox.settings import RedisSettings

async def main():
    queue = CallQueue(RedisSettings(url={redis_server.settings.url!r}, namespace="test"))
    await queue.open()
    taken = [*await queue.take("dead", 5), *await queue.take("dead", 5)]
    print(*(delivery.call.id for delivery in taken), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    worker = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    assert worker.stdout is not None
    assert (await worker.stdout.readline()).split() == [b"t1", b"t2", b"j"]
    worker.kill()
    await worker.wait()

    assert (await queue.backlog()).running == 3
    reclaimed = await queue.reclaim("alive", idle_s=0, count=5)
    assert names(reclaimed) == ["t1", "t2", "j"]
    assert {delivery.times_delivered for delivery in reclaimed} == {2}
    await queue.settle([ok(delivery) for delivery in reclaimed])
    assert [name for name, _ in await queue.replies("gw-1")] == ["t1", "t2", "j"]
    assert (await queue.backlog()).running == 0


async def test_reclaim_takes_the_idle_only_and_no_more_than_asked(redis_server, queue: CallQueue) -> None:
    """A call under a fresh lease stays with its worker, however many of them lie before the idle ones."""
    await queue.put(calls(queue, *(f"{i}" for i in range(50))))
    taken = await queue.take("w1", 50)
    assert await queue.reclaim("w2", idle_s=30, count=1) == []
    for delivery in taken[-2:]:
        make_idle(redis_server, delivery, 60)
    assert names(await queue.reclaim("w2", idle_s=30, count=1)) == ["48"]
    assert names(await queue.reclaim("w2", idle_s=30, count=5)) == ["49"]


async def test_each_reclaim_counts(redis_server, queue: CallQueue) -> None:
    """A call that kills its workers is known by its count of deliveries."""
    await queue.put(calls(queue, "a"))
    await queue.take("w1", 1)
    counts = [(await queue.reclaim(f"w{i}", idle_s=0, count=1))[0].times_delivered for i in range(3)]
    assert counts == [2, 3, 4]


async def test_renew_keeps_a_call(redis_server, queue: CallQueue) -> None:
    """A renewed lease is not reclaimed, and renewing is not delivering."""
    await queue.put([*calls(queue, "t"), *calls(queue, "j", priority="judge")])
    taken = [*await queue.take("w1", 1), *await queue.take("w1", 1)]
    for delivery in taken:
        make_idle(redis_server, delivery, 60)
    await queue.renew("w1", taken)
    assert await queue.reclaim("w2", idle_s=30, count=5) == []
    for delivery in taken:
        make_idle(redis_server, delivery, 60)
    assert {again.times_delivered for again in await queue.reclaim("w2", idle_s=30, count=5)} == {2}


async def test_renewing_what_was_settled_does_not_bring_it_back(queue: CallQueue) -> None:
    """A late heartbeat for a settled call leaves nothing pending."""
    await queue.put(calls(queue, "a"))
    taken = await queue.take("w", 1)
    await queue.settle([ok(taken[0])])
    await queue.renew("w", taken)
    assert (await queue.backlog()).running == 0


async def test_an_entry_that_is_gone_is_not_reclaimed(redis_server, queue: CallQueue) -> None:
    """A pending id whose entry a stranger deleted does not break the others' recovery."""
    await queue.put(calls(queue, "a", "b"))
    gone, _ = await queue.take("w1", 2)
    with redis_server.client() as stranger:
        stranger.xdel(gone.stream, gone.entry_id)
    assert names(await queue.reclaim("w2", idle_s=0, count=5)) == ["b"]


async def test_settling_twice_is_harmless(queue: CallQueue) -> None:
    """A second settle gives the gateway the same id once more, which it drops, and disturbs nothing else."""
    await queue.put(calls(queue, "a", "b"))
    first, _ = await queue.take("w", 2)
    await queue.settle([ok(first)])
    await queue.settle([ok(first)])
    assert [name for name, _ in await queue.replies("gw-1")] == ["a", "a"]
    assert (await queue.backlog()).running == 1


async def test_a_crash_between_reply_and_ack_repeats_the_call(redis_server, queue: CallQueue) -> None:
    """With the reply written and no acknowledgement, the call is run again, and nobody misses a result."""
    await queue.put(calls(queue, "a"))
    (delivery,) = await queue.take("w1", 1)
    with redis_server.client() as half:
        half.rpush(KEYS.replies("gw-1"), f"a {ok(delivery)[1].model_dump_json()}")
    (again,) = await queue.reclaim("w2", idle_s=0, count=1)
    await queue.settle([ok(again)])
    assert [name for name, _ in await queue.replies("gw-1")] == ["a", "a"]
    assert (await queue.backlog()).running == 0


async def test_a_full_redis_loses_no_call(redis_server, queue: CallQueue) -> None:
    """Out of memory, put and settle are refused; the call that could not be answered is not acknowledged either."""
    await queue.put(calls(queue, "a"))
    (delivery,) = await queue.take("w", 1)
    with redis_server.client() as stranger:
        stranger.config_set("maxmemory", 1)
        with pytest.raises(Unavailable, match="OutOfMemoryError") as refused:
            await queue.put(calls(queue, "b"))
        assert "print" not in f"{refused.value} {refused.value.__cause__}"
        with pytest.raises(Unavailable, match="OutOfMemoryError") as refused:
            await queue.settle([ok(delivery)])
        assert "exit_code" not in f"{refused.value} {refused.value.__cause__}"
        assert await queue.backlog() == Backlog(waiting=0, running=1, oldest_wait_s=0)
        stranger.config_set("maxmemory", 0)
    await queue.settle([ok(delivery)])
    assert [name for name, _ in await queue.replies("gw-1")] == ["a"]


async def test_replies_to_a_gateway_that_is_gone_expire(redis_server, queue: CallQueue) -> None:
    """A reply list lives for two minutes after the last push."""
    await queue.put(calls(queue, "a"))
    await queue.settle([ok(delivery) for delivery in await queue.take("w", 1)])
    with redis_server.client() as stranger:
        assert 115 <= stranger.ttl(KEYS.replies("gw-1")) <= 120


async def test_lag_stays_exact_while_an_older_call_runs(redis_server, queue: CallQueue) -> None:
    """Settling the newest first and trimming leaves the lag right at every step, and the running call in place."""
    await queue.put(calls(queue, *"abcde"))
    oldest, *others = await queue.take("w", 5)
    await queue.settle([ok(delivery) for delivery in reversed(others)])
    for waiting in range(4):
        await queue.trim()
        assert lag(redis_server, TOOL) == waiting
        assert (await queue.backlog()).waiting == waiting
        await queue.put(calls(queue, f"later-{waiting}"))
    assert (await queue.backlog()).running == 1
    with redis_server.client() as stranger:
        assert stranger.xrange(TOOL, count=1)[0][0].decode() == oldest.entry_id

    await queue.settle([ok(oldest)])
    await queue.trim()
    assert lag(redis_server, TOOL) == 4
    assert names(await queue.take("w", 10)) == [f"later-{i}" for i in range(4)]
    assert lag(redis_server, TOOL) == 0


async def test_trim_forgets_all_that_is_settled(redis_server, queue: CallQueue) -> None:
    """A stream does not grow with the number of calls it has carried."""
    for _ in range(3):
        await queue.put(calls(queue, *(f"{i}" for i in range(50))))
        await queue.settle([ok(delivery) for delivery in await queue.take("w", 50)])
    await queue.trim()
    with redis_server.client() as stranger:
        assert stranger.xlen(TOOL) == 1
    assert lag(redis_server, TOOL) == 0


async def test_trim_spares_what_waits_and_what_runs(queue: CallQueue) -> None:
    """Trimming takes away no call that somebody still needs, whatever was settled around it."""
    await queue.put(calls(queue, *"abcdef"))
    taken = await queue.take("w1", 4)
    await queue.settle([ok(taken[0]), ok(taken[2])])
    await queue.trim()
    assert names(await queue.reclaim("w2", idle_s=0, count=10)) == ["b", "d"]
    assert names(await queue.take("w2", 10)) == ["e", "f"]


async def test_backlog_counts_both_priorities_and_tells_the_longest_wait(
    redis_server, queue: CallQueue
) -> None:
    """Waiting and running are sums, and the age is that of the oldest call that no worker has taken."""
    await queue.put(calls(queue, "a", "b"))
    await queue.take("w", 1)
    with redis_server.client() as stranger:
        long_ago_ms = queue.now_ms() - 90_000
        stranger.xadd(JUDGE, {"call": "{}"}, id=f"{long_ago_ms}-0")
    backlog = await queue.backlog()
    assert (backlog.waiting, backlog.running) == (2, 1)
    assert 90 <= backlog.oldest_wait_s < 100


async def test_a_lag_that_a_stranger_spoiled_is_bounded_from_above(redis_server, queue: CallQueue) -> None:
    """When deleted entries leave Redis without a lag, what is left of the stream counts as waiting."""
    await queue.put(calls(queue, *"abcd"))
    await queue.take("w", 1)
    with redis_server.client() as stranger:
        entry_id, _ = stranger.xrange(TOOL)[2]
        stranger.xdel(TOOL, entry_id)
    assert lag(redis_server, TOOL) is None
    assert (await queue.backlog()).waiting == 2


async def test_the_pulse_tells_how_far_the_workers_are(queue: CallQueue) -> None:
    """What waits, runs and was ever taken, for each priority by itself."""
    assert (await queue.pulse()).streams == {"tool": StreamPulse(0, 0, 0), "judge": StreamPulse(0, 0, 0)}
    await queue.put([*calls(queue, *"abcd"), *calls(queue, "e", priority="judge")])
    first, *_ = await queue.take("w", 3)
    await queue.settle([ok(first)])
    await queue.trim()
    assert (await queue.pulse()).streams == {"tool": StreamPulse(1, 2, 3), "judge": StreamPulse(1, 0, 0)}


async def test_the_pulse_tells_how_full_redis_is(redis_server, queue: CallQueue) -> None:
    """Its memory and the bound on it, which is zero for none."""
    for max_bytes in (0, 100_000_000):
        with redis_server.client() as stranger:
            stranger.config_set("maxmemory", max_bytes)
        pulse = await queue.pulse()
        assert pulse.max_bytes == max_bytes
        assert 0 < pulse.used_bytes < 100_000_000


async def test_the_pulse_tells_one_server_from_the_next(redis_server, queue: CallQueue) -> None:
    """A server that was restarted has another run_id; asked twice, it has the same."""
    run_id = (await queue.pulse()).run_id
    assert (await queue.pulse()).run_id == run_id
    redis_server.kill()
    await redis_server.start()
    pulse = await queue.pulse()
    assert pulse.run_id != run_id
    assert pulse.streams["tool"] == StreamPulse(0, 0, 0)


GARBAGE = [
    {"nothing": "of ours"},
    {"call": "{", "reply_to": "g", "accepted_ms": 1, "deadline_ms": 1},
    {"call": '{"code": 1}', "reply_to": "g", "accepted_ms": 1, "deadline_ms": 1},
    {"call": '{"code": ""}', "reply_to": b"\xff", "accepted_ms": 1, "deadline_ms": 1},
    {"call": '{"code": ""}', "reply_to": "g", "accepted_ms": "soon", "deadline_ms": 1},
]


async def test_garbage_is_acknowledged_logged_and_harms_no_call(
    redis_server, queue: CallQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries that are no calls vanish with a line in the log, and the calls around them are delivered."""
    await queue.put(calls(queue, "a"))
    with redis_server.client() as stranger:
        for fields in GARBAGE:
            stranger.xadd(TOOL, fields)
    await queue.put(calls(queue, "b"))
    assert names(await queue.take("w", 10)) == ["a", "b"]
    assert [record.message for record in caplog.records] == ["dropped an entry that is no call"] * len(
        GARBAGE
    )
    assert (await queue.backlog()).running == 2


async def test_garbage_of_a_dead_worker_is_dropped_too(redis_server, queue: CallQueue) -> None:
    """Garbage that became pending by another hand goes when it is reclaimed."""
    with redis_server.client() as stranger:
        stranger.xadd(TOOL, GARBAGE[0])
        stranger.xreadgroup(GROUP, "old", {TOOL: ">"})
    assert await queue.reclaim("w", idle_s=0, count=5) == []
    assert (await queue.backlog()).running == 0


async def test_a_foreign_element_among_the_replies_stops_nobody(redis_server, queue: CallQueue) -> None:
    """What is no reply is dropped, and what comes with it is not."""
    with redis_server.client() as stranger:
        stranger.rpush(KEYS.replies("gw-1"), b"\xff\xfe", b"a {}")
    assert await queue.replies("gw-1") == [("a", b"{}")]


async def test_namespaces_do_not_meet(redis_server, queue: CallQueue) -> None:
    """Two services share one Redis without seeing each other's calls."""
    other = CallQueue(RedisSettings(url=redis_server.settings.url, namespace="other"))
    await other.open()
    await other.put(calls(other, "a"))
    assert await queue.take("w", 5, block_s=0) == []
    assert names(await other.take("w", 5)) == ["a"]
    await other.close()


async def everything(queue: CallQueue) -> list[BaseException | object]:
    """Call every method once, at the same time."""
    delivery = Delivery("1-1", TOOL, ToolCall(code=""), "gw-1", 0, 0, 1)
    return await asyncio.gather(
        *(queue.ping(), queue.put(calls(queue, "lost")), queue.take("w", 1), queue.settle([ok(delivery)])),
        *(queue.renew("w", [delivery]), queue.reclaim("w", 1, 1), queue.trim(), queue.replies("gw-1")),
        *(queue.backlog(), queue.announce(worker("w"), 10), queue.retire("w"), queue.workers()),
        queue.pulse(),
        return_exceptions=True,
    )


async def test_redis_gone_shows_at_once_and_redis_back_is_used_again(redis_server, queue: CallQueue) -> None:
    """Every method raises Unavailable with its cause while Redis is dead, and works on the one that comes after."""
    await queue.ping()
    redis_server.kill()
    async with asyncio.timeout(TIGHT):
        errors = await everything(queue)
    assert {type(error) for error in errors} == {Unavailable}
    assert all(error.__cause__ and error.retry_after_s for error in errors)

    await redis_server.start()
    assert [error for error in await everything(queue) if isinstance(error, BaseException)] == []


async def test_a_read_that_waits_hears_of_the_end_of_redis(redis_server, queue: CallQueue) -> None:
    """A blocking read does not wait for its timeout when Redis dies."""
    async with asyncio.timeout(TIGHT):
        reads = [asyncio.create_task(queue.take("w", 1)), asyncio.create_task(queue.replies("gw-1"))]
        await queue.ping()
        redis_server.kill()
        errors = await asyncio.gather(*reads, return_exceptions=True)
    assert {type(error) for error in errors} == {Unavailable}


async def test_a_redis_that_came_back_empty_gets_its_group_again(
    redis_server, queue: CallQueue, open_queue
) -> None:
    """After a restart without data nobody needs to open again: calls that were put before the group exists arrive."""
    gateway = await open_queue()
    redis_server.kill()
    await redis_server.start()
    await gateway.put(calls(gateway, "a"))
    assert (await gateway.backlog()).waiting == 1
    (delivery,) = await queue.take("w", 5)
    await queue.settle([ok(delivery)])
    assert [name for name, _ in await gateway.replies("gw-1")] == ["a"]


async def test_a_redis_that_is_emptied_under_a_waiting_read_goes_on(redis_server, queue: CallQueue) -> None:
    """FLUSHALL while a worker waits makes the group anew, and the worker gets what comes next."""
    waiting = asyncio.create_task(queue.take("w", 1))
    await queue.ping()
    with redis_server.client() as stranger:
        stranger.flushall()
    await queue.put(calls(queue, "a"))
    assert names(await waiting or await queue.take("w", 1)) == ["a"]


async def test_a_frozen_redis_is_given_up_and_gets_nothing_twice(redis_server, queue: CallQueue) -> None:
    """When Redis answers nothing, everything ends as Unavailable after the timeout; thawed, it has each call once."""
    await queue.ping()
    redis_server.freeze()
    put, taken = await asyncio.gather(
        queue.put(calls(queue, "a", "b")), queue.take("w", 1), return_exceptions=True
    )
    assert [type(put), type(taken)] == [Unavailable, Unavailable]
    redis_server.thaw()
    await queue.ping()
    seen = [*await queue.take("w", 10), *await queue.reclaim("w", idle_s=0, count=10)]
    assert sorted(set(names(seen))) == ["a", "b"]
    with redis_server.client() as stranger:
        assert stranger.xlen(TOOL) == 2


@asynccontextmanager
async def tcp_to(redis_server) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """A TCP address that leads to the Redis, and a way to reset all connections that were made through it."""
    writers: list[asyncio.StreamWriter] = []

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            target.write(data)
        target.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(redis_server.directory / "redis.sock")
        writers.append(writer)
        with suppress(ConnectionError):
            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    def reset() -> None:
        for writer in writers:
            linger_for_no_time = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger_for_no_time
            )
            writer.transport.abort()
        writers.clear()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", reset


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_that_was_reset_is_unavailable_once(redis_server, loop_factory) -> None:
    """On either event loop a reset of an idle connection costs at most one command, and none that hangs."""

    async def main() -> None:
        async with tcp_to(redis_server) as (url, reset):
            queue = CallQueue(RedisSettings(url=url, namespace="test"))
            await queue.open()
            for turns in range(6):  # how far the loop has heard of the reset when the next command comes
                reset()
                for _ in range(turns):
                    await asyncio.sleep(0)
                with suppress(Unavailable):
                    await queue.ping()
                await queue.ping()
            await queue.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def test_a_cancellation_is_never_lost(queue: CallQueue) -> None:
    """At whatever step of a command it comes, it ends the task; a loop that redis-py kept from it would never end."""
    for turns in range(6):
        for _ in range(5):
            asking = asyncio.create_task(queue.ping())
            for _ in range(turns):
                await asyncio.sleep(0)
            if asking.cancel():
                await asyncio.wait({asking})
                assert asking.cancelled(), f"lost after {turns} turns of the loop"
    await queue.ping()


async def test_a_demoted_redis_is_unavailable(redis_server, queue: CallQueue) -> None:
    """A replica that refuses writes counts as no Redis, and as Redis again when it is a master."""
    with redis_server.client() as stranger:
        stranger.replicaof("127.0.0.1", "1")
        with pytest.raises(Unavailable, match="ReadOnlyError"):
            await queue.put(calls(queue, "a"))
        with pytest.raises(Unavailable):
            await queue.take("w", 1)
        stranger.replicaof("NO", "ONE")
    await queue.put(calls(queue, "a"))
    assert names(await queue.take("w", 1)) == ["a"]


async def test_opening_without_redis_is_unavailable_and_can_be_repeated(redis_server) -> None:
    """A gateway that starts before Redis may try again with the same object."""
    redis_server.kill()
    queue = CallQueue(redis_server.settings)
    with pytest.raises(Unavailable, match="cannot reach Redis"):
        await queue.open()
    await redis_server.start()
    await queue.open()
    await queue.ping()
    await queue.close()


async def test_a_refused_password_stops_the_start(redis_server) -> None:
    """Credentials that Redis does not take are a mistake in the settings and not an outage."""
    with redis_server.client() as stranger:
        stranger.config_set("requirepass", "secret")
        for password, refusal in (("wrong", ConfigError), ("", ConfigError), ("secret", None)):
            url = f"{redis_server.settings.url}?password={password}"
            queue = CallQueue(RedisSettings(url=url, namespace="test"))
            if refusal is None:
                await queue.open()
            else:
                with pytest.raises(refusal, match="check user and password"):
                    await queue.open()
            await queue.close()
        stranger.config_set("requirepass", "")


async def test_an_old_redis_stops_the_start() -> None:
    """A server below 7.0 is refused by its version, before any command fails for want of it."""

    async def redis_6(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = b"# Server\r\nredis_version:6.2.14\r\nos:Linux\r\n"
        while command := await reader.readline():
            words = []
            for _ in range(int(command[1:])):
                await reader.readline()
                words.append((await reader.readline()).strip())
            writer.write(b"$%d\r\n%s\r\n" % (len(info), info) if words[0] == b"INFO" else b"+OK\r\n")
        writer.close()

    async with await asyncio.start_server(redis_6, "127.0.0.1", 0) as server:
        queue = CallQueue(RedisSettings(url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        with pytest.raises(ConfigError, match=r"Redis 6\.2\.14 is too old"):
            await queue.open()
        await queue.close()


def test_a_url_that_is_none_stops_the_start() -> None:
    """A REDIS_URL without a scheme we know is refused with its name."""
    with pytest.raises(ConfigError, match="REDIS_URL"):
        CallQueue(RedisSettings(url="localhost:6379"))


def test_no_url_is_named_with_the_way_to_give_one() -> None:
    """Who starts a program without a Redis reads which setting is missing, and not what a URL looks like."""
    with pytest.raises(ConfigError, match=r"set REDIS_URL, or `url` below \[redis\]"):
        CallQueue(RedisSettings())


async def test_a_url_cannot_make_the_library_retry(redis_server) -> None:
    """Options in the URL's query do not shorten the timeouts that blocking reads rely on."""
    url = f"{redis_server.settings.url}?socket_timeout=0.01&retry_on_timeout=yes&protocol=3"
    queue = CallQueue(RedisSettings(url=url, namespace="test"))
    await queue.open()
    assert await queue.take("w", 1, block_s=0.1) == []
    await queue.close()


async def test_the_clock_is_redis_clock(redis_server, queue: CallQueue) -> None:
    """The estimate agrees with the time that Redis tells."""
    with redis_server.client() as stranger:
        seconds, microseconds = stranger.time()
    assert abs(queue.now_ms() - (seconds * 1000 + microseconds / 1000)) < 500


def worker(name: str, busy: int = 0) -> WorkerInfo:
    """A worker as it announces itself."""
    return WorkerInfo(
        id=name, slots=4, busy=busy, level="namespaces", draining=False, started_at=1.5, version="0.1.0"
    )


async def test_workers_are_known_as_they_last_announced_themselves(queue: CallQueue) -> None:
    """The list holds each living worker once, with its newest word, and a retired one no more."""
    assert await queue.workers() == []
    await queue.announce(worker("a"), 60)
    await queue.announce(worker("b"), 60)
    await queue.announce(worker("a", busy=3), 60)
    assert sorted(await queue.workers(), key=lambda info: info.id) == [worker("a", busy=3), worker("b")]
    await queue.retire("a")
    assert await queue.workers() == [worker("b")]


async def test_a_worker_that_falls_silent_is_forgotten(redis_server, queue: CallQueue) -> None:
    """Without a new word the announcement ends by itself, and later ones clear it from the index."""
    await queue.announce(worker("silent"), 60)
    with redis_server.client() as stranger:
        assert 59_000 < stranger.pttl(KEYS.worker("silent")) <= 60_000
        stranger.delete(KEYS.worker("silent"))  # as its expiry does
        assert await queue.workers() == []
        stranger.zadd(KEYS.workers, {"silent": 1})  # as if announced long ago
        await queue.announce(worker("b"), 60)
        assert stranger.zrange(KEYS.workers, 0, -1) == [b"b"]


async def test_a_short_word_does_not_cut_a_long_one(redis_server, queue: CallQueue) -> None:
    """The index lives as long as the longest announcement in it."""
    await queue.announce(worker("long"), 60)
    await queue.announce(worker("short"), 1)
    with redis_server.client() as stranger:
        assert 58 <= stranger.ttl(KEYS.workers) <= 60


async def test_a_newer_workers_word_is_understood(redis_server, queue: CallQueue) -> None:
    """A field that this version does not know is left out."""
    await queue.announce(worker("a"), 60)
    with redis_server.client() as stranger:
        told = json.loads(stranger.get(KEYS.worker("a"))) | {"gpu": 1}
        stranger.set(KEYS.worker("a"), json.dumps(told), keepttl=True)
    assert await queue.workers() == [worker("a")]


async def test_a_retired_worker_leaves_the_group_unless_it_holds_calls(
    redis_server, queue: CallQueue
) -> None:
    """Consumers do not pile up, and one that died over a call stays, since its call would go with it."""
    await queue.put(calls(queue, "a"))
    await queue.take("holds", 1)
    assert await queue.take("empty", 1, block_s=0) == []
    await queue.retire("holds")
    await queue.retire("empty")
    with redis_server.client() as stranger:
        assert [consumer["name"] for consumer in stranger.xinfo_consumers(TOOL, GROUP)] == [b"holds"]
    assert names(await queue.reclaim("other", idle_s=0, count=1)) == ["a"]


def texts() -> st.SearchStrategy[str]:
    """Any text that is Unicode."""
    return st.text(st.characters(exclude_categories=["Cs"]), max_size=50)


def tool_calls() -> st.SearchStrategy[ToolCall]:
    """Any call that a gateway accepts."""
    seconds = st.floats(min_value=0, max_value=86_400, exclude_min=True)
    part = st.text("abcXYZ09._- é\\\"'", min_size=1, max_size=8).filter(lambda name: name not in {".", ".."})
    binary = st.binary(max_size=100).map(lambda data: Base64File(base64=base64.b64encode(data)))
    return st.builds(
        ToolCall,
        id=st.from_regex(r"[A-Za-z0-9._:/-]{1,128}", fullmatch=True),
        code=texts(),
        stdin=texts(),
        files=st.dictionaries(
            st.lists(part, min_size=1, max_size=3).map("/".join), texts() | binary, max_size=3
        ).filter(
            lambda files: (
                not any(
                    f"{name}/".startswith(f"{other}/")
                    for name in files
                    for other in {"main.py", *files} - {name}
                )
            )
        ),
        limits=st.builds(
            Limits,
            wall_s=seconds,
            cpu_s=seconds,
            memory_bytes=st.integers(16 << 20, 1 << 40),
            output_bytes=st.integers(0, 64 << 20),
            processes=st.integers(1, 4096),
        ),
        deadline_s=seconds,
        priority=st.sampled_from(["tool", "judge"]),
        echo_last_value=st.booleans(),
    )


@given(call=tool_calls(), times=st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)))
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_any_call_survives_the_wire(queue: CallQueue, call: ToolCall, times: tuple[int, int]) -> None:
    """Whatever call is put, the very same is taken; each example leaves the queue empty for the next."""
    await queue.put([QueuedCall(call, "gw-1", *times)])
    (delivery,) = await queue.take("w", 1)
    assert (delivery.call, delivery.accepted_ms, delivery.deadline_ms) == (call, *times)
    await queue.settle([ok(delivery)])
    ((call_id, result),) = await queue.replies("gw-1")
    assert (call_id, json.loads(result)["id"]) == (call.id, call.id)


async def test_words_that_nobody_understands_are_left_out(redis_server, queue: CallQueue) -> None:
    """An announcement of another version and an empty reply are dropped, and harm nobody who reads beside them."""
    await queue.announce(worker("a"), 60)
    with redis_server.client() as stranger:
        stranger.set(KEYS.worker("b"), '{"id": "b"}', ex=60)
        stranger.zadd(KEYS.workers, {"b": 9e13})
        stranger.rpush(KEYS.replies("gateway"), "", "x {}")
        stranger.expire(KEYS.replies("gateway"), 60)
    assert [info.id for info in await queue.workers()] == ["a"]
    assert await queue.replies("gateway") == [("x", b"{}")]


async def test_a_call_that_is_answered_otherwise_is_forgotten(queue: CallQueue) -> None:
    """Forgetting gives up the lease and writes no reply."""
    await queue.put(calls(queue, "1"))
    (delivery,) = await queue.take("w", 1)
    await queue.forget([delivery])
    assert (await queue.backlog()).running == 0
    assert await queue.replies("gateway", 0) == []
