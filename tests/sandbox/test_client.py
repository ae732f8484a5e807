"""SandboxClient against a gateway that does what each test wants."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import (
    AnswerLost,
    CallStatus,
    CallTooLarge,
    Cancelled,
    ConfigError,
    Forbidden,
    InternalError,
    InvalidCall,
    Limits,
    Overloaded,
    QueueTimeout,
    SandboxClient,
    SandboxError,
    ToolCall,
    ToolResult,
    Unauthorized,
    Unavailable,
)
from sandbox import client as client_module
from sandbox.link import lines_of

from .fake_gateway import FakeGateway, Request, answer_all, result


def error(name: str, message: str = "no", **fields: float) -> dict[str, dict[str, str | float]]:
    return {"error": {"name": name, "message": message, **fields}}


async def test_a_call_by_its_code_comes_back_as_a_typed_result() -> None:
    """Code and keyword fields become one call of a batch, and its line becomes a ToolResult."""
    async with FakeGateway() as gateway, SandboxClient(gateway.url) as client:
        got = await client.run("print(1)", stdin="x", limits=Limits(wall_s=2))

    assert isinstance(got, ToolResult)
    assert (got.status, got.stdout) == (CallStatus.OK, "print(1)")
    [request] = gateway.requests
    assert (request.path, request.headers["accept"]) == ("/v1/batch", "application/x-ndjson")
    assert request.calls == [{"id": got.id, "code": "print(1)", "stdin": "x", "limits": {"wall_s": 2.0}}]


async def test_a_call_that_was_made_by_the_caller_keeps_its_id_and_leaves_defaults_to_the_server() -> None:
    """Only what was set is sent, so that a server with lower ceilings applies its own defaults."""
    call = ToolCall(code="1")
    async with FakeGateway() as gateway, SandboxClient(gateway.url) as client:
        got = await client.run(call)

    assert got.id == call.id
    assert gateway.requests[0].calls == [{"id": call.id, "code": "1"}]


async def test_ten_thousand_calls_from_one_loop_share_few_requests() -> None:
    """10,000 run() at once are all answered, each its own, over some 20 requests and few connections."""
    async with FakeGateway() as gateway, SandboxClient(gateway.url) as client:
        got = await asyncio.gather(*(client.run(f"print({n})") for n in range(10_000)))

    assert [one.stdout for one in got] == [f"print({n})" for n in range(10_000)]
    assert len(gateway.requests) < 100
    assert gateway.most_connections <= 16


async def test_a_lone_call_waits_for_nobody() -> None:
    """With nothing in flight a call leaves at the next turn of the loop, in a request of its own."""
    async with FakeGateway() as gateway, SandboxClient(gateway.url) as client:
        for n in range(3):
            await client.run(f"print({n})")

    assert [len(request.calls) for request in gateway.requests] == [1, 1, 1]


async def test_a_slow_call_holds_none_of_its_batch() -> None:
    """A fast call is answered while a slow one of the same request still runs."""
    fast_is_back = asyncio.Event()

    async def fast_first(request: Request) -> None:
        await request.line(1, result(request.calls[1]))
        await fast_is_back.wait()
        await request.line(0, result(request.calls[0]))
        await request.end()

    async with FakeGateway(fast_first) as gateway, SandboxClient(gateway.url) as client:
        slow = asyncio.create_task(client.run("slow"))
        fast = asyncio.create_task(client.run("fast"))
        assert (await fast).stdout == "fast"
        assert not slow.done()
        fast_is_back.set()
        assert (await slow).stdout == "slow"
    assert len(gateway.requests) == 1


async def test_no_more_calls_are_unanswered_than_allowed() -> None:
    """`max_in_flight` bounds what the gateway holds for one client."""
    held = most_held = 0

    async def count(request: Request) -> None:
        nonlocal held, most_held
        held += len(request.calls)
        most_held = max(most_held, held)
        for index, call in enumerate(request.calls):
            held -= 1
            await request.line(index, result(call))
        await request.end()

    async with FakeGateway(count) as gateway, SandboxClient(gateway.url, max_in_flight=7) as client:
        got = await client.run_many([f"print({n})" for n in range(200)])
        alone = await asyncio.gather(*(client.run("1") for _ in range(200)))

    assert all(isinstance(one, ToolResult) for one in got)
    assert len(alone) == 200
    assert 1 < most_held <= 7


@pytest.mark.parametrize("cls", [InvalidCall, CallTooLarge, Cancelled, InternalError])
async def test_run_raises_what_the_gateway_raised(cls: type[SandboxError]) -> None:
    """An error in a call's place is raised as the same class with the same words, and asked only once."""

    async def answer(request: Request) -> None:
        await request.line(0, error(cls.__name__, "limits.wall_s: too high"))
        await request.end()

    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url) as client:
        with pytest.raises(cls, match="too high"):
            await client.run("1")
    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    ("status", "cls"), [("queue_timeout", QueueTimeout), ("internal_error", InternalError)]
)
async def test_run_raises_for_a_fault_of_ours(status: str, cls: type[SandboxError]) -> None:
    """A fault is never returned by run(), so that nobody reads it as a verdict."""

    async def answer(request: Request) -> None:
        await request.line(0, result(request.calls[0], status=status, reason="the reason"))
        await request.end()

    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url, attempts=1) as client:
        with pytest.raises(cls, match="the reason"):
            await client.run("1")


async def test_run_many_keeps_order_and_loses_nothing_to_a_neighbour() -> None:
    """Results, faults and errors stand at the places of their calls, and each is reported once."""

    async def answer(request: Request) -> None:
        for index, call in reversed(list(enumerate(request.calls))):
            if call["code"] == "bad":
                await request.line(index, error("InvalidCall", "code: bad"))
            elif call["code"] == "broken":
                await request.line(index, result(call, status="internal_error"))
            else:
                await request.line(index, result(call))
        await request.end()

    reported: dict[int, ToolResult | SandboxError] = {}
    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url) as client:
        got = await client.run_many(["a", "bad", ToolCall(code="broken"), "b"], reported.__setitem__)

    a, bad, broken, b = got
    assert isinstance(a, ToolResult)
    assert isinstance(broken, ToolResult)
    assert isinstance(b, ToolResult)
    assert (a.stdout, b.stdout) == ("a", "b")
    assert isinstance(bad, InvalidCall)
    assert broken.status.is_fault
    assert [reported[index] for index in range(4)] == got


async def test_a_call_that_cannot_be_built_is_refused_before_it_is_sent() -> None:
    """A bad field is an InvalidCall that names it, in its place in run_many."""
    async with FakeGateway() as gateway, SandboxClient(gateway.url) as client:
        with pytest.raises(InvalidCall, match="deadline_s"):
            await client.run("1", deadline_s=-1)
        with pytest.raises(InvalidCall, match="stdin: belongs into the ToolCall"):
            await client.run(ToolCall(code="1"), stdin="x")
        [got] = await client.run_many([5])  # type: ignore[list-item]
        assert isinstance(got, InvalidCall)
    assert gateway.requests == []


async def test_refusals_that_a_retry_can_help_are_asked_again_with_the_same_id() -> None:
    """429 and 503 for the request, an item's error, and queue_timeout all lead to another attempt."""

    async def refuse_four_times(request: Request) -> None:
        match len(gateway.requests):
            case 1:
                await request.refuse(429, "Overloaded")
            case 2:
                await request.whole(503, b"<html>a proxy</html>")
            case 3:
                await request.line(0, error("Unavailable"))
                await request.end()
            case 4:
                await request.line(0, result(request.calls[0], status="queue_timeout"))
                await request.end()
            case _:
                await answer_all(request)

    async with FakeGateway(refuse_four_times) as gateway, SandboxClient(gateway.url) as client:
        got = await client.run("1")
    assert [request.calls[0]["id"] for request in gateway.requests] == [got.id] * 5


@pytest.mark.parametrize("where", ["header", "item"])
async def test_retry_after_is_respected(where: str) -> None:
    """The second attempt comes no earlier than the gateway asked for."""
    times: list[float] = []

    async def refuse_once(request: Request) -> None:
        times.append(time.monotonic())
        if len(times) > 1:
            await answer_all(request)
        elif where == "header":
            await request.refuse(429, "Overloaded", retry_after="1")
        else:
            await request.line(0, error("Overloaded", retry_after_s=0.5))
            await request.end()

    async with FakeGateway(refuse_once) as gateway, SandboxClient(gateway.url) as client:
        await client.run("1")
    assert times[1] - times[0] >= (1.0 if where == "header" else 0.5)


async def test_attempts_and_patience_have_an_end() -> None:
    """The last refusal is raised when attempts are used up, or when the next would come too late; 429 uses up none."""

    async def refuse(request: Request) -> None:
        number = len(gateway.requests)
        if number <= 3:
            await request.refuse(429, "Overloaded", "full", retry_after="0")
        elif number <= 6:
            await request.refuse(503, "Unavailable", "away", retry_after="0")
        else:
            await request.refuse(429, "Overloaded", "full", retry_after="3600")

    async with FakeGateway(refuse) as gateway:
        async with SandboxClient(gateway.url, attempts=3) as client:
            with pytest.raises(Unavailable, match="away"):
                await client.run("1")
        assert len(gateway.requests) == 6
        async with SandboxClient(gateway.url) as client:
            with pytest.raises(Overloaded) as caught:
                await client.run("1")
        assert caught.value.retry_after_s == 3600
        assert len(gateway.requests) == 7


async def test_patience_begins_with_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that waited its turn or ran for longer than that has lost nothing of it."""
    monkeypatch.setattr(random, "uniform", lambda low, high: low)
    patience_s = 0.2

    async def late_refusal(request: Request) -> None:
        if len(gateway.requests) == 1:
            await asyncio.sleep(2 * patience_s)
            await request.refuse(503, "Unavailable")
        else:
            await answer_all(request)

    async with (
        FakeGateway(late_refusal) as gateway,
        SandboxClient(gateway.url, max_in_flight=1, patience_s=patience_s) as client,
    ):
        got = await client.run_many(["a", "b"])
    assert [type(one) for one in got] == [ToolResult, ToolResult]


async def test_a_gateway_that_is_not_there_yet_is_waited_for() -> None:
    """A refused connection is retried, because nothing was sent."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    async with SandboxClient(f"http://127.0.0.1:{port}", attempts=1) as client:
        with pytest.raises(Unavailable, match="cannot connect"):
            await client.run("1")
    async with SandboxClient(f"http://127.0.0.1:{port}", attempts=1000) as client:
        waiting = asyncio.create_task(client.run("1"))
        async with FakeGateway(port=port):
            assert (await waiting).status is CallStatus.OK


async def test_a_connection_that_breaks_loses_no_call() -> None:
    """What was answered stands, and exactly the rest is sent again, under the same ids."""

    async def break_after_two(request: Request) -> None:
        if len(gateway.requests) > 1:
            return await answer_all(request)
        for index in (2, 0):
            await request.line(index, result(request.calls[index]))
        await request.chunk(b'{"index": 1, "id": "')
        return request.drop()

    async with FakeGateway(break_after_two) as gateway, SandboxClient(gateway.url) as client:
        got = await client.run_many(["a", "b", "c", "d"])

    assert [one.stdout for one in got if isinstance(one, ToolResult)] == ["a", "b", "c", "d"]
    first, *again = [request.calls for request in gateway.requests]
    sent_again = sorted([call for calls in again for call in calls], key=lambda call: str(call["code"]))
    assert sent_again == [first[1], first[3]]


async def test_an_answer_that_ends_early_loses_no_call() -> None:
    """A well-formed end of the answer with calls missing is as good as a broken connection."""

    async def one_at_a_time(request: Request) -> None:
        await request.line(0, result(request.calls[0]))
        await request.end()

    async with FakeGateway(one_at_a_time) as gateway, SandboxClient(gateway.url) as client:
        got = await client.run_many(["a", "b", "c"])
    assert [one.stdout for one in got if isinstance(one, ToolResult)] == ["a", "b", "c"]


async def test_an_answer_that_stays_lost_is_told() -> None:
    """When the last attempt broke too: AnswerLost, an Unavailable that says that the call may have run."""

    async def drop(request: Request) -> None:
        request.drop()

    async with FakeGateway(drop) as gateway, SandboxClient(gateway.url, attempts=2) as client:
        with pytest.raises(AnswerLost, match="may have run") as caught:
            await client.run(ToolCall(id="a", code="1"))
    assert isinstance(caught.value, Unavailable)
    assert isinstance(caught.value.__cause__, httpx.TransportError)
    assert [request.calls[0]["id"] for request in gateway.requests] == ["a", "a"]


async def test_a_batch_that_is_too_large_goes_in_smaller_ones() -> None:
    """413 for many calls says nothing about each of them; 413 for one alone is its error."""

    async def at_most_two(request: Request) -> None:
        if len(request.calls) > 2 or "huge" in [call["code"] for call in request.calls]:
            await request.refuse(413, "CallTooLarge", "over the bound")
        else:
            await answer_all(request)

    async with FakeGateway(at_most_two) as gateway, SandboxClient(gateway.url) as client:
        got = await client.run_many([*map(str, range(9)), "huge"])
    assert [one.stdout for one in got[:9] if isinstance(one, ToolResult)] == [*map(str, range(9))]
    assert isinstance(got[9], CallTooLarge)


async def test_large_calls_share_no_request() -> None:
    """A request carries at most 4 MiB of calls, unless a single call is larger."""
    large = "#" * 3_000_000
    async with FakeGateway() as gateway, SandboxClient(gateway.url) as client:
        await client.run_many([large, large], None)
    assert [len(request.calls) for request in gateway.requests] == [1, 1]


@pytest.mark.parametrize("text", ["a\u2028b\x85c\x0bd", "\r\n", "\x00\ufffd"])
async def test_any_text_comes_through(text: str) -> None:
    """Characters that count as line ends elsewhere do not cut a result."""

    async def answer(request: Request) -> None:
        await request.line(0, result(request.calls[0], stdout=text))
        await request.end()

    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url) as client:
        assert (await client.run("1")).stdout == text


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[]\n",
        b'{"id": "a", "status": "ok"}\n',
        b'{"index": 9, "id": "a", "status": "ok"}\n',
        b'{"index": [], "id": "a", "status": "ok"}\n',
        b'{"index": 0, "id": "another", "status": "ok"}\n',
        b'{"index": 0, "id": "a", "status": "splendid"}\n',
        b"#" * 2_000_000,
    ],
)
async def test_what_is_no_answer_of_a_gateway_is_a_fault(line: bytes) -> None:
    """Garbage, a wrong place, a wrong id and a line beyond the limits end in InternalError, not in a hang."""

    async def answer(request: Request) -> None:
        await request.chunk(line)
        await request.end()

    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url) as client:
        with pytest.raises(InternalError, match="cannot read"):
            await client.run(ToolCall(id="a", code="1"))


@pytest.mark.parametrize(("status", "cls"), [(404, InternalError), (502, AnswerLost), (504, AnswerLost)])
async def test_an_answer_that_no_gateway_gave_is_read_by_its_status(
    status: int, cls: type[SandboxError]
) -> None:
    """Behind a proxy's 502 and 504 the call may have run; other pages mean that this is no gateway."""

    async def proxy(request: Request) -> None:
        await request.whole(status, b"<html>")

    async with FakeGateway(proxy) as gateway, SandboxClient(gateway.url, attempts=1) as client:
        with pytest.raises(cls, match=f"answered {status}") as caught:
            await client.run("1")
    assert type(caught.value) is cls


async def test_a_cancelled_call_disturbs_no_other() -> None:
    """Before it is sent it is left out; after that the gateway is told, and its neighbours get their answers."""
    arrived, told = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> None:
        arrived.set()
        await told.wait()
        await request.line(0, error("Cancelled", "by its caller"))
        await request.line(1, result(request.calls[1]))
        await request.end()

    async def cancel(request: Request) -> None:
        told.set()
        await request.refuse(404, "NotFound")

    async with FakeGateway(answer, cancel) as gateway, SandboxClient(gateway.url) as client:
        calls = (ToolCall(id="a", code="a"), ToolCall(id="run:2/b", code="b"), ToolCall(id="c", code="c"))
        never_sent, sent, kept = (asyncio.create_task(client.run(call)) for call in calls)
        asyncio.get_running_loop().call_soon(never_sent.cancel)
        await arrived.wait()
        sent.cancel()
        assert (await kept).stdout == "c"
        await asyncio.gather(never_sent, sent, return_exceptions=True)
    assert [call["code"] for call in gateway.requests[0].calls] == ["b", "c"]
    assert gateway.cancels == ["/v1/jobs/run%3A2%2Fb"]
    assert sent.cancelled()


async def test_a_request_that_nobody_waits_for_is_cut() -> None:
    """Callers that leave together are told by the end of the connection, and their places are free again."""
    arrived, cut = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> None:
        if len(gateway.requests) > 1:
            return await answer_all(request)
        arrived.set()
        await request.cut()
        return cut.set()

    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url, max_in_flight=8) as client:
        leaving = asyncio.create_task(client.run_many([f"print({n})" for n in range(8)]))
        await arrived.wait()
        leaving.cancel()
        await cut.wait()
        assert (await client.run("next")).stdout == "next"
    assert gateway.cancels == []


async def test_a_call_that_comes_back_is_not_ended_by_its_own_past() -> None:
    """Cancelled and sent again under its id, it waits until the gateway has heard of the first's end."""
    arrived, told, go_on, order = asyncio.Event(), asyncio.Event(), asyncio.Event(), []

    async def answer(request: Request) -> None:
        if len(gateway.requests) > 1:
            order.append("sent again")
            return await answer_all(request)
        arrived.set()
        return await asyncio.Event().wait() and None

    async def cancel(request: Request) -> None:
        told.set()
        await go_on.wait()
        order.append("cancelled")
        await request.whole(200, b"{}")

    async with FakeGateway(answer, cancel) as gateway, SandboxClient(gateway.url) as client:
        call, neighbour = ToolCall(id="a", code="a"), ToolCall(code="b")
        first, other = (asyncio.create_task(client.run(each)) for each in (call, neighbour))
        await arrived.wait()
        first.cancel()
        await told.wait()
        again = asyncio.create_task(client.run(call))
        asyncio.get_running_loop().call_soon(go_on.set)
        assert (await again).stdout == "a"
    assert order == ["cancelled", "sent again"]
    await asyncio.gather(first, other, return_exceptions=True)


async def test_a_call_that_another_caller_waits_for_is_not_ended() -> None:
    """Two callers of one id share its run; the gateway hears nothing when one of them leaves."""
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def answer(request: Request) -> None:
        arrived.set()
        await go_on.wait()
        await answer_all(request)

    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url) as client:
        call = ToolCall(id="a", code="a")
        leaving, staying = (asyncio.create_task(client.run(call)) for _ in range(2))
        await arrived.wait()
        leaving.cancel()
        await asyncio.wait({leaving})
        go_on.set()
        assert (await staying).stdout == "a"
    assert gateway.cancels == []


async def test_few_cancellations_are_told_at_one_time() -> None:
    """However many callers leave a request that others still wait for, and whatever the gateway says to it."""
    arrived, all_told = asyncio.Event(), asyncio.Event()
    open_now = most_open = 0

    async def answer(request: Request) -> None:
        arrived.set()
        await all_told.wait()
        await answer_all(request)

    async def cancel(request: Request) -> None:
        nonlocal open_now, most_open
        open_now += 1
        most_open = max(most_open, open_now)
        await asyncio.sleep(0.001)  # so that others have the time to come
        open_now -= 1
        if len(gateway.cancels) == 64:
            all_told.set()
        request.drop()

    async with FakeGateway(answer, cancel) as gateway, SandboxClient(gateway.url) as client:
        tasks = [asyncio.create_task(client.run(str(n))) for n in range(65)]
        await arrived.wait()
        for task in tasks[1:]:
            task.cancel()
        assert (await tasks[0]).stdout == "0"
        await asyncio.gather(*tasks, return_exceptions=True)
    assert len(set(gateway.cancels)) == 64
    assert 1 < most_open <= 8


async def test_closing_joins_the_last_cancellations() -> None:
    """A client that is closed while it tells of a cancelled call leaves no task behind, and nobody waiting."""
    arrived, told, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def never(request: Request) -> None:
        arrived.set()
        await asyncio.Event().wait()

    async def slow(request: Request) -> None:
        told.set()
        await go_on.wait()
        await request.whole(200, b"{}")

    async with FakeGateway(never, slow) as gateway:
        call = ToolCall(id="a", code="a")
        async with SandboxClient(gateway.url) as client:
            cancelled, other = (asyncio.create_task(client.run(one)) for one in (call, "b"))
            await arrived.wait()
            cancelled.cancel()
            await told.wait()
            again = asyncio.create_task(client.run(call))
            await asyncio.sleep(0)  # so that it waits for the end of the one before
            asyncio.get_running_loop().call_soon(go_on.set)
        ends = await asyncio.gather(cancelled, other, again, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError, AnswerLost, Unavailable]
        assert not [task for task in asyncio.all_tasks() if "wire" in repr(task)]


async def test_closing_in_the_moment_of_sending_leaves_nobody_waiting() -> None:
    """A request that is cut before its first step still answers all of its calls."""
    async with FakeGateway() as gateway:
        async with SandboxClient(gateway.url, max_in_flight=1280) as client:
            calls = [
                asyncio.create_task(client.run(str(n))) for n in range(128)
            ]  # a full request leaves at once
            await asyncio.sleep(0)
        ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {AnswerLost}


async def test_closing_tells_everybody_who_waits() -> None:
    """A call in flight ends with AnswerLost, a waiting one with Unavailable, and no task stays behind."""
    arrived = asyncio.Event()

    async def never(request: Request) -> None:
        arrived.set()
        await asyncio.Event().wait()

    async with FakeGateway(never) as gateway:
        async with SandboxClient(gateway.url, max_in_flight=1) as client:
            sent, waiting = (asyncio.create_task(client.run(code)) for code in ("a", "b"))
            await arrived.wait()
        ends = await asyncio.gather(sent, waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [AnswerLost, Unavailable]


async def test_closing_tells_who_waits_for_a_job() -> None:
    """Those that were asked for, and those whose turn had not come."""
    asked = asyncio.Event()

    async def never(request: Request) -> None:
        asked.set()
        await request.until(asyncio.Event())

    async with FakeGateway(job=never) as gateway:
        async with SandboxClient(gateway.url) as client:
            waits = [asyncio.create_task(client.submit("x")) for _ in range(9)]
            waits += [asyncio.create_task(client.result("x", wait_s=30)) for _ in range(9)]
            await asyncio.wait_for(asked.wait(), 10)
        ends = await asyncio.gather(*waits, return_exceptions=True)
    assert {type(end) for end in ends} == {Unavailable}


def pending(call_id: str) -> bytes:
    return json.dumps({"id": call_id, "status": "pending"}).encode()


async def test_a_job_is_submitted_and_asked_for_later() -> None:
    """`submit` returns when the call is queued; `result` has None until there is one."""
    call = ToolCall(id="run:2/b", code="b", stdin="x")

    async def job(request: Request) -> None:
        if request.method == "POST" or len(gateway.jobs) == 2:
            await request.whole(202, pending(call.id))
        else:
            await request.whole(200, json.dumps(result({"id": call.id, "code": "b"})).encode())

    async with FakeGateway(job=job) as gateway, SandboxClient(gateway.url) as client:
        assert await client.submit(call) == call.id
        assert await client.result(call.id) is None
        got = await client.result(call.id, wait_s=2.5)
    assert isinstance(got, ToolResult)
    assert got.stdout == "b"
    submitted, *asked = gateway.jobs
    assert (submitted.path, submitted.calls) == (
        "/v1/jobs",
        [{"id": "run:2/b", "code": "b", "stdin": "x"}],
    )
    paths = [request.path.split("=") for request in asked]
    assert [path for path, _ in paths] == ["/v1/jobs/run%3A2%2Fb?wait"] * 2
    assert [float(wait_s) for _, wait_s in paths] == pytest.approx([0, 2.5], abs=0.5)


async def test_a_long_wait_for_a_job_is_made_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question waits for so long that a proxy would cut it, and the whole wait has an end."""
    monkeypatch.setattr(client_module, "MAX_WAIT_S", 0.1)

    async def late(request: Request) -> None:
        await asyncio.sleep(0.1)
        await request.whole(202, pending("a"))

    async with FakeGateway(job=late) as gateway, SandboxClient(gateway.url) as client:
        assert await client.result("a", wait_s=0.25) is None
    assert 2 <= len(gateway.jobs) <= 4
    assert all(float(request.path.split("=")[1]) <= 0.1 for request in gateway.jobs)


async def test_a_refused_job_is_sent_again_under_its_id() -> None:
    """As a call is: 503 and a broken connection lead to another attempt, and what cannot help is raised."""

    async def job(request: Request) -> None:
        match len(gateway.jobs):
            case 1:
                await request.refuse(503, "Unavailable")
            case 2:
                request.drop()
            case 3:
                await request.whole(202, pending("a"))
            case _:
                await request.refuse(422, "InvalidCall", "code: bad")

    async with FakeGateway(job=job) as gateway, SandboxClient(gateway.url) as client:
        assert await client.submit("1", id="a") == "a"
        assert [request.calls[0]["id"] for request in gateway.jobs] == ["a"] * 3
        with pytest.raises(InvalidCall, match="bad"):
            await client.submit("2")


@pytest.mark.parametrize(
    ("status", "body", "cls"),
    [
        (200, b'{"id": "a", "status": "queue_timeout"}', QueueTimeout),
        (200, b'{"id": "a", "status": "internal_error"}', InternalError),
        (200, b"<html>", InternalError),
        (409, json.dumps(error("Cancelled")).encode(), Cancelled),
    ],
)
async def test_a_job_without_a_verdict_raises(status: int, body: bytes, cls: type[SandboxError]) -> None:
    """A fault is never returned, and what the gateway raised is raised, after one question."""

    async def job(request: Request) -> None:
        await request.whole(status, body)

    async with FakeGateway(job=job) as gateway, SandboxClient(gateway.url) as client:
        with pytest.raises(cls):
            await client.result("a")
    assert len(gateway.jobs) == 1


async def test_status_is_what_the_gateway_says() -> None:
    """`status()` returns the JSON of /v1/status, raises what the gateway raised, and Unavailable if there is none."""
    async with FakeGateway() as gateway, SandboxClient(gateway.url) as client:
        assert await client.status() == {"ready": True}
        gateway.status = (503, json.dumps(error("Unavailable", "Redis is away")).encode())
        with pytest.raises(Unavailable, match="Redis is away"):
            await client.status()
        gateway.status = (200, b"<html>")
        with pytest.raises(InternalError, match="cannot read"):
            await client.status()
    async with SandboxClient(gateway.url) as client:
        with pytest.raises(Unavailable, match="does not answer"):
            await client.status()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://a:b", ""])
def test_a_url_that_is_none_is_refused_at_once(url: str) -> None:
    """A URL without scheme or host, or with a bad port, is a ConfigError that quotes it."""
    with pytest.raises(ConfigError, match="is no URL of a gateway"):
        SandboxClient(url)


async def test_a_client_that_is_not_open_says_so() -> None:
    """Outside of `async with` a call raises rather than waiting for ever."""
    with pytest.raises(RuntimeError, match="async with"):
        await SandboxClient().run("1")


async def test_the_blocking_client_serves_many_threads() -> None:
    """Threads that call at the same time share requests, and errors and callbacks come through."""
    async with FakeGateway() as gateway:

        def work() -> list[str]:
            together = threading.Barrier(16)

            def one(n: int) -> str:
                together.wait()
                return client.run(str(n), stdin="x").stdout

            with SandboxClient.blocking(gateway.url) as client, ThreadPoolExecutor(16) as threads:
                assert [type(one) for one in client.run_many(["a", "b"])] == [ToolResult, ToolResult]
                with pytest.raises(InvalidCall):
                    client.run("1", deadline_s=-1)
                with pytest.raises(InternalError, match="cannot read"):
                    client.result(client.submit("1"))
                return list(threads.map(one, range(16)))

        assert await asyncio.to_thread(work) == [str(n) for n in range(16)]


@given(texts=st.lists(st.binary().map(lambda b: b.replace(b"\n", b""))), cuts=st.lists(st.integers(1, 9)))
async def test_lines_come_out_whole_however_they_were_cut(texts: list[bytes], cuts: list[int]) -> None:
    """The splitter gives the same lines for every way to cut an answer into chunks."""

    async def chunks() -> AsyncIterator[bytes]:
        whole = b"".join(text + b"\n" for text in texts)
        for cut in cuts:
            yield whole[:cut]
            whole = whole[cut:]
        yield whole

    assert [line async for line in lines_of(httpx.Response(200, content=chunks()), 10_000)] == texts


async def test_the_key_is_shown_with_every_request() -> None:
    """Calls, their retries and jobs carry it; a client without one sends no such header."""

    async def refuse_first(request: Request) -> None:
        if len(gateway.requests) == 1:
            await request.refuse(503, "Unavailable")
        else:
            await answer_all(request)

    async with FakeGateway(refuse_first) as gateway:
        async with SandboxClient(gateway.url, api_key="rsk_secret") as client:
            await client.run("1")
            await client.submit("1")
            assert "rsk_secret" not in repr(client._wire)
        async with SandboxClient(gateway.url) as client:
            await client.run("1")
    *with_key, without = [*gateway.jobs, *gateway.requests]
    assert [request.headers["authorization"] for request in with_key] == ["Bearer rsk_secret"] * 3
    assert "authorization" not in without.headers


@pytest.mark.parametrize(("status", "cls"), [(401, Unauthorized), (403, Forbidden)])
@pytest.mark.parametrize("words", ["of a gateway", "of a proxy"])
async def test_a_key_that_does_not_open_is_said_at_once(
    status: int, cls: type[SandboxError], words: str
) -> None:
    """Asking again with the same key cannot help, so it is asked once."""

    async def answer(request: Request) -> None:
        if words == "of a gateway":
            await request.refuse(status, cls.__name__)
        else:
            await request.whole(status, b"<html>")

    async with FakeGateway(answer) as gateway, SandboxClient(gateway.url, api_key="rsk_x") as client:
        with pytest.raises(cls):
            await client.run("1")
    assert len(gateway.requests) == 1


@pytest.mark.parametrize("key", ["", "rsk_a b", "rsk_a\n", "rsk_é"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    """And not quoted."""
    with pytest.raises(ConfigError) as caught:
        SandboxClient(api_key=key)
    assert "rsk_" not in caught.value.message


def test_a_url_with_a_user_leaves_no_place_for_a_key() -> None:
    """Both go into one header, and one would be lost without a word."""
    with pytest.raises(ConfigError, match="leave one of them out"):
        SandboxClient("http://user:word@127.0.0.1:8000", api_key="rsk_a")
