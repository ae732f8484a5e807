"""From bytes to calls, with whatever bytes there are."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import reader as reader_module
from gateway.reader import CallerGone, CallReader, has_more_parts, read_body, read_json, split_batch
from gateway.tenants import ANONYMOUS
from sandbox.calls import ToolCall
from sandbox.errors import CallTooLarge, InvalidCall
from sandbox.settings import CeilingSettings, GatewaySettings

from .conftest import make_admission

READER = CallReader(GatewaySettings(max_batch=4), CeilingSettings())
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=4),
)
CALLS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ["id", "code", "stdin", "files", "limits", "deadline_s", "priority", "more"], JSON
    ),
)
ENVELOPES = st.fixed_dictionaries({"calls": st.lists(CALLS | JSON, max_size=6)})


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary() | st.one_of(CALLS, ENVELOPES, JSON).map(as_bytes))
@example(b'{"calls":[{"code":"\\ud800"}]}')
def test_any_bytes_are_calls_or_the_caller_s_mistake(body: bytes) -> None:
    """No body makes the reader fail in another way, and what it reads can be written again for the queue."""
    with suppress(InvalidCall):
        READER.one(body).model_dump_json()
    with suppress(InvalidCall, CallTooLarge):
        for item in READER.many(body):
            assert isinstance(item, InvalidCall) or item.model_dump_json()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(CALLS, min_size=1, max_size=4))
def test_an_item_is_read_as_a_call_alone_is(calls: list[dict[str, Any]]) -> None:
    """A batch takes an item exactly when `/v1/run` takes it, whatever its neighbours are."""
    calls = [{"id": f"fixed-{index}", **call} for index, call in enumerate(calls)]
    for call, item in zip(calls, READER.many(as_bytes({"calls": calls})), strict=True):
        try:
            alone: ToolCall | InvalidCall = READER.one(as_bytes(call))
        except InvalidCall as exc:
            alone = exc
        assert type(alone) is type(item)
        assert alone == item or isinstance(alone, InvalidCall)


NEIGHBOUR = b'{"code":"good"}'
BAD_ITEMS = {
    "a number that no parser takes": b'{"code":"","deadline_s":%b}' % (b"9" * 5000),
    "a deep one": b"[" * 5000 + b"]" * 5000,
    "a deep one that is closed by other brackets": b"[" * 5000 + b"}" * 5000,
    "an object in its code": b'{"code":' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    "a million names": b"{%b}" % b",".join(b'"%d":1' % number for number in range(1_000_000)),
    "a hundred thousand files": b'{"code":"","files":{%b}}'
    % b",".join(b'"%d":1' % n for n in range(100_000)),
    "brackets": b'{"code":[%b1]}' % (b"[]," * 100_000),
    "no JSON": b"{code: 1}",
    "two of them without a comma": b"{} {}",
    "not UTF-8": b'{"code":"\xff"}',
    "a text": b'"],}{\\"]"',
    "nothing": b"",
}


@pytest.mark.parametrize("what", BAD_ITEMS)
def test_the_worst_item_fails_alone(what: str) -> None:
    """Whatever an item is, as long as one sees where it ends, its neighbours are read."""
    bad = BAD_ITEMS[what]
    first, second, third = READER.many(b'{"calls" : [%b,%b,%b ]}' % (NEIGHBOUR, bad, NEIGHBOUR))
    assert isinstance(first, ToolCall)
    assert isinstance(third, ToolCall)
    assert isinstance(second, InvalidCall)
    with pytest.raises(InvalidCall) as alone:
        READER.one(bad)
    assert alone.value.message == second.message


def test_a_body_of_names_is_refused_before_they_are_listed() -> None:
    """What no call can have is counted, which is quick, and not listed, which held up everybody for seconds."""
    names = b'{"code":"",%b}' % b",".join(b'"%d":1' % number for number in range(1_500_000))
    with pytest.raises(InvalidCall, match="more names, texts, brackets and commas than a call can have"):
        READER.one(names)
    [item] = READER.many(b'{"calls":[%b]}' % names)
    assert isinstance(item, InvalidCall)


@pytest.mark.parametrize("number", [b"1", b"-1.5", b"null", b"true"])
def test_what_is_no_text_counts_too(number: bytes) -> None:
    """A body of eight million numbers is told from one that a model may read, which took seconds and gigabytes."""
    assert has_more_parts(b'{"code":"","x":[%b1]}' % (number + b",") * 60_000, 50_000)
    assert not has_more_parts(b'{"code":"%b"}' % (b"1," * 60_000), 50_000), "in a text they are no parts"


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16", "utf-32-le"])
def test_no_other_encoding_is_read(encoding: str) -> None:
    """What was counted byte by byte is what is read: UTF-16 hides brackets behind the second byte of a letter."""
    hidden = json.dumps({"\u2261": [[]] * 100}, ensure_ascii=False).encode(encoding)
    assert not has_more_parts(hidden, 50)
    with pytest.raises(ValueError, match=r"codec can't decode|Expecting"):
        read_json(hidden)


def test_json_as_python_reads_it() -> None:
    """Halves of surrogate pairs and a mark of the byte order are read; a number of many digits is not, nor a depth."""
    assert read_json(b'\xef\xbb\xbf{"a": ["\\ud800", 12, 1.5, "\xed\xa0\x80"]}') == {
        "a": ["\ud800", 12, 1.5, "\ud800"]
    }
    for wrong in (b"9" * 401, b"[" * 100_000, b"", b"\xff"):
        with pytest.raises(ValueError, match=r"."):
            read_json(wrong)


def test_the_largest_call_is_read_alone_and_in_a_batch() -> None:
    """Every field, and as many files of base64 as there may be, in code that is full of quotes and brackets."""
    files = {str(number): {"base64": "YQ=="} for number in range(256)}
    limits = {"wall_s": 1, "cpu_s": 1, "memory_bytes": 1 << 25, "output_bytes": 1, "processes": 1}
    texts = {"id": "a", "code": '{["' * 10_000, "stdin": "[", "priority": "judge", "network": "none"}
    call = as_bytes({**texts, "files": files, "limits": limits, "deadline_s": 1, "echo_last_value": True})
    assert READER.many(b'{"calls":[%b]}' % call) == [READER.one(call)]
    many = CallReader(GatewaySettings(), CeilingSettings()).many(b'{"calls":[%b]}' % b",".join([call] * 100))
    assert many == [READER.one(call)] * 100


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(CALLS | JSON, max_size=4))
def test_items_are_found_in_any_batch(items: list[Any]) -> None:
    """The text of each item is what was put there, whatever strings and brackets are in it."""
    found = split_batch(json.dumps({"calls": items}, ensure_ascii=False).encode("utf-8", "surrogatepass"), 4)
    assert [json.loads(item) for item in found] == json.loads(json.dumps(items))


async def body_of(*chunks: bytes, bound: int = 10, headers: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    messages = [
        {"type": "http.request", "body": chunk, "more_body": index < len(chunks) - 1}
        for index, chunk in enumerate(chunks)
    ]

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    scope = {"type": "http", "headers": headers}
    with (await make_admission()).enter(ANONYMOUS) as permit:
        return await read_body(scope, receive, bound, permit)


async def test_a_body_at_the_bound_is_read() -> None:
    """Chunks are joined, and the bound itself is allowed."""
    assert await body_of(b"01234", b"", b"56789") == b"0123456789"


@pytest.mark.parametrize("chunks", [(b"x" * 11,), (b"x" * 5, b"x" * 6, b"x")])
async def test_a_body_over_the_bound_is_refused(chunks: tuple[bytes, ...]) -> None:
    """One byte more than the bound is too much, in one piece or in many."""
    with pytest.raises(CallTooLarge):
        await body_of(*chunks)


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    """A declared length over the bound is refused before the first byte."""
    with pytest.raises(CallTooLarge):
        await body_of(headers=((b"content-length", b"11"),))


async def test_a_caller_that_hangs_up_gets_no_answer() -> None:
    """A connection that breaks in the middle of a body ends the request."""
    with pytest.raises(CallerGone):
        await body_of()


async def test_a_body_that_stalls_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that never finishes its body does not keep its permit."""
    monkeypatch.setattr(reader_module, "BODY_WITHIN_S", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "headers": []}
    admission = await make_admission()
    with admission.enter(ANONYMOUS) as permit, pytest.raises(InvalidCall, match="not whole within"):
        await read_body(scope, receive, 10, permit)
