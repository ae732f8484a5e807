"""The reply router alone, and the framing of its bytes."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.metrics import Metrics
from gateway.replies import BACK_OFF_S, Answer, Reply, ReplyRouter, read_reply
from gateway.routes import _item, _line
from sandbox.calls import CallStatus, Limits, ToolCall, ToolResult
from sandbox.errors import InvalidCall, Unavailable

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

    async def replies(self, gateway: str, block_s: float = 1.0) -> list[tuple[str, bytes]]:
        self.reads += 1
        incoming = await self.incoming.get()
        if isinstance(incoming, Unavailable):
            raise incoming
        return incoming


def make_router(inbox: Inbox | None = None, margin_s: float = 60.0) -> tuple[ReplyRouter, Metrics]:
    metrics = Metrics()
    return ReplyRouter(inbox or Inbox(), "gateway", margin_s, metrics), metrics


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
    assert read_reply(result.id, raw) == Reply(result.status, raw)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(RESULTS)
def test_other_json_of_the_same_result_is_read_too(result: ToolResult) -> None:
    """A worker that writes its fields in another order or with spaces is understood, and the bytes are ours."""
    fields = json.loads(result.model_dump_json())
    raw = json.dumps(dict(reversed(fields.items()))).encode()
    assert read_reply(result.id, raw) == Reply(result.status, result.model_dump_json().encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"garbage",
        b'{"id":"a","status":"wonderful"}',
        b'{"id":"b","status":"ok"}',
        b'{"id":"a","status":"',
    ],
)
def test_what_is_no_result_becomes_a_fault(raw: bytes) -> None:
    """A reply that cannot be read, or is another call's, is answered internal_error and never passed on."""
    answer = read_reply("a", raw)
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
        _item(item) if isinstance(item, InvalidCall) else item.model_dump_json().encode() for item in items
    ]
    stream = b"".join(_line(index, raw) for index, raw in enumerate(raws))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    chunks = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    lines = b"".join(chunks).split(b"\n")
    assert lines.pop() == b""
    read = [json.loads(line) for line in lines]
    assert [line.pop("index") for line in read] == list(range(len(items)))
    assert read == [json.loads(raw) for raw in raws]


async def test_each_reply_finds_its_future() -> None:
    """Replies of one read go to the futures of their ids, in whatever order they come."""
    inbox = Inbox()
    router, metrics = make_router(inbox)
    futures = {name: router.expect(ToolCall(id=name, code=""))[0] for name in "abc"}
    stop = asyncio.Event()
    run = asyncio.create_task(router.run(stop))
    inbox.incoming.put_nowait([(name, reply(name)) for name in "cab"])
    for name, future in futures.items():
        assert await future == Reply(CallStatus.OK, reply(name))
    stop.set()
    inbox.incoming.put_nowait([])
    await run
    assert len(router) == 0
    assert value(metrics, "sandbox_gateway_call_seconds_count") == 3


async def test_a_second_reply_is_dropped_and_counted() -> None:
    """A call that ran twice is answered by the first result; the other one is counted and nothing else."""
    router, metrics = make_router()
    future, _ = router.expect(ToolCall(id="a", code=""))
    router.answer("a", Reply(CallStatus.OK, b"first"))
    router.answer("a", Reply(CallStatus.OK, b"second"))
    assert await future == Reply(CallStatus.OK, b"first")
    assert value(metrics, "sandbox_gateway_replies_dropped_total") == 1


async def test_a_lost_reply_becomes_a_fault() -> None:
    """A call whose reply never comes is answered after its deadline, its wall limit and the margin."""
    router, metrics = make_router(margin_s=0.01)
    call = ToolCall(id="a", code="", deadline_s=0.02, limits=Limits(wall_s=0.03))
    loop = asyncio.get_running_loop()
    begun = loop.time()
    answer = await router.expect(call)[0]
    assert loop.time() - begun >= 0.059
    assert isinstance(answer, Reply)
    result = ToolResult.model_validate_json(answer.raw)
    assert (result.id, result.status, result.reason) == (
        "a",
        CallStatus.INTERNAL_ERROR,
        "no reply came within 0.06 s",
    )
    assert value(metrics, "sandbox_gateway_replies_lost_total") == 1
    router.answer("a", Reply(CallStatus.OK, b"too late"))
    assert value(metrics, "sandbox_gateway_replies_dropped_total") == 1


async def test_an_answered_call_is_not_given_up_later() -> None:
    """The end of a call's patience does nothing when its answer was there before."""
    router, metrics = make_router(margin_s=0.0)
    limits = Limits(wall_s=0.01)
    router.expect(ToolCall(id="a", code="", deadline_s=0.01, limits=limits))
    later, _ = router.expect(ToolCall(id="b", code="", deadline_s=0.02, limits=limits))
    router.answer("a", Reply(CallStatus.OK, b""))
    await later
    assert value(metrics, "sandbox_gateway_replies_lost_total") == 1
    assert value(metrics, "sandbox_gateway_replies_dropped_total") == 0


async def test_the_reader_outlives_redis() -> None:
    """While Redis is away the reader tries again and again, and replies arrive once it is back."""
    inbox = Inbox()
    router, _ = make_router(inbox)
    future, _ = router.expect(ToolCall(id="a", code=""))
    stop = asyncio.Event()
    run = asyncio.create_task(router.run(stop))
    for _ in range(2):
        inbox.incoming.put_nowait(Unavailable("gone"))
    inbox.incoming.put_nowait([("a", reply("a"))])
    begun = asyncio.get_running_loop().time()
    assert isinstance(await future, Reply)
    assert asyncio.get_running_loop().time() - begun >= 2 * BACK_OFF_S - 0.01
    stop.set()
    inbox.incoming.put_nowait([])
    await run


async def test_the_reader_never_cancels_a_read() -> None:
    """Told to stop, the reader ends after the read at hand and delivers what that brought."""
    inbox = Inbox()
    router, _ = make_router(inbox)
    future, _ = router.expect(ToolCall(id="a", code=""))
    stop = asyncio.Event()
    run = asyncio.create_task(router.run(stop))
    await until(lambda: inbox.reads)
    stop.set()
    inbox.incoming.put_nowait([("a", reply("a"))])
    await run
    assert isinstance(future.result(), Reply)
    assert inbox.reads == 1


async def test_abandon_answers_everybody() -> None:
    """At the end nobody is left waiting."""
    router, _ = make_router()
    futures: list[asyncio.Future[Answer]] = [router.expect(ToolCall(id=name, code=""))[0] for name in "ab"]
    assert router.abandon("the end") == 2
    for future in futures:
        answer = await future
        assert isinstance(answer, Unavailable)
        assert answer.message == "the end"


async def test_an_id_in_flight_means_one_call() -> None:
    """The same call shares the future, a different one under its id is refused, and the id is free afterwards."""
    router, _ = make_router()
    call = ToolCall(id="a", code="1")
    future, is_new = router.expect(call)
    assert is_new
    assert router.expect(ToolCall(id="a", code="1")) == (future, False)
    with pytest.raises(InvalidCall, match="different call"):
        router.expect(ToolCall(id="a", code="2"))
    router.answer("a", Reply(CallStatus.OK, b""))
    assert router.expect(ToolCall(id="a", code="2"))[1]
