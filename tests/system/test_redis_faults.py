"""What Redis and those who read from it may do to a call on its way, and what the caller sees of it: nothing, or a fault.

Each is something that loses or doubles calls in queues of lists and timeouts: a server that dies, comes back empty,
hangs, is full or cuts a line half; a reader that freezes, dies with what it was just handed, or gives up a read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import redis

from sandbox import CallStatus, ToolCall, ToolResult
from sandbox.keys import GROUP, Keys
from sandbox.queue import CallQueue, Delivery, Outcome, QueuedCall
from tests.conftest import RunningRedis
from tests.proxy import proxy_to

from .callers import Load, all_right, right_or_fault
from .conftest import LEASE_S, WORKERS
from .leftovers import in_redis, settled
from .processes import Process, alive, family, frozen, until
from .stack import Stack, gone

#: Long enough for the deadline of calls that wait, and short enough to see them answered at it.
SOON_S = 4
#: A command or a read that Redis or a gateway leaves without an answer for so long was given up.
FREEZE_S = 7.0
#: Reads that are cancelled, of either kind.
READS = 100

T = TypeVar("T")


def refused_within(whole: Stack, seconds: float) -> None:
    """The next call gets 503, in this time."""
    began = time.monotonic()
    answer = whole.run("print(1)")
    assert (answer.status_code, answer.json()["error"]["name"]) == (503, "Unavailable")
    assert time.monotonic() - began < seconds


def serves_again(whole: Stack, before: tuple[list[int], list[int]]) -> None:
    """The same gateways and workers serve as ever, and nothing is left of what was."""
    until(whole.is_ready, "recovery")
    all_right(Load(whole.url, "again", 20))
    assert (whole.gateways, whole.workers) == before
    with whole.redis_client() as client:
        assert settled(lambda: in_redis(client)) == []


def redis_process(whole: Stack) -> Process:
    [process] = [process for process in alive() if process.pid == whole.redis]
    return process


def info(client: redis.Redis, section: str) -> dict[str, Any]:
    return dict(client.info(section))  # type: ignore[arg-type]


# ---- Redis ----


def test_redis_is_gone(whole: Stack) -> None:
    """503 at once while it is away; calls that wait are answered by a fault at their deadline."""
    before = (whole.gateways, whole.workers)
    server = redis_process(whole)
    load = Load(whole.url, "gone", 400, deadline_s=SOON_S)
    load.wait_answers(20)
    with frozen(whole.pid):  # so that nobody starts it again
        os.kill(server.pid, signal.SIGKILL)
        gone({server})
        refused_within(whole, 3)
        until(lambda: not whole.is_ready(), "news of the death")
        refused_within(whole, 1)
        right = right_or_fault(load)
    assert 20 <= right < 400
    serves_again(whole, before)


def test_redis_starts_again_empty(whole: Stack) -> None:
    """What it held is put once more by the gateway that waits for it, and answered right."""
    before = (whole.gateways, whole.workers)
    server = redis_process(whole)
    load = Load(whole.url, "empty", 400, deadline_s=20)
    load.wait_answers(20)
    os.kill(server.pid, signal.SIGKILL)
    all_right(load)
    assert whole.redis != server.pid
    serves_again(whole, before)


def test_redis_is_frozen(whole: Stack) -> None:
    """New calls get 503 within a second, waiting ones a fault at their deadline, and no call is put twice."""
    before = (whole.gateways, whole.workers)
    with whole.redis_client() as client:
        put = entries_put(client)
        load = Load(whole.url, "freeze", 400, deadline_s=SOON_S)
        load.wait_answers(20)
        with frozen(whole.redis):
            frozen_at = time.monotonic()
            refused_within(whole, 3)
            until(lambda: not whole.is_ready(), "news of the silence")
            refused_within(whole, 1)
            right = right_or_fault(load)
            until(lambda: time.monotonic() > frozen_at + FREEZE_S, "what gives up every command and read")
        assert 20 <= right < 400
        serves_again(whole, before)
        # The load, the call that was refused when Redis had it already, and the twenty of `serves_again`.
        assert entries_put(client) - put <= 400 + 2 + 20


def entries_put(client: redis.Redis) -> int:
    """How many calls were ever put into the streams."""
    keys = Keys("sandbox")
    told: list[Any] = [client.xinfo_stream(keys.calls(priority)) for priority in ("tool", "judge")]
    return sum(int(each["entries-added"]) for each in told)


def test_redis_is_full(whole: Stack) -> None:
    """503 for new calls, while results of running ones still come; with room again it goes on by itself."""
    before = (whole.gateways, whole.workers)
    load = Load(whole.url, "full", 12, seconds=3, deadline_s=20)
    until(lambda: whole.http.get("/v1/status").json()["backlog"]["running"] == 12, "running calls")
    with whole.redis_client() as client:
        room = info(client, "memory")["maxmemory"]
        client.config_set("maxmemory", 1)
        try:
            refused_within(whole, 3)
            all_right(load)
            refused_within(whole, 3)
        finally:
            client.config_set("maxmemory", room)
    serves_again(whole, before)


async def test_the_lines_to_redis_are_cut_in_silence(any_redis: RunningRedis) -> None:
    """Both ends believe in connections that carry nothing any more; new ones do, and every call is answered right."""
    async with proxy_to(any_redis.directory / "redis.sock") as proxy:
        url = f"redis://127.0.0.1:{proxy.place}"
        running = await asyncio.to_thread(
            Stack, "--slots", "8", REDIS_URL=url, SANDBOX_WORKER__LEASE_S=str(LEASE_S)
        )
        try:
            load = Load(running.url, "silence", 200, seconds=0.1, deadline_s=30)
            await asyncio.to_thread(load.wait_answers, 20)
            proxy.drop()
            await proxy.swallowed("to_server")
            proxy.heal()
            await asyncio.to_thread(all_right, load)
        finally:
            await asyncio.to_thread(running.close)


# ---- who reads from it ----


def test_a_worker_is_frozen_for_longer_than_its_lease(whole: Stack) -> None:
    """The other one answers its calls; what it brings when it goes on is dropped, and its programs end."""
    before = (whole.gateways, whole.workers)
    victim = whole.workers[0]
    load = Load(whole.url, "lease", 200, seconds=0.2)
    load.wait_answers(20)
    mark = len(whole.log)
    with frozen(victim):
        all_right(load)
        assert whole.wait_log(mark, "took over calls of a silent worker")["calls"] >= 1
    until(
        lambda: not [process for process in family(victim) if process.command == "init"], "its programs' end"
    )
    until(lambda: len(whole.worker_ids()) == WORKERS, "news of its life")
    all_right(load)
    serves_again(whole, before)


def test_a_worker_dies_with_calls_that_it_was_just_handed(whole: Stack) -> None:
    """Frozen, it is handed calls that it never reads; killed, it takes them with it, and another one runs them."""
    victim = whole.workers[0]
    [name] = [id_ for id_ in whole.worker_ids() if f"-{victim}-" in id_]
    with whole.redis_client() as client, frozen(victim):
        load = Load(whole.url, "handed", 60, seconds=0.2)
        until(lambda: pending(client, name) > 0, "calls in the hands of the frozen one")
        os.kill(victim, signal.SIGKILL)
        all_right(load)
    until(lambda: len(whole.worker_ids()) == WORKERS, "the new worker")
    serves_again(whole, (whole.gateways, whole.workers))


def pending(client: redis.Redis, consumer: str) -> int:
    """How many calls a worker holds."""
    stream = Keys("sandbox").calls("tool")
    consumers: Any = client.xinfo_consumers(stream, GROUP)
    return sum(int(each["pending"]) for each in consumers if each["name"] == consumer.encode())


def test_a_gateway_is_frozen_for_longer_than_its_reads(whole: Stack) -> None:
    """What it was sent meanwhile is still there when it goes on."""
    before = (whole.gateways, whole.workers)
    [victim] = whole.gateways
    load = Load(whole.url, "stall", 200, seconds=0.2, deadline_s=20)
    load.wait_answers(20)
    with frozen(victim):
        frozen_at = time.monotonic()
        until(lambda: time.monotonic() > frozen_at + FREEZE_S, "what gives up every read")
    all_right(load)
    serves_again(whole, before)


@asynccontextmanager
async def queue_of(server: RunningRedis) -> AsyncIterator[CallQueue]:
    queue = CallQueue(server.settings)
    await queue.open()
    yield queue
    await queue.close()


async def cut_off(
    client: redis.Redis, read: Coroutine[Any, Any, list[T]], meanwhile: Awaitable[object]
) -> list[T]:
    """Cancel a read in the moment in which what it waits for comes; what it brings nevertheless."""
    reading = asyncio.create_task(read)

    def waits() -> bool:  # or has brought what the one before was to bring
        return reading.done() or bool(info(client, "clients")["blocked_clients"])

    await asyncio.to_thread(until, waits, "a blocked read")
    bringing = asyncio.ensure_future(meanwhile)
    # Asked on the loop itself, turn by turn, so that it reads nothing between the look and the end.
    while waits() and not reading.done():  # noqa: ASYNC110 - Redis tells, and no event of ours does
        await asyncio.sleep(0)
    reading.cancel()
    await bringing
    [brought] = await asyncio.gather(reading, return_exceptions=True)
    return brought if isinstance(brought, list) else []


def queued(queue: CallQueue, number: int) -> QueuedCall:
    call = ToolCall(id=f"cancel-{number}", code="")
    now_ms = queue.now_ms()
    return QueuedCall(call, queue.record("", call.id), now_ms, now_ms + 60_000)


async def test_a_take_that_is_cancelled_loses_no_call(any_redis: RunningRedis) -> None:
    """Calls that were handed to a read which is cancelled at that moment are there when the worker looks again."""
    async with queue_of(any_redis) as queue:
        with any_redis.client() as client:
            calls = [queued(queue, number) for number in range(READS)]
            taken: list[Delivery] = []
            for each in calls:
                taken += await cut_off(client, queue.take("worker", 1), queue.put("gateway", [each]))
        brought = len(taken)
        while resumed := await queue.resume("worker", [delivery.place for delivery in taken], READS):
            taken += resumed
        taken += await queue.take("worker", READS, block_s=0)
        assert sorted(delivery.record for delivery in taken) == sorted(each.record for each in calls)
        assert brought < READS, "no read was ever cut off"


async def test_a_read_of_replies_that_is_cancelled_loses_none(any_redis: RunningRedis) -> None:
    """What it was to bring is brought by the next one."""
    async with queue_of(any_redis) as queue:
        calls = [queued(queue, number) for number in range(READS)]
        await queue.put("gateway", calls)
        taken = await queue.take("worker", READS, block_s=0)
        assert len(taken) == READS
        heard: list[tuple[str, bytes]] = []
        with any_redis.client() as client:
            for delivery in taken:
                result = ToolResult(id=delivery.call.id, status=CallStatus.OK)
                settled_one = queue.settle([Outcome(delivery, result)])
                heard += await cut_off(client, queue.replies("gateway"), settled_one)
        brought = len({record for record, _ in heard})
        while more := await queue.replies("gateway", block_s=0):
            heard += more
        assert {record for record, _ in heard} == {each.record for each in calls}
        assert brought < READS, "no read was ever cut off"
