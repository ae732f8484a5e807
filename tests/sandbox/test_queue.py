"""The queue on real servers while all is well: calls come to workers, leases hold, the numbers are right."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.calls import Base64File, Limits, ToolCall, ToolResult
from sandbox.keys import GROUP
from sandbox.queue import Backlog, CallQueue, Delivery, QueuedCall, StreamPulse
from sandbox.settings import RedisSettings

from .queueing import (
    JUDGE,
    KEYS,
    TOOL,
    answered,
    calls,
    failed,
    lag,
    make_idle,
    names,
    ok,
    stdouts,
    worker,
)


async def test_a_call_goes_to_a_worker_and_its_result_to_the_gateway_that_asked(queue: CallQueue) -> None:
    """Everything put arrives at the worker as it was, and the result only at the gateway that waits for it."""
    put = calls(queue, "a", tenant="lab")
    assert [outcome.outcome for outcome in await queue.put("gw-1", put)] == ["queued"]
    (delivery,) = await queue.take("w", 5)
    assert delivery.call == put[0].call
    assert (delivery.record, delivery.accepted_ms, delivery.deadline_ms, delivery.times_delivered) == (
        *(put[0].record, put[0].accepted_ms, put[0].deadline_ms),
        1,
    )
    done = ok(delivery)
    assert await queue.settle([done]) == [True]
    assert await queue.replies("gw-2", block_s=0) == []
    ((record, result),) = await queue.replies("gw-1")
    assert record == put[0].record
    assert ToolResult.model_validate_json(result) == done.result
    assert await queue.backlog() == Backlog(waiting=0, running=0, oldest_wait_s=0)


async def test_many_results_come_in_one_read(queue: CallQueue, open_queue) -> None:
    """What was settled together is read together, in the order of settling, for each gateway its own."""
    put = calls(queue, *(f"{i}" for i in range(60)))
    await queue.put("gw-0", put[::2])
    await queue.put("gw-1", put[1::2])
    taken = sorted(await queue.take("w", 60), key=lambda delivery: int(delivery.call.id))
    await queue.settle([ok(delivery) for delivery in taken])
    assert answered(await queue.replies("gw-0")) == [f"{i}" for i in range(0, 60, 2)]
    other = await open_queue()
    assert answered(await other.replies("gw-1")) == [f"{i}" for i in range(1, 60, 2)]


async def test_more_results_than_one_entry_holds(queue: CallQueue) -> None:
    """A settle of thousands reaches the gateway whole."""
    put = calls(queue, *(f"{i}" for i in range(2_500)))
    await queue.put("gw-1", put)
    assert all(await queue.settle([ok(delivery) for delivery in await queue.take("w", 2_500)]))
    assert answered(await queue.replies("gw-1")) == [f"{i}" for i in range(2_500)]


async def test_large_results_are_whole(queue: CallQueue) -> None:
    """Results of a megabyte, some in one settle, come as they were."""
    await queue.put("gw-1", calls(queue, *"abcdef"))
    await queue.settle([ok(delivery, delivery.call.id * 1_000_000) for delivery in await queue.take("w", 6)])
    replies = stdouts(await queue.replies("gw-1"))
    assert [text == name * 1_000_000 for name, text in zip("abcdef", replies, strict=True)] == [True] * 6


async def test_calls_come_in_order_and_no_more_than_asked(queue: CallQueue) -> None:
    """Workers get the oldest calls first, never more than they have slots, and none twice."""
    await queue.put("gw-1", calls(queue, *"abcde"))
    assert names(await queue.take("w1", 2)) == ["a", "b"]
    assert names(await queue.take("w2", 2)) == ["c", "d"]
    assert names(await queue.take("w1", 2)) == ["e"]
    assert await queue.take("w1", 2, block_s=0) == []


async def test_empty_hands_do_nothing(queue: CallQueue) -> None:
    """Nothing to put, cancel, settle, renew or hand back is no error, and a take of nothing is refused, since Redis would give all."""
    assert await queue.put("gw-1", []) == []
    assert await queue.cancel("gw-1", []) == []
    assert await queue.settle([]) == []
    assert await queue.renew("w", []) == []
    await queue.hand_back("w", [])
    with pytest.raises(ValueError, match="free slots"):
        await queue.take("w", 0)


async def test_a_waiting_worker_is_woken(queue: CallQueue, open_queue) -> None:
    """A worker that waits gets a call of either priority as soon as it is put, and not at the end of its wait."""
    gateway = await open_queue()
    for priority in ("tool", "judge"):
        waiting = asyncio.create_task(queue.take("w", 3))
        await gateway.put("gw-1", calls(gateway, priority, priority=priority))
        assert names(await waiting) == [priority]


async def test_a_waiting_gateway_is_woken(queue: CallQueue, open_queue) -> None:
    """A gateway that waits for replies gets one as soon as it is there, the first as well as a later one."""
    worker = await open_queue()
    for name in ("first", "second"):
        waiting = asyncio.create_task(queue.replies("gw-1"))
        await worker.put("gw-1", calls(worker, name))
        await worker.settle([ok(delivery) for delivery in await worker.take("w", 1)])
        assert answered(await waiting) == [name]


async def test_waiting_for_nothing_ends(queue: CallQueue) -> None:
    """A blocking read that finds nothing returns empty, also after the shortest of waits."""
    assert await queue.take("w", 1, block_s=0.0001) == []
    assert await queue.replies("gw-1", block_s=0.0001) == []


async def test_tool_calls_go_first_and_judge_calls_keep_a_share(queue: CallQueue) -> None:
    """While both wait, seven takes of eight serve a tool call and the eighth a judge call."""
    await queue.put("gw-1", calls(queue, *(f"judge-{i}" for i in range(20)), priority="judge"))
    await queue.put("gw-1", calls(queue, *(f"tool-{i}" for i in range(20))))
    order = [names(await queue.take("w", 1))[0].split("-")[0] for _ in range(16)]
    assert order == [*["tool"] * 7, "judge"] * 2


async def test_judge_calls_run_when_no_tool_call_waits(queue: CallQueue) -> None:
    """A share is no wall: with tool calls done, judge calls take all the slots."""
    await queue.put("gw-1", [*calls(queue, "j1", "j2", priority="judge"), *calls(queue, "t1")])
    assert names(await queue.take("w", 5)) == ["t1"]
    assert names(await queue.take("w", 5)) == ["j1", "j2"]


class _Racing(CallQueue):
    """Two calls come just after the worker has seen that both streams are empty."""

    async def _deliveries(self, found: Any) -> list[Delivery]:
        if not found:
            await self.put("gw-1", [*calls(self, "j", priority="judge"), *calls(self, "t")])
        return await super()._deliveries(found)


async def test_a_race_gives_no_worker_more_than_it_asked_for(redis_server) -> None:
    """Of two calls that come at once to a worker with one slot, the other is free for anybody, as if undelivered."""
    queue = _Racing(redis_server.settings)
    await queue.open()
    assert names(await queue.take("w", 1)) == ["t"]
    (other,) = await queue.reclaim("w2", idle_s=3600, count=5)
    assert (other.call.id, other.times_delivered) == ("j", 1)
    await queue.close()


async def test_reclaim_takes_the_idle_only_and_no_more_than_asked(redis_server, queue: CallQueue) -> None:
    """A call under a fresh lease stays with its worker, however many of them lie before the idle ones."""
    await queue.put("gw-1", calls(queue, *(f"{i}" for i in range(50))))
    taken = await queue.take("w1", 50)
    assert await queue.reclaim("w2", idle_s=30, count=1) == []
    for delivery in taken[-2:]:
        make_idle(redis_server, delivery, 60)
    assert names(await queue.reclaim("w2", idle_s=30, count=1)) == ["48"]
    assert names(await queue.reclaim("w2", idle_s=30, count=5)) == ["49"]


async def test_each_reclaim_counts(redis_server, queue: CallQueue) -> None:
    """A call that kills its workers is known by its count of deliveries."""
    await queue.put("gw-1", calls(queue, "a"))
    await queue.take("w1", 1)
    counts = [(await queue.reclaim(f"w{i}", idle_s=0, count=1))[0].times_delivered for i in range(3)]
    assert counts == [2, 3, 4]


async def test_renew_keeps_a_call(redis_server, queue: CallQueue) -> None:
    """A renewed lease is not reclaimed, and renewing is not delivering."""
    await queue.put("gw-1", [*calls(queue, "t"), *calls(queue, "j", priority="judge")])
    taken = [*await queue.take("w1", 1), *await queue.take("w1", 1)]
    for delivery in taken:
        make_idle(redis_server, delivery, 60)
    assert await queue.renew("w1", taken) == []
    assert await queue.reclaim("w2", idle_s=30, count=5) == []
    for delivery in taken:
        make_idle(redis_server, delivery, 60)
    assert {again.times_delivered for again in await queue.reclaim("w2", idle_s=30, count=5)} == {2}


async def test_renewing_what_was_settled_does_not_bring_it_back(queue: CallQueue) -> None:
    """A late heartbeat for a settled call leaves nothing pending."""
    await queue.put("gw-1", calls(queue, "a"))
    taken = await queue.take("w", 1)
    await queue.settle([ok(taken[0])])
    assert await queue.renew("w", taken) == taken
    assert (await queue.backlog()).running == 0


async def test_an_entry_that_is_gone_is_not_reclaimed(redis_server, queue: CallQueue) -> None:
    """A pending id whose entry a stranger deleted does not break the others' recovery."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    gone, _ = await queue.take("w1", 2)
    with redis_server.client() as stranger:
        stranger.xdel(gone.stream, gone.entry_id)
    assert names(await queue.reclaim("w2", idle_s=0, count=5)) == ["b"]


async def test_the_first_to_settle_wins(queue: CallQueue) -> None:
    """After a reclaim two workers have a result: the first is the answer, and the second is told that it is late."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    (late, other) = await queue.take("w1", 2)
    (first, _) = await queue.reclaim("w2", idle_s=0, count=2)
    assert await queue.settle([ok(first, "first")]) == [True]
    assert await queue.settle([ok(late, "late"), ok(other)]) == [False, True]
    assert await queue.settle([ok(first, "again")]) == [False]
    assert stdouts(await queue.replies("gw-1")) == ["first", ""]
    assert await queue.replies("gw-1", block_s=0) == []
    assert (await queue.backlog()).running == 0


async def test_the_one_that_was_silent_may_settle_first(queue: CallQueue) -> None:
    """A worker that lost its lease and is done all the same answers, and who has taken over learns it from `renew`."""
    await queue.put("gw-1", calls(queue, "a"))
    (silent,) = await queue.take("w1", 1)
    (again,) = await queue.reclaim("w2", idle_s=0, count=1)
    assert await queue.renew("w1", [silent]) == [silent]
    assert await queue.settle([ok(silent, "silent")]) == [True]
    assert await queue.renew("w2", [again]) == [again]
    assert await queue.settle([ok(again, "again")]) == [False]
    assert stdouts(await queue.replies("gw-1")) == ["silent"]


async def test_of_two_that_settle_at_once_one_wins(queue: CallQueue, open_queue) -> None:
    """Over two connections at the same time, each call is settled once and answered once."""
    put = calls(queue, *(f"{i}" for i in range(200)))
    await queue.put("gw-1", put)
    taken = await queue.take("w1", 200)
    again = await queue.reclaim("w2", idle_s=0, count=200)
    other = await open_queue()
    settled = await asyncio.gather(
        *(queue.settle([ok(delivery, "1")]) for delivery in taken),
        *(other.settle([ok(delivery, "2")]) for delivery in reversed(again)),
    )
    assert sum(won for (won,) in settled) == 200
    replies = [*await queue.replies("gw-1")]
    while more := await queue.replies("gw-1", block_s=0):
        replies += more
    assert sorted(answered(replies)) == sorted(queued.call.id for queued in put)


async def test_renew_does_not_steal(queue: CallQueue) -> None:
    """A worker that was away learns what another one has now, and the other one keeps it."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    taken = await queue.take("w1", 2)
    lost = await queue.reclaim("w2", idle_s=0, count=1)
    assert names(await queue.renew("w1", taken)) == names(lost)
    assert await queue.renew("w2", lost) == []


async def test_what_is_handed_back_is_free_at_once_and_as_if_never_taken(queue: CallQueue) -> None:
    """The next reclaim of anybody finds it, it does not count as a delivery, and its worker may leave."""
    await queue.put("gw-1", calls(queue, "a"))
    taken = await queue.take("w1", 1)
    await queue.hand_back("w1", taken)
    assert await queue.renew("w1", taken) == taken
    await queue.retire("w1")
    (again,) = await queue.reclaim("w2", idle_s=3600, count=5)
    assert (again.call.id, again.times_delivered) == ("a", 1)


async def test_only_what_is_ours_is_handed_back(queue: CallQueue) -> None:
    """What another worker has meanwhile, or what is settled, stays as it is."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    taken = await queue.take("w1", 2)
    (a,) = await queue.reclaim("w2", idle_s=0, count=1)
    await queue.settle([ok(taken[1])])
    await queue.hand_back("w1", taken)
    assert await queue.renew("w2", [a]) == []
    assert (await queue.backlog()).running == 1


async def test_replies_to_a_gateway_that_is_gone_expire(redis_server, queue: CallQueue) -> None:
    """A stream of replies lives for two minutes after the last one."""
    await queue.put("gw-1", calls(queue, "a"))
    await queue.settle([ok(delivery) for delivery in await queue.take("w", 1)])
    with redis_server.client() as stranger:
        assert 115 <= stranger.ttl(KEYS.replies("gw-1")) <= 120


async def test_lag_stays_exact_while_an_older_call_runs(redis_server, queue: CallQueue) -> None:
    """Settling the newest first and trimming leaves the lag right at every step, and the running call in place."""
    await queue.put("gw-1", calls(queue, *"abcde"))
    oldest, *others = await queue.take("w", 5)
    await queue.settle([ok(delivery) for delivery in reversed(others)])
    for waiting in range(4):
        await queue.trim()
        assert lag(redis_server) == waiting
        assert (await queue.backlog()).waiting == waiting
        await queue.put("gw-1", calls(queue, f"later-{waiting}"))
    assert (await queue.backlog()).running == 1
    with redis_server.client() as stranger:
        assert stranger.xrange(TOOL, count=1)[0][0].decode() == oldest.entry_id

    await queue.settle([ok(oldest)])
    await queue.trim()
    assert lag(redis_server) == 4
    assert names(await queue.take("w", 10)) == [f"later-{i}" for i in range(4)]
    assert lag(redis_server) == 0


async def test_trim_forgets_all_that_is_settled(redis_server, queue: CallQueue) -> None:
    """A stream does not grow with the number of calls it has carried."""
    for _ in range(3):
        await queue.put("gw-1", calls(queue, *(f"{i}" for i in range(50))))
        await queue.settle([ok(delivery) for delivery in await queue.take("w", 50)])
    await queue.trim()
    with redis_server.client() as stranger:
        assert stranger.xlen(TOOL) == 1
    assert lag(redis_server) == 0


async def test_trim_spares_what_waits_and_what_runs(queue: CallQueue) -> None:
    """Trimming takes away no call that somebody still needs, whatever was settled around it."""
    await queue.put("gw-1", calls(queue, *"abcdef"))
    taken = await queue.take("w1", 4)
    await queue.settle([ok(taken[0]), ok(taken[2])])
    await queue.trim()
    assert names(await queue.reclaim("w2", idle_s=0, count=10)) == ["b", "d"]
    assert names(await queue.take("w2", 10)) == ["e", "f"]


async def test_backlog_counts_both_priorities_and_tells_the_longest_wait(
    redis_server, queue: CallQueue
) -> None:
    """Waiting and running are sums, and the age is that of the oldest call that no worker has taken."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    await queue.take("w", 1)
    with redis_server.client() as stranger:
        long_ago_ms = queue.now_ms() - 90_000
        stranger.xadd(JUDGE, {"call": "{}"}, id=f"{long_ago_ms}-0")
    backlog = await queue.backlog()
    assert (backlog.waiting, backlog.running) == (2, 1)
    assert 90 <= backlog.oldest_wait_s < 100


async def test_a_lag_that_a_stranger_spoiled_is_bounded_from_above(redis_server, queue: CallQueue) -> None:
    """When deleted entries leave Redis without a lag, what is left of the stream counts as waiting."""
    await queue.put("gw-1", calls(queue, *"abcd"))
    await queue.take("w", 1)
    with redis_server.client() as stranger:
        entry_id, _ = stranger.xrange(TOOL)[2]
        stranger.xdel(TOOL, entry_id)
    assert lag(redis_server) is None
    assert (await queue.backlog()).waiting == 2


async def test_the_pulse_tells_how_far_the_workers_are(queue: CallQueue) -> None:
    """What waits, runs and was ever taken, for each priority by itself."""
    assert (await queue.pulse()).streams == {"tool": StreamPulse(0, 0, 0), "judge": StreamPulse(0, 0, 0)}
    await queue.put("gw-1", [*calls(queue, *"abcd"), *calls(queue, "e", priority="judge")])
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


GARBAGE = [
    {"nothing": "of ours"},
    {"call": "{", "record": "r", "accepted_ms": 1, "deadline_ms": 1},
    {"call": '{"code": 1}', "record": "r", "accepted_ms": 1, "deadline_ms": 1},
    {"call": '{"code": ""}', "record": b"\xff", "accepted_ms": 1, "deadline_ms": 1},
    {"call": '{"code": ""}', "record": "r", "accepted_ms": "soon", "deadline_ms": 1},
]


async def test_garbage_is_acknowledged_logged_and_harms_no_call(
    redis_server, queue: CallQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries that are no calls vanish with a line in the log, and the calls around them are delivered."""
    await queue.put("gw-1", calls(queue, "a"))
    with redis_server.client() as stranger:
        for fields in GARBAGE:
            stranger.xadd(TOOL, fields)
    await queue.put("gw-1", calls(queue, "b"))
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


async def test_namespaces_do_not_meet(redis_server, queue: CallQueue) -> None:
    """Two services share one Redis without seeing each other's calls."""
    other = CallQueue(RedisSettings(url=redis_server.settings.url, namespace="other"))
    await other.open()
    await other.put("gw-1", calls(other, "a"))
    assert await queue.take("w", 5, block_s=0) == []
    assert names(await other.take("w", 5)) == ["a"]
    await other.close()


async def test_the_clock_is_redis_clock(redis_server, queue: CallQueue) -> None:
    """The estimate agrees with the time that Redis tells."""
    with redis_server.client() as stranger:
        seconds, microseconds = stranger.time()
    assert abs(queue.now_ms() - (seconds * 1000 + microseconds / 1000)) < 500


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
    await queue.put("gw-1", calls(queue, "a"))
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
    await queue.put("gw-1", [QueuedCall(call, queue.record("", call.id), *times)])
    (delivery,) = await queue.take("w", 1)
    assert (delivery.accepted_ms, delivery.deadline_ms) == times
    assert delivery.call.model_copy(update={"deadline_s": call.deadline_s, "priority": call.priority}) == call
    await queue.settle([failed(delivery)])  # a fault, so that it is not kept for an example with the same id
    ((record, result),) = await queue.replies("gw-1")
    assert (record, json.loads(result)["id"]) == (delivery.record, call.id)


async def test_words_that_nobody_understands_are_left_out(redis_server, queue: CallQueue) -> None:
    """An announcement of another version is dropped, and harms nobody who is read beside it."""
    await queue.announce(worker("a"), 60)
    with redis_server.client() as stranger:
        stranger.set(KEYS.worker("b"), '{"id": "b"}', ex=60)
        stranger.zadd(KEYS.workers, {"b": 9e13})
    assert [info.id for info in await queue.workers()] == ["a"]
