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
from gateway.reader import CallerGone, CallReader, read_body
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
