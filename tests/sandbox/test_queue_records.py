"""Records of calls: the same call put again, results that are kept, cancelling, jobs and dead letters."""

from __future__ import annotations

import asyncio

import pytest

from sandbox.calls import CallStatus, ToolResult
from sandbox.keys import KEEP_JOB_S, KEEP_S
from sandbox.queue import CallQueue, Found, Outcome, Put, QueuedCall

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
    pending,
    stdouts,
)

QUEUED, JOINED, OTHER = Put("queued"), Put("joined"), Put("other")
WAITING, UNKNOWN = Found("waiting"), Found("unknown")


async def put_one(queue: CallQueue, queued: QueuedCall, gateway: str = "gw-1") -> Put:
    """Put a call alone."""
    [outcome] = await queue.put(gateway, [queued])
    return outcome


async def drained(redis_server, queue: CallQueue) -> None:
    """Nothing waits and nothing runs, and Redis can still tell so exactly."""
    assert await queue.take("w", 100, block_s=0) == []
    for stream in (TOOL, JUDGE):
        assert (lag(redis_server, stream), pending(redis_server, stream)) == (0, 0)


async def test_the_same_call_joins_the_one_that_waits_or_runs(queue: CallQueue, open_queue) -> None:
    """It is queued once, whenever and by whomever it comes again, and every gateway gets the one result."""
    second = await open_queue()
    (call,) = calls(queue, "a")
    assert await put_one(queue, call) == QUEUED
    assert await put_one(queue, call) == JOINED
    (delivery,) = await queue.take("w", 5)
    assert await put_one(second, call, "gw-2") == JOINED
    assert await put_one(second, call, "gw-2") == JOINED
    await queue.settle([ok(delivery, "once")])
    assert stdouts(await queue.replies("gw-1")) == ["once"]
    assert stdouts(await second.replies("gw-2")) == ["once"]
    assert await queue.take("w", 5, block_s=0) == []


async def test_the_same_call_twice_in_one_put(queue: CallQueue) -> None:
    """The second joins the first of the same batch."""
    assert await queue.put("gw-1", [*calls(queue, "a"), *calls(queue, "a")]) == [QUEUED, JOINED]
    assert names(await queue.take("w", 5)) == ["a"]


async def test_a_call_may_come_again_with_another_deadline_and_priority(
    redis_server, queue: CallQueue
) -> None:
    """How soon the answer is due says nothing about the program, and the record lives for the later one."""
    (call,) = calls(queue, "a", deadline_s=60)
    (again,) = calls(queue, "a", deadline_s=500, priority="judge")
    later = QueuedCall(again.call, again.record, again.accepted_ms, again.accepted_ms + 500_000)
    assert await queue.put("gw-1", [call, later]) == [QUEUED, JOINED]
    assert await queue.put("gw-1", [call]) == [JOINED]
    with redis_server.client() as stranger:
        assert 490 + KEEP_S < stranger.ttl(call.record) <= 500 + KEEP_S


async def test_a_verdict_is_kept_for_who_comes_again(redis_server, queue: CallQueue) -> None:
    """A call that was answered is not run again for a while, and its record then goes by itself."""
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    done = ok(*await queue.take("w", 1))
    await queue.settle([done])
    outcome, result = await put_one(queue, call)
    assert (outcome, ToolResult.model_validate_json(result)) == ("kept", done.result)
    assert await queue.take("w", 1, block_s=0) == []
    with redis_server.client() as stranger:
        assert KEEP_S - 5 < stranger.ttl(call.record) <= KEEP_S
        stranger.delete(call.record)  # as its expiry does
    assert await put_one(queue, call) == QUEUED


async def test_a_fault_is_not_kept(redis_server, queue: CallQueue) -> None:
    """A call that we failed to run runs anew when it comes again."""
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    await queue.settle([failed(*await queue.take("w", 1))])
    assert answered(await queue.replies("gw-1")) == ["a"]
    with redis_server.client() as stranger:
        assert not stranger.exists(call.record)
    assert await put_one(queue, call) == QUEUED
    assert names(await queue.take("w", 1)) == ["a"]


async def test_poison_is_kept(queue: CallQueue) -> None:
    """A call that no worker survived is not given to more of them because its caller tries again."""
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    await queue.settle([failed(*await queue.take("w", 1), is_poison=True)])
    outcome, result = await put_one(queue, call)
    assert (outcome, ToolResult.model_validate_json(result).status) == ("kept", CallStatus.INTERNAL_ERROR)


@pytest.mark.parametrize("step", ["waits", "runs", "is done", "is cancelled"])
async def test_another_call_of_the_same_name_is_refused(queue: CallQueue, step: str) -> None:
    """An id names one call, and what is under way is not disturbed by a second one."""
    (call,) = calls(queue, "a")
    (other,) = calls(queue, "a", code="another program")
    await put_one(queue, call)
    taken = [] if step == "waits" else await queue.take("w", 1)
    if step == "is done":
        await queue.settle([ok(*taken)])
    if step == "is cancelled":
        await queue.cancel("gw-1", [call.record])
    assert await put_one(queue, other, "gw-2") == OTHER
    assert await queue.put("gw-2", [*calls(queue, "b"), other]) == [QUEUED, OTHER]
    assert names(await queue.take("w", 5)) == (["a", "b"] if step == "waits" else ["b"])


async def test_tenants_do_not_meet(queue: CallQueue) -> None:
    """The same id of two tenants is two calls."""
    assert (
        await queue.put("gw-1", [*calls(queue, "a", tenant="x"), *calls(queue, "a", tenant="y")])
        == [QUEUED] * 2
    )
    taken = await queue.take("w", 5)
    assert [delivery.record for delivery in taken] == [queue.record("x", "a"), queue.record("y", "a")]


# ---- cancelling ----


async def test_a_call_that_nobody_wants_is_not_run(redis_server, queue: CallQueue) -> None:
    """Workers get none of the cancelled calls, and what Redis counts stays exact."""
    put = [*calls(queue, *"abcde"), *calls(queue, "j", priority="judge")]
    await queue.put("gw-1", put)
    assert await queue.cancel("gw-1", [put[i].record for i in (0, 2, 3, 5)]) == [WAITING] * 4
    assert names(await queue.take("w", 1)) == ["b"]
    (e,) = await queue.take("w", 5)
    assert e.call.id == "e"
    assert pending(redis_server) == 2
    assert await queue.take("w", 5, block_s=0) == []
    assert (lag(redis_server), lag(redis_server, JUDGE)) == (0, 0)
    with redis_server.client() as stranger:
        assert stranger.xlen(TOOL) == 5  # nothing was deleted
    await queue.settle([ok(e)])
    assert answered(await queue.replies("gw-1")) == ["e"]


async def test_cancelled_calls_keep_no_worker_from_what_comes_behind(queue: CallQueue) -> None:
    """One take skips as many as there are, in its own stream and to the next."""
    for behind in calls(queue, "t") + calls(queue, "j", priority="judge"):
        put = calls(queue, *(f"{behind.call.id}-{i}" for i in range(20)))
        await queue.put("gw-1", [*put, behind])
        await queue.cancel("gw-1", [queued.record for queued in put])
        assert names(await queue.take("w", 3, block_s=0)) == [behind.call.id]


async def test_a_running_call_that_nobody_wants_is_stopped(
    redis_server, queue: CallQueue, open_queue
) -> None:
    """The order goes to the worker that runs it now, and `renew` tells the same to one that missed it."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    (_, b) = await queue.take("w1", 2)
    (a,) = await queue.reclaim("w2", idle_s=0, count=1)
    assert await queue.cancel("gw-1", [a.record]) == [Found("running", b"w2")]
    assert await queue.orders("w2") == [a.place]
    assert await queue.orders("w2", block_s=0) == []
    first = await open_queue()
    assert await first.orders("w1", block_s=0) == []
    assert await queue.renew("w2", [a]) == [a]
    assert await queue.settle([Outcome(a, None), ok(b)]) == [True, True]
    assert answered(await queue.replies("gw-1")) == ["b"]
    assert await queue.look(a.record) == UNKNOWN
    await drained(redis_server, queue)


async def test_an_order_names_the_stream_too(redis_server, queue: CallQueue) -> None:
    """Two calls of a worker may have the same entry id, each in its stream, and the right one is stopped."""
    await queue.put("gw-1", [*calls(queue, "t"), *calls(queue, "j", priority="judge")])
    (tool,) = await queue.take("w", 1)
    (judge,) = await queue.take("w", 1)
    await queue.cancel("gw-1", [judge.record])
    assert await queue.orders("w") == [judge.place]
    assert judge.place == (JUDGE, judge.entry_id)
    assert judge.place != (tool.stream, judge.entry_id)


async def test_a_call_that_somebody_else_waits_for_goes_on(queue: CallQueue, open_queue) -> None:
    """One gateway's going away, or a stranger's, leaves the call to the other one."""
    second = await open_queue()
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    await put_one(second, call, "gw-2")
    (delivery,) = await queue.take("w", 1)
    assert await queue.cancel("gw-1", [call.record]) == [Found("running", b"w")]
    assert await queue.cancel("gw-3", [call.record]) == [Found("running", b"w")]
    assert await queue.orders("w", block_s=0) == []
    assert await queue.renew("w", [delivery]) == []
    await queue.settle([ok(delivery)])
    assert answered(await second.replies("gw-2")) == ["a"]
    assert await queue.replies("gw-1", block_s=0) == []


async def test_a_cancelled_result_that_is_there_is_told(queue: CallQueue) -> None:
    """Who comes to cancel after the end gets the result, and of what is not known, that."""
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    done = ok(*await queue.take("w", 1))
    await queue.settle([done])
    found, unknown = await queue.cancel("gw-1", [call.record, queue.record("", "never")])
    assert (found.state, ToolResult.model_validate_json(found.detail)) == ("done", done.result)
    assert unknown == UNKNOWN


async def test_a_result_that_comes_too_late_for_its_cancelling_reaches_nobody(queue: CallQueue) -> None:
    """Whoever left gets no reply; the verdict is kept all the same."""
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    taken = await queue.take("w", 1)
    await queue.cancel("gw-1", [call.record])
    assert await queue.settle([ok(*taken)]) == [True]
    assert await queue.replies("gw-1", block_s=0) == []
    assert (await put_one(queue, call)).outcome == "kept"


async def test_a_cancelled_call_can_be_put_again(redis_server, queue: CallQueue) -> None:
    """It runs anew and once: the entry that was cancelled is dropped when it comes to a worker."""
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    await queue.cancel("gw-1", [call.record])
    assert await put_one(queue, call) == QUEUED
    (delivery,) = await queue.take("w", 5)
    assert await queue.cancel("gw-1", [call.record]) == [Found("running", b"w")]
    assert await put_one(queue, call) == QUEUED
    assert await queue.renew("w", [delivery]) == [delivery]
    (again,) = await queue.take("w2", 5)
    assert await queue.renew("w2", [again]) == []
    assert await queue.settle([Outcome(delivery, None), ok(again)]) == [True, True]
    assert answered(await queue.replies("gw-1")) == ["a"]
    await drained(redis_server, queue)


@pytest.mark.parametrize("late", [ok, failed, lambda delivery: Outcome(delivery, None)])
async def test_what_was_put_anew_is_not_touched_by_the_end_of_the_old_run(queue: CallQueue, late) -> None:
    """A worker that settles a cancelled run gives up its lease, and neither answers nor destroys the new call."""
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    (old,) = await queue.take("w1", 1)
    await queue.cancel("gw-1", [call.record])
    await put_one(queue, call)
    await queue.settle([late(old)])
    assert await queue.replies("gw-1", block_s=0) == []
    assert await queue.look(call.record) == WAITING
    await queue.settle([ok(*await queue.take("w2", 1), "new")])
    assert stdouts(await queue.replies("gw-1")) == ["new"]


async def test_reclaim_skips_what_was_cancelled(redis_server, queue: CallQueue) -> None:
    """A dead worker's call that nobody wants is dropped and not run once more."""
    put = calls(queue, *"abc")
    await queue.put("gw-1", put)
    for delivery in await queue.take("dead", 3):
        make_idle(redis_server, delivery, 60)
    await queue.cancel("gw-1", [put[0].record, put[2].record])
    (b,) = await queue.reclaim("w", idle_s=30, count=1)
    assert b.call.id == "b"
    assert await queue.reclaim("w", idle_s=30, count=5) == []
    assert pending(redis_server) == 1


async def test_what_was_handed_back_waits(redis_server, queue: CallQueue) -> None:
    """A call that a worker gave up before it ran is as good as undelivered for who asks, and for who cancels."""
    put = calls(queue, "a")
    await queue.put("gw-1", put)
    await queue.hand_back("w", await queue.take("w", 1))
    assert await queue.look(put[0].record) == WAITING
    assert await queue.cancel("gw-1", [put[0].record]) == [WAITING]
    assert await queue.reclaim("w", idle_s=1, count=5) == []
    await drained(redis_server, queue)


async def test_stopping_answers_everybody_once(queue: CallQueue, open_queue) -> None:
    """Each gateway that waits gets an empty reply, at once, and a result that comes all the same goes to none."""
    second = await open_queue()
    (call,) = calls(queue, "a")
    await put_one(queue, call)
    await put_one(second, call, "gw-2")
    (delivery,) = await queue.take("w", 1)
    assert await queue.stop(call.record) == Found("running", b"w")
    assert await queue.stop(call.record) == UNKNOWN
    assert await queue.orders("w") == [delivery.place]
    await queue.settle([ok(delivery)])
    assert await queue.replies("gw-1") == [(call.record, b"")]
    assert await second.replies("gw-2") == [(call.record, b"")]
    assert await queue.replies("gw-1", block_s=0) == []
    assert await second.replies("gw-2", block_s=0) == []


# ---- jobs ----


async def test_a_job_is_kept_though_nobody_waits(redis_server, queue: CallQueue) -> None:
    """It runs without a waiter, no gateway's going away stops it, and its result stays for whoever asks."""
    (job,) = calls(queue, "a", is_job=True)
    assert await put_one(queue, job) == QUEUED
    assert await queue.look(job.record) == WAITING
    assert await queue.watch("gw-2", job.record) == WAITING
    (delivery,) = await queue.take("w", 1)
    assert await queue.cancel("gw-2", [job.record]) == [Found("running", b"w")]
    assert await queue.renew("w", [delivery]) == []
    done = ok(delivery)
    await queue.settle([done])
    found = await queue.look(job.record)
    assert (found.state, ToolResult.model_validate_json(found.detail)) == ("done", done.result)
    assert await queue.watch("gw-2", job.record) == found
    assert await queue.replies("gw-2", block_s=0) == []
    with redis_server.client() as stranger:
        assert KEEP_JOB_S - 5 < stranger.ttl(job.record) <= KEEP_JOB_S


async def test_who_watches_a_job_gets_its_result(queue: CallQueue) -> None:
    """A gateway that waits for a job is told like one that has put it."""
    (job,) = calls(queue, "a", is_job=True)
    await put_one(queue, job)
    delivery = await queue.take("w", 1)
    assert await queue.watch("gw-2", job.record) == Found("running", b"w")
    await queue.settle([ok(*delivery)])
    assert answered(await queue.replies("gw-2")) == ["a"]


async def test_a_job_keeps_its_fault_and_runs_anew_when_it_is_put_again(queue: CallQueue) -> None:
    """Whoever asks learns of the fault; whoever sends the job again means another try."""
    (job,) = calls(queue, "a", is_job=True)
    await put_one(queue, job)
    done = failed(*await queue.take("w", 1))
    await queue.settle([done])
    found = await queue.look(job.record)
    assert (found.state, ToolResult.model_validate_json(found.detail)) == ("done", done.result)
    assert await put_one(queue, job) == QUEUED
    assert await queue.look(job.record) == WAITING


async def test_a_call_that_becomes_a_job_is_kept_like_one(redis_server, queue: CallQueue) -> None:
    """Sent as a job while it waits, it outlives its caller; sent when it is done, its result stays for as long."""
    put = calls(queue, "waits", "done")
    await queue.put("gw-1", put)
    await queue.settle([ok(delivery) for delivery in await queue.take("w", 2) if delivery.call.id == "done"])
    jobs = calls(queue, "waits", "done", is_job=True)
    assert [outcome.outcome for outcome in await queue.put("gw-1", jobs)] == ["joined", "kept"]
    await queue.cancel("gw-1", [put[0].record])
    assert (await queue.look(put[0].record)).state == "running"
    with redis_server.client() as stranger:
        assert KEEP_JOB_S - 5 < stranger.ttl(put[1].record) <= KEEP_JOB_S


async def test_jobs_and_calls_in_one_put(queue: CallQueue) -> None:
    """The outcomes come in the order of the calls."""
    mixed = [
        *calls(queue, "a"),
        *calls(queue, "b", is_job=True),
        *calls(queue, "a"),
        *calls(queue, "b", is_job=True, code=""),
    ]
    assert await queue.put("gw-1", mixed) == [QUEUED, QUEUED, JOINED, OTHER]


async def test_a_job_can_be_stopped(redis_server, queue: CallQueue) -> None:
    """What is stopped by name ends, job or not."""
    (job,) = calls(queue, "a", is_job=True)
    await put_one(queue, job)
    assert await queue.stop(job.record) == WAITING
    assert await queue.take("w", 1, block_s=0) == []
    assert await queue.look(job.record) == UNKNOWN
    await drained(redis_server, queue)


async def test_nothing_is_known_of_what_was_never_put(queue: CallQueue) -> None:
    """Asking, watching and stopping leave no trace."""
    record = queue.record("", "never")
    assert [await queue.look(record), await queue.watch("gw-1", record), await queue.stop(record)] == [
        UNKNOWN
    ] * 3


# ---- replies and orders ----


async def test_what_was_handled_is_forgotten(redis_server, queue: CallQueue) -> None:
    """A reader's next read removes what its last one brought, and no more."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    a, b = await queue.take("w", 2)
    await queue.settle([ok(a)])
    assert answered(await queue.replies("gw-1")) == ["a"]
    await queue.settle([ok(b)])
    with redis_server.client() as stranger:
        assert stranger.xlen(KEYS.replies("gw-1")) == 2
        assert answered(await queue.replies("gw-1")) == ["b"]
        assert stranger.xlen(KEYS.replies("gw-1")) == 1
        assert await queue.replies("gw-1", block_s=0) == []
        assert stranger.xlen(KEYS.replies("gw-1")) == 0


async def test_a_cancelled_read_loses_nothing(queue: CallQueue, open_queue) -> None:
    """At whatever step of a read its task is cancelled, the next read brings what came."""
    gateway = await open_queue()
    for turns in range(30):
        (call,) = calls(queue, f"{turns}")
        await put_one(queue, call)
        reading = asyncio.create_task(gateway.replies("gw-1"))
        await queue.settle([ok(*await queue.take("w", 1))])
        for _ in range(turns % 10):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait({reading})
        replies = await gateway.replies("gw-1", block_s=0) if reading.cancelled() else reading.result()
        assert answered(replies) == [f"{turns}"]


# ---- dead letters ----


async def test_what_killed_its_workers_becomes_a_dead_letter(redis_server, queue: CallQueue) -> None:
    """The call is kept as it was, with its tenant, the reason and how often it was tried, until somebody drops it."""
    (call,) = calls(queue, "a", tenant="lab", stdin="é", files={"x/y": "z"})
    await put_one(queue, call)
    await queue.take("w1", 1)
    await queue.reclaim("w2", idle_s=0, count=1)
    (third,) = await queue.reclaim("w3", idle_s=0, count=1)
    before_ms = queue.now_ms()
    await queue.settle([failed(third, is_poison=True)])
    assert answered(await queue.replies("gw-1")) == ["a"]
    [(entry, letter)] = await queue.dead_letters(10)
    assert (letter.call, letter.tenant, letter.times_delivered) == (call.call, "lab", 3)
    assert letter.reason == "the worker broke"
    assert before_ms <= letter.died_ms <= queue.now_ms()
    assert await queue.dead_letter(entry) == letter
    assert await queue.drop_dead_letter(entry) is True
    assert await queue.drop_dead_letter(entry) is False
    assert await queue.dead_letter(entry) is None
    assert await queue.dead_letters(10) == []


async def test_who_settles_poison_late_leaves_no_second_letter(queue: CallQueue) -> None:
    """One call, one letter."""
    await queue.put("gw-1", calls(queue, "a"))
    taken = await queue.take("w", 1)
    assert await queue.settle([failed(*taken, is_poison=True)]) == [True]
    assert await queue.settle([failed(*taken, is_poison=True)]) == [False]
    assert len(await queue.dead_letters(10)) == 1


async def test_the_last_thousand_dead_letters_are_kept(redis_server, queue: CallQueue) -> None:
    """The newest come first, and the oldest make room."""
    await queue.put("gw-1", calls(queue, *(f"{i}" for i in range(1_010))))
    await queue.settle([failed(delivery, is_poison=True) for delivery in await queue.take("w", 1_010)])
    letters = await queue.dead_letters(2_000)
    assert [letter.call.id for _, letter in letters] == [f"{i}" for i in range(1_009, 9, -1)]
    assert [letter.call.id for _, letter in await queue.dead_letters(2)] == ["1009", "1008"]


async def test_large_kept_results_come_one_after_the_other(queue: CallQueue) -> None:
    """Results that one answer cannot hold in time are left for the next, by both who put again and who ask."""
    put = calls(queue, *"abc")
    await queue.put("gw-1", put)
    text = "x" * (3 * 1024 * 1024)
    for delivery in await queue.take("w", 3):
        result = ToolResult(id=delivery.call.id, status=CallStatus.OK, exit_code=0, stdout=text)
        await queue.settle([Outcome(delivery, result)])
    assert [outcome.outcome for outcome in await queue.put("gw-1", put)] == ["kept", "later", "later"]
    assert [outcome.outcome for outcome in await queue.put("gw-1", put[1:])] == ["kept", "later"]
    records = [queued.record for queued in put]
    assert [found.state for found in await queue.cancel("gw-1", records)] == ["done", "later", "later"]
