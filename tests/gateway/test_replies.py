"""The reply router alone, and the framing of its bytes."""

from __future__ import annotations

import asyncio
import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.lines import to_item, to_line
from gateway.metrics import Metrics
from gateway.replies import BACK_OFF_S, GATHER_S, LATE_S, Reply, ReplyRouter, Waiting, read_reply
from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.errors import Cancelled, InvalidCall, Unavailable
from sandbox.keys import Keys
from sandbox.queue import QueuedCall

from .conftest import until

IDS = st.from_regex(r"\A[A-Za-z0-9._:/-]{1,128}\Z")
RESULTS = st.builds(
    ToolResult,
    id=IDS,
    status=st.sampled_from(CallStatus),
    stdout=st.text(),
    stderr=st.text(alphabet='\n\r\u2028\u2029\x85"\\{}'),
    reason=st.none() | st.text(),
)


class Inbox:
    """Brings what the test has laid into it, or fails."""

    def __init__(self) -> None:
        self.incoming: asyncio.Queue[list[tuple[str, bytes]] | Unavailable] = asyncio.Queue()
        self.reads = 0
        self.between_s: list[float] = []
        self._brought_s = math.inf

    async def replies(self, gateway: str, block_s: float = 1.0) -> list[tuple[str, bytes]]:
        self.reads += 1
        self.between_s.append(time.monotonic() - self._brought_s)
        incoming = await self.incoming.get()
        self._brought_s = time.monotonic()
        if isinstance(incoming, Unavailable):
            raise incoming
        return incoming


class Bench:
    """A router and what it says is overdue."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.metrics = Metrics()
        self.overdue: list[str] = []
        self.over: list[str] = []
        self.router = ReplyRouter(
            self.inbox,  # type: ignore[arg-type]
            "gateway",
            self.metrics,
            lambda waiting: self.overdue.append(waiting.record),
            lambda queued: self.over.append(queued.record),
        )

    def expect(self, name: str, deadline_s: float = 60.0, *, is_put: bool = True) -> Waiting:
        call = ToolCall(id=name, code="", deadline_s=deadline_s)
        waiting = self.router.expect(QueuedCall(call, record(name), 0, 0))
        if is_put:
            self.router.was_put(waiting)
        return waiting

    def value(self, name: str) -> float:
        return value(self.metrics, name)


def record(name: str) -> str:
    return Keys("test").call("tenant", name)


def value(metrics: Metrics, name: str) -> float:
    found = metrics.registry.get_sample_value(name)
    assert found is not None
    return found


def reply(call_id: str, stdout: str = "") -> bytes:
    return ToolResult(id=call_id, status=CallStatus.OK, stdout=stdout).model_dump_json().encode()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(RESULTS)
def test_the_status_is_found_without_reading_the_rest(result: ToolResult) -> None:
    """The bytes of a worker's result pass unchanged, with the status that is in them."""
    raw = result.model_dump_json().encode()
    assert read_reply(record(result.id), raw) == Reply(result.status, raw)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(RESULTS)
def test_other_json_of_the_same_result_is_read_too(result: ToolResult) -> None:
    """A worker that writes its fields in another order or with spaces is understood, and the bytes are ours."""
    fields = json.loads(result.model_dump_json())
    raw = json.dumps(dict(reversed(fields.items()))).encode()
    assert read_reply(record(result.id), raw) == Reply(result.status, result.model_dump_json().encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"garbage",
        b'{"id":"a","status":"wonderful"}',
        b'{"id":"b","status":"ok"}',
        b'{"id":"a","status":"',
    ],
)
def test_what_is_no_result_becomes_a_fault(raw: bytes) -> None:
    """A reply that cannot be read, or is another call's, is answered internal_error and never passed on."""
    answer = read_reply(record("a"), raw)
    assert isinstance(answer, Reply)
    result = ToolResult.model_validate_json(answer.raw)
    assert answer.status is result.status is CallStatus.INTERNAL_ERROR
    assert result.reason == "the worker's reply could not be read"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(RESULTS | st.text().map(InvalidCall), min_size=1, max_size=20), st.data())
def test_lines_carry_items_through_any_chunking(
    items: list[ToolResult | InvalidCall], data: st.DataObject
) -> None:
    """Every item is exactly one line, and index and item are read back whole however the bytes are cut."""
    raws = [
        to_item(item) if isinstance(item, InvalidCall) else item.model_dump_json().encode() for item in items
    ]
    stream = b"".join(to_line(index, raw) for index, raw in enumerate(raws))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    lines = b"".join(chunks).split(b"\n")
    assert lines.pop() == b""
    read = [json.loads(line) for line in lines]
    assert [line.pop("index") for line in read] == list(range(len(items)))
    assert read == [json.loads(raw) for raw in raws]


def test_an_empty_reply_is_an_end_that_was_asked_for() -> None:
    """Whoever waits for a call that somebody has stopped gets Cancelled."""
    assert isinstance(read_reply(record("a"), b""), Cancelled)


async def test_each_reply_finds_its_future() -> None:
    """Replies of one read go to the futures of their records, in whatever order they come."""
    bench = Bench()
    futures = {name: bench.expect(name).future for name in "abc"}
    stop = asyncio.Event()
    run = asyncio.create_task(bench.router.run(stop))
    bench.inbox.incoming.put_nowait([(record(name), reply(name)) for name in "cab"])
    for name, future in futures.items():
        assert await future == Reply(CallStatus.OK, reply(name))
    stop.set()
    bench.inbox.incoming.put_nowait([])
    await run
    assert len(bench.router) == 0
    assert bench.value("sandbox_gateway_call_seconds_count") == 3


async def test_replies_that_follow_each_other_are_read_together() -> None:
    """After a read that brought something the next one leaves them time to gather."""
    bench = Bench()
    stop = asyncio.Event()
    run = asyncio.create_task(bench.router.run(stop))
    bench.inbox.incoming.put_nowait([(record("a"), reply("a"))])
    await until(lambda: bench.inbox.reads == 2)
    assert bench.inbox.between_s[1] > 0.9 * GATHER_S
    stop.set()
    bench.inbox.incoming.put_nowait([])
    await run


async def test_a_reply_that_overtakes_its_put_is_kept_until_then() -> None:
    """Before a call is put nobody knows whether a reply under its name is its own."""
    bench = Bench()
    waiting = bench.expect("a", is_put=False)
    stop = asyncio.Event()
    run = asyncio.create_task(bench.router.run(stop))
    bench.inbox.incoming.put_nowait([(record("a"), reply("a"))])
    await until(lambda: bench.inbox.reads == 2)
    assert not waiting.future.done()
    bench.router.was_put(waiting)
    assert await waiting.future == Reply(CallStatus.OK, reply("a"))
    stop.set()
    bench.inbox.incoming.put_nowait([])
    await run


async def test_a_second_reply_is_dropped_and_counted() -> None:
    """What nobody waits for is counted and nothing else."""
    bench = Bench()
    waiting = bench.expect("a")
    bench.router.answer(record("a"), Reply(CallStatus.OK, b"first"))
    bench.router.answer(record("a"), Reply(CallStatus.OK, b"second"))
    assert await waiting.future == Reply(CallStatus.OK, b"first")
    assert bench.value("sandbox_gateway_replies_dropped_total") == 1


async def test_a_call_is_overdue_soon_after_its_deadline() -> None:
    """The gateway is told once the deadline has passed, and then nobody waits for what may be put."""
    bench = Bench()
    begun = asyncio.get_running_loop().time()
    waiting = bench.expect("a", deadline_s=0.02)
    assert bench.router.is_wanted(record("a"))
    await until(lambda: bench.overdue)
    assert asyncio.get_running_loop().time() - begun >= 0.02 + LATE_S - 0.01
    assert not bench.router.is_wanted(record("a"))
    assert not waiting.future.done()
    bench.router.answer(record("a"), Reply(CallStatus.OK, b""))
    assert await waiting.future == Reply(CallStatus.OK, b"")


async def test_what_nobody_explains_becomes_a_fault() -> None:
    """A call of which nothing is known is answered before its deadline has passed by a second."""
    bench = Bench()
    begun = asyncio.get_running_loop().time()
    answer = await bench.expect("a", deadline_s=0.02).future
    assert asyncio.get_running_loop().time() - begun < 1.02
    assert isinstance(answer, Reply)
    result = ToolResult.model_validate_json(answer.raw)
    assert (result.id, result.status) == ("a", CallStatus.INTERNAL_ERROR)
    assert bench.value("sandbox_gateway_replies_lost_total") == 1
    bench.router.answer(record("a"), Reply(CallStatus.OK, b"too late"))
    assert bench.value("sandbox_gateway_replies_dropped_total") == 1


async def test_an_answered_call_is_never_overdue() -> None:
    """The end of a call's patience does nothing when its answer was there before, or its caller has gone."""
    bench = Bench()
    bench.expect("a", deadline_s=0.01)
    gone = bench.expect("b", deadline_s=0.01)
    later = bench.expect("c", deadline_s=0.02)
    bench.router.answer(record("a"), Reply(CallStatus.OK, b""))
    assert bench.router.leave(gone)
    await later.future
    assert bench.overdue == [record("c")]
    assert bench.value("sandbox_gateway_replies_lost_total") == 1


async def test_the_last_to_leave_is_told() -> None:
    """A call is to be cancelled when its last caller goes, and never when its answer is there."""
    bench = Bench()
    call = ToolCall(id="a", code="")
    waiting = bench.expect("a")
    assert bench.router.join(record("a"), call) is waiting
    assert not bench.router.leave(waiting)
    assert bench.router.leave(waiting)
    assert len(bench.router) == 0
    answered = bench.expect("a")
    bench.router.answer(record("a"), Reply(CallStatus.OK, b""))
    assert not bench.router.leave(answered)


async def test_the_reader_outlives_redis() -> None:
    """While Redis is away the reader tries again and again, and replies arrive once it is back."""
    bench = Bench()
    waiting = bench.expect("a")
    stop = asyncio.Event()
    run = asyncio.create_task(bench.router.run(stop))
    for _ in range(2):
        bench.inbox.incoming.put_nowait(Unavailable("gone"))
    bench.inbox.incoming.put_nowait([(record("a"), reply("a"))])
    begun = asyncio.get_running_loop().time()
    assert isinstance(await waiting.future, Reply)
    assert asyncio.get_running_loop().time() - begun >= 2 * BACK_OFF_S - 0.01
    stop.set()
    bench.inbox.incoming.put_nowait([])
    await run


async def test_the_reader_never_cancels_a_read() -> None:
    """Told to stop, the reader ends after the read at hand and delivers what that brought."""
    bench = Bench()
    waiting = bench.expect("a")
    stop = asyncio.Event()
    run = asyncio.create_task(bench.router.run(stop))
    await until(lambda: bench.inbox.reads)
    stop.set()
    bench.inbox.incoming.put_nowait([(record("a"), reply("a"))])
    await run
    assert isinstance(waiting.future.result(), Reply)
    assert bench.inbox.reads == 1


async def test_abandon_answers_everybody() -> None:
    """At the end nobody is left waiting."""
    bench = Bench()
    futures = [bench.expect(name).future for name in "ab"]
    assert bench.router.abandon("the end") == 2
    for future in futures:
        answer = await future
        assert isinstance(answer, Unavailable)
        assert answer.message == "the end"


async def test_an_id_in_flight_means_one_call() -> None:
    """The same call shares the future, a different one under its id is refused, and the id is free afterwards."""
    bench = Bench()
    waiting = bench.expect("a")
    again = ToolCall(id="a", code="", deadline_s=90, priority="judge")
    assert bench.router.join(record("a"), again) is waiting
    with pytest.raises(InvalidCall, match="different call"):
        bench.router.join(record("a"), ToolCall(id="a", code="2"))
    bench.router.answer(record("a"), Reply(CallStatus.OK, b""))
    assert bench.router.join(record("a"), again) is None


async def test_a_call_that_is_watched_may_be_put_here() -> None:
    """Who asks for a call that another gateway has put, and who then sends it here, wait for the same answer."""
    bench = Bench()
    watching = bench.router.watch(record("a"), "a")
    assert bench.router.join(record("a"), ToolCall(id="a", code="")) is None
    assert bench.expect("a") is watching
    assert not bench.router.leave(watching)
    bench.router.answer(record("a"), Reply(CallStatus.OK, b""))
    assert await watching.future == Reply(CallStatus.OK, b"")
