"""The queue when workers die and when Redis is away, full, frozen, emptied, demoted or older than we are."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvloop

from sandbox.calls import ToolCall
from sandbox.errors import ConfigError, Unavailable
from sandbox.keys import GROUP
from sandbox.queue import CallQueue, Delivery, Found, Outcome
from sandbox.settings import RedisSettings

from .queueing import (
    JUDGE,
    KEYS,
    TIGHT,
    TOOL,
    answered,
    calls,
    failed,
    fill_up,
    lag,
    make_idle,
    make_room,
    names,
    ok,
    pending,
    stdouts,
    worker,
)


async def test_a_dead_workers_calls_go_to_another(redis_server, queue: CallQueue) -> None:
    """Calls of a worker process that was killed are reclaimed by another, as delivered for the second time."""
    await queue.put("gw-1", [*calls(queue, "t1", "t2"), *calls(queue, "j", priority="judge")])
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
    assert answered(await queue.replies("gw-1")) == ["t1", "t2", "j"]
    assert (await queue.backlog()).running == 0


async def everything(queue: CallQueue) -> list[BaseException | object]:
    """Call every method once, at the same time."""
    delivery = Delivery("1-1", TOOL, queue.record("", "1"), ToolCall(code=""), 0, 0, 1)
    return await asyncio.gather(
        *(
            queue.ping(),
            queue.put("gw-1", calls(queue, "lost")),
            queue.take("w", 1),
            queue.settle([ok(delivery)]),
        ),
        *(queue.renew("w", [delivery]), queue.reclaim("w", 1, 1), queue.trim(), queue.replies("gw-1")),
        *(
            queue.backlog(),
            queue.announce(worker("w"), 10),
            queue.retire("w"),
            queue.workers(),
            queue.pulse(),
        ),
        *(queue.cancel("gw-1", [delivery.record]), queue.stop(delivery.record), queue.look(delivery.record)),
        *(queue.watch("gw-1", delivery.record), queue.hand_back("w", [delivery]), queue.orders("w")),
        *(queue.dead_letters(1), queue.dead_letter("1-1"), queue.drop_dead_letter("1-1")),
        *(queue.forget_consumers(), queue.resume("w", [delivery.place], 1)),
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
    await gateway.put("gw-1", calls(gateway, "a"))
    assert (await gateway.backlog()).waiting == 1
    (delivery,) = await queue.take("w", 5)
    await queue.settle([ok(delivery)])
    assert answered(await gateway.replies("gw-1")) == ["a"]


async def test_a_redis_that_is_emptied_under_a_waiting_read_goes_on(redis_server, queue: CallQueue) -> None:
    """FLUSHALL while a worker waits makes the group anew, and the worker gets what comes next."""
    waiting = asyncio.create_task(queue.take("w", 1))
    await queue.ping()
    with redis_server.client() as stranger:
        stranger.flushall()
    await queue.put("gw-1", calls(queue, "a"))
    assert names(await waiting or await queue.take("w", 1)) == ["a"]


async def test_a_slow_answer_does_not_set_the_clock_wrong(redis_server, queue: CallQueue) -> None:
    """A question for the time that a frozen Redis answered late moves no deadline."""
    known_ms = queue.now_ms() - time.monotonic() * 1000
    redis_server.freeze()
    asked = asyncio.create_task(queue.ping())
    await asyncio.sleep(0.5)
    redis_server.thaw()
    await asked
    assert abs(queue.now_ms() - time.monotonic() * 1000 - known_ms) < 50


async def test_a_frozen_redis_is_given_up_and_gets_nothing_twice(redis_server, queue: CallQueue) -> None:
    """When Redis answers nothing, everything ends as Unavailable after the timeout; thawed, it has each call once."""
    await queue.look(queue.record("", "a"))  # the functions are there
    redis_server.freeze()
    put, taken = await asyncio.gather(
        queue.put("gw-1", calls(queue, "a", "b")), queue.take("w", 1), return_exceptions=True
    )
    assert [type(put), type(taken)] == [Unavailable, Unavailable]
    redis_server.thaw()
    await queue.ping()
    seen = [*await queue.take("w", 10), *await queue.reclaim("w", idle_s=0, count=10)]
    assert sorted(set(names(seen))) == ["a", "b"]
    assert [put.outcome for put in await queue.put("gw-1", calls(queue, "a", "b"))] == ["joined"] * 2
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
            await queue.put("gw-1", calls(queue, "a"))
        with pytest.raises(Unavailable):
            await queue.take("w", 1)
        stranger.replicaof("NO", "ONE")
    await queue.put("gw-1", calls(queue, "a"))
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


async def test_a_full_redis_refuses_calls_and_leaves_nothing_of_them(redis_server, queue: CallQueue) -> None:
    """What is refused is neither queued nor recorded, the error quotes no program, and a repeat later is whole."""
    fill_up(redis_server)
    with pytest.raises(Unavailable, match="OutOfMemoryError") as refused:
        await queue.put("gw-1", calls(queue, "a", "b"))
    assert "print" not in f"{refused.value} {refused.value.__cause__}"
    with redis_server.client() as stranger:
        assert stranger.xlen(TOOL) == 0
        assert stranger.keys(KEYS.call("", "*")) == []
    make_room(redis_server)
    assert [put.outcome for put in await queue.put("gw-1", calls(queue, "a", "b"))] == ["queued"] * 2


async def test_a_redis_that_fills_up_takes_a_batch_whole_or_not_at_all(
    redis_server, queue: CallQueue
) -> None:
    """No call is queued without its record, nor recorded without its entry, wherever the memory ends."""
    put = 0
    with redis_server.client() as stranger:
        stranger.config_set("maxmemory", stranger.info("memory")["used_memory"] + 2_000_000)
        with suppress(Unavailable):
            while put < 10_000:
                await queue.put("gw-1", calls(queue, *(f"{put + i}" for i in range(20)), stdin="x" * 5_000))
                put += 20
        assert 0 < put < 10_000
        assert stranger.xlen(TOOL) == len(stranger.keys(KEYS.call("", "*"))) == put
    make_room(redis_server)


async def test_a_full_redis_takes_results_and_all_that_makes_room(redis_server, queue: CallQueue) -> None:
    """Calls that are in a full Redis are run, renewed, reclaimed, handed back, answered and cancelled as ever."""
    put = calls(queue, *"abcdefg")
    await queue.put("gw-1", put)
    (a,) = await queue.take("w", 1)
    fill_up(redis_server)
    b, c, d = await queue.take("w", 3)
    assert await queue.renew("w", [a, b, c, d]) == []
    await queue.hand_back("w", [c])
    make_idle(redis_server, d, 60)
    assert names(await queue.reclaim("w2", idle_s=30, count=5)) == ["c", "d"]
    assert await queue.cancel("gw-1", [d.record, put[4].record]) == [
        Found("running", b"w2"),
        Found("waiting"),
    ]
    assert await queue.orders("w2") == [d.place]
    assert (
        await queue.settle([ok(a, "x" * 1_000_000), failed(b, is_poison=True), Outcome(d, None)])
        == [True] * 3
    )
    assert answered(await queue.replies("gw-1")) == ["a", "b"]
    assert len(await queue.dead_letters(5)) == 1
    assert await queue.watch("gw-2", put[5].record) == Found("waiting")
    assert await queue.stop(put[5].record) == Found("waiting")
    await queue.trim()
    assert await queue.replies("gw-1") == [(put[5].record, b"")]
    make_room(redis_server)
    await queue.put("gw-1", calls(queue, "h"))
    taken = await queue.take("w", 5)
    assert names(taken) == ["g", "h"]
    await queue.settle([ok(delivery) for delivery in [*taken, c]])
    assert answered(await queue.replies("gw-1")) == ["g", "h", "c"]
    assert await queue.take("w", 1, block_s=0) == []
    assert (lag(redis_server), pending(redis_server)) == (0, 0)


@pytest.mark.parametrize("forget", ["FUNCTION FLUSH", "SCRIPT FLUSH"])
async def test_functions_that_redis_forgot_are_loaded_again(
    redis_server, queue: CallQueue, forget: str
) -> None:
    """At each step, a Redis without our functions gets them, and the step is made once."""

    def forgotten() -> None:
        with redis_server.client() as stranger:
            stranger.execute_command(*forget.split())

    put = calls(queue, "a", "b")
    forgotten()
    await queue.put("gw-1", put)
    forgotten()
    a, b = await queue.take("w", 5)
    forgotten()
    assert await queue.renew("w", [a]) == []
    forgotten()
    assert await queue.settle([ok(a)]) == [True]
    forgotten()
    assert await queue.cancel("gw-1", [b.record]) == [Found("running", b"w")]
    assert answered(await queue.replies("gw-1")) == ["a"]
    assert await queue.replies("gw-1", block_s=0) == []


async def test_two_versions_of_the_functions_live_side_by_side(redis_server, queue: CallQueue) -> None:
    """While a service is being renewed, old and new processes serve the same calls, each by its own functions."""
    await queue.put("gw-1", calls(queue, "a", "b"))
    with redis_server.client() as stranger:
        [library] = stranger.execute_command("FUNCTION", "LIST", "WITHCODE")
        told = dict(zip(library[::2], library[1::2], strict=True))
        ours = told[b"library_name"].decode().removeprefix("sandbox_")
        stranger.execute_command("FUNCTION", "LOAD", told[b"library_code"].decode().replace(ours, "older"))
        older = stranger.execute_command("FCALL", "take_older", 1, TOOL, GROUP, "old", 1)
    assert [entry[0] for entry in older] == [TOOL.encode()]
    (b,) = await queue.take("new", 5)
    (a,) = await queue.reclaim("new", idle_s=0, count=1)
    assert await queue.settle([ok(a), ok(b)]) == [True, True]
    assert answered(await queue.replies("gw-1")) == ["a", "b"]


async def test_processes_that_load_the_functions_at_once(redis_server, open_queue) -> None:
    """The first use by many at the same time is one like any other."""
    queues = [await open_queue() for _ in range(8)]
    await asyncio.gather(*(queue.put("gw-1", calls(queue, f"{i}")) for i, queue in enumerate(queues)))
    assert len(await queues[0].take("w", 20)) == 8


async def test_a_group_that_is_gone_is_made_again_and_no_step_is_made_twice(
    redis_server, queue: CallQueue
) -> None:
    """Without its group a stream gives its calls anew; what the other stream gave counts once."""
    put = [*calls(queue, "t"), *calls(queue, "j", priority="judge")]
    await queue.put("gw-1", put)
    (tool,) = await queue.take("w1", 1)
    make_idle(redis_server, tool, 60)
    with redis_server.client() as stranger:
        stranger.xgroup_destroy(JUDGE, GROUP)
    (again,) = await queue.reclaim("w2", idle_s=30, count=5)
    assert (again.call.id, again.times_delivered) == ("t", 2)
    with redis_server.client() as stranger:
        stranger.xgroup_destroy(JUDGE, GROUP)
    assert await queue.cancel("gw-1", [queued.record for queued in put]) == [
        Found("running", b"w2"),
        Found("waiting"),
    ]
    assert await queue.orders("w2") == [again.place]
    with redis_server.client() as stranger:
        stranger.xgroup_destroy(TOOL, GROUP)
        stranger.xgroup_destroy(JUDGE, GROUP)
    assert await queue.settle([ok(again)]) == [False]  # what nobody knows any more is nobody's to settle
    assert await queue.renew("w2", [again]) == [again]
    assert await queue.take("w2", 5, block_s=0) == []  # and cancelled it still is


async def test_what_a_gateway_puts_again_after_a_restart_is_answered_once(
    redis_server, queue: CallQueue, open_queue
) -> None:
    """The worker that ran it on the old server comes too late, and the one that runs it on the new one answers."""
    gateway = await open_queue()
    put = calls(gateway, "a")
    await gateway.put("gw-1", put)
    (old,) = await queue.take("w1", 1)
    redis_server.kill()
    await redis_server.start()
    with suppress(Unavailable):  # an old connection may be the first to notice
        await gateway.ping()
    assert [outcome.outcome for outcome in await gateway.put("gw-1", put)] == ["queued"]
    assert [outcome.outcome for outcome in await gateway.put("gw-1", put)] == ["joined"]
    assert await queue.settle([ok(old, "old")]) == [False]
    (new,) = await queue.take("w2", 5)
    assert await queue.renew("w1", [old]) == [old]
    assert await queue.settle([ok(new, "new")]) == [True]
    assert stdouts(await gateway.replies("gw-1")) == ["new"]
    assert await gateway.replies("gw-1", block_s=0) == []


async def test_a_read_that_breaks_loses_and_repeats_nothing(redis_server, queue: CallQueue) -> None:
    """Wherever a reset finds a read of replies, each of them is handled once in the end."""
    async with tcp_to(redis_server) as (url, reset):
        gateway = CallQueue(RedisSettings(url=url, namespace="test"))
        await gateway.open()
        handled: list[str] = []
        for turns in range(30):
            await queue.put("gw-1", calls(queue, f"{turns}"))
            reading = asyncio.create_task(gateway.replies("gw-1"))
            await queue.settle([ok(*await queue.take("w", 1))])
            for _ in range(turns % 15):
                await asyncio.sleep(0)
            reset()
            with suppress(Unavailable):
                handled += answered(await reading)
            while len(handled) <= turns:
                with suppress(Unavailable):
                    handled += answered(await gateway.replies("gw-1"))
        assert handled == [f"{turns}" for turns in range(30)]
        await gateway.close()
