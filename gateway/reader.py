"""From the bytes of a request to calls.

Everything is bounded before it is read, and no caller is awaited for longer than `BODY_WITHIN_S`.
"""

from __future__ import annotations

import asyncio
import json
import re
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.types import Receive, Scope

from gateway.admission import Permit
from sandbox.calls import Limits, ToolCall, parse_call
from sandbox.errors import CallTooLarge, InvalidCall
from sandbox.settings import CeilingSettings, GatewaySettings

#: A caller that stalls in the middle of a body holds a permit; 16 MiB in this time is a very slow line.
BODY_WITHIN_S = 30.0

#: Of a whole number that Python's own reader of JSON reads.
MOST_DIGITS = 400

_ENVELOPE = """body: Input should be {"%s": [...]} and nothing else"""


class CallerGone(Exception):  # no error: there is nobody to have it
    """The connection broke before the request was whole, or a websocket's while it is answered."""


async def read_body(scope: Scope, receive: Receive, bound: int, permit: Permit) -> bytes:
    """The whole body. The permit is charged for what it says it has, or for what has come.

    Raises CallTooLarge as soon as it is over `bound`, Overloaded, InvalidCall, CallerGone.
    """

    def charge(size: int) -> None:
        if size > bound:
            raise CallTooLarge(f"the request is larger than {bound} bytes")
        permit.charge(size)

    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            charge(int(value))
    chunks = []
    size = 0
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise CallerGone
                chunk = message.get("body", b"")
                size += len(chunk)
                charge(size)
                chunks.append(chunk)
                if not message.get("more_body", False):
                    return b"".join(chunks)
    except TimeoutError as exc:
        raise InvalidCall(f"body: it was not whole within {BODY_WITHIN_S:g} s") from exc


class CallReader:
    """Reads calls and holds them against the ceilings of this service."""

    def __init__(self, gateway: GatewaySettings, ceilings: CeilingSettings) -> None:
        #: A batch that could never be admitted as a whole is too large from the start.
        self.max_batch = min(gateway.max_batch, gateway.max_in_flight)
        self.ceilings = ceilings
        self.defaults = ceilings.defaults()
        self.BatchRequest = _batch_request(self.max_batch)
        self._replace_defaults = self.defaults != Limits()

    def one(self, body: bytes, header_s: float | None = None) -> ToolCall:
        """The call in the body of `/v1/run`; `header_s` is the deadline of the request. Raises InvalidCall."""
        self._check_header(header_s)
        return self._one(body, header_s)

    def _one(self, body: bytes, header_s: float | None) -> ToolCall:
        if has_more_parts(body, _CALL_PARTS):
            raise InvalidCall("body: it has more names, texts, brackets and commas than a call can have")
        return self.bounded(parse_call(body), header_s)

    def many(self, body: bytes, header_s: float | None = None) -> list[ToolCall | InvalidCall]:
        """The items of a `/v1/batch`, each a call or what is wrong with it.

        Raises InvalidCall when the header or the envelope itself is wrong, and CallTooLarge for too many items.
        """
        self._check_header(header_s)
        calls = self._all_good(body)
        items = split_batch(body, self.max_batch) if calls is None else calls
        return [self._item(item, header_s) for item in items]

    def _all_good(self, body: bytes) -> list[ToolCall] | None:
        """The calls of a batch at one go, as long as nothing is wrong with any."""
        if has_more_parts(body, _BATCH_PARTS):
            return None
        try:
            calls: list[ToolCall] = self.BatchRequest.model_validate_json(body).calls  # type: ignore[attr-defined]
        except ValidationError:
            return None
        return calls

    def _item(self, item: ToolCall | bytes, header_s: float | None) -> ToolCall | InvalidCall:
        try:
            return self.bounded(item, header_s) if isinstance(item, ToolCall) else self._one(item, header_s)
        except InvalidCall as exc:
            return exc

    def bounded(self, call: ToolCall, header_s: float | None = None) -> ToolCall:
        """The call with our defaults. Raises InvalidCall for what it names above a ceiling."""
        named = call.limits.model_fields_set
        for name in named:
            self._check(f"limits.{name}", getattr(call.limits, name), getattr(self.ceilings, name))
        if "deadline_s" in call.model_fields_set:
            self._check("deadline_s", call.deadline_s, self.ceilings.deadline_s)
        elif header_s is not None:
            call = call.model_copy(update={"deadline_s": header_s})
        if call.network != "none" and self.ceilings.network == "none":
            raise InvalidCall(
                f"network: this service allows no {call.network}; "
                f"whoever runs it can, by SANDBOX_CEILINGS__NETWORK={call.network}"
            )
        if self._replace_defaults:
            limits = self.defaults.model_copy(update={name: getattr(call.limits, name) for name in named})
            call = call.model_copy(update={"limits": limits})
        longest_s = min(self.ceilings.deadline_s, header_s or self.ceilings.deadline_s)
        if call.deadline_s > longest_s:
            call = call.model_copy(update={"deadline_s": longest_s})
        return call

    def _check_header(self, header_s: float | None) -> None:
        if header_s is not None:
            self._check("x-deadline-ms", header_s * 1000, self.ceilings.deadline_s * 1000)

    @staticmethod
    def _check(field: str, value: float, ceiling: float) -> None:
        if value > ceiling:
            raise InvalidCall(f"{field}: {value:.15g} is above this service's ceiling of {ceiling:.15g}")


def _batch_request(max_batch: int) -> type[BaseModel]:
    """The model of a batch. It stops at the first wrong item, and then each is read alone."""
    calls = Annotated[list[ToolCall], Field(max_length=max_batch, fail_fast=True)]
    return create_model("BatchRequest", __config__=ConfigDict(extra="forbid"), calls=(calls, ...))


#: A string, or what is there of it: a pattern that failed would be tried again at each quote behind it.
_STRING = rb'"(?:[^"\\]++|\\.?)*+(?:"|\Z)'
_PARTS = re.compile(rb'[^[{,"]*+(?:[\[{,]|%b)' % _STRING, re.DOTALL)
_OPENING = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"(calls|items)"[ \t\r\n]*:[ \t\r\n]*\[')
_CLOSING = re.compile(rb"[ \t\r\n]*\][ \t\r\n]*\}[ \t\r\n]*")
#: To the next comma or bracket, and to the next bracket; both step over strings as a whole.
_TO_COMMA = re.compile(rb'(?:[^][{}",]++|%b)*+' % _STRING, re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^][{}"]++|%b)*+' % _STRING, re.DOTALL)

#: Names, texts, brackets and commas of a call: with 256 files of base64 it has 1,330.
_CALL_PARTS = 1500
#: Pydantic lists all that is wrong with an item, at 1 µs each; a body with more parts is read item by item at once.
_BATCH_PARTS = 50_000
#: A batch of 1024 such calls has that many, and they take a quarter of a second.
_BATCH_BRACKETS = 530_000


def has_more_parts(body: bytes, most: int) -> bool:
    """Whether a JSON text has more than `most` strings, brackets that open, and commas, which stand for its numbers.

    Their marks are counted first, which is quick, and enough unless its strings are full of them.
    """
    if body.count(b'"') // 2 + body.count(b"[") + body.count(b"{") + body.count(b",") <= most:
        return False
    return next(islice(_PARTS.finditer(body), most, None), None) is not None


def read_json(text: bytes) -> Any:
    """What a JSON text says, where Python's own reader is wanted. Raises ValueError.

    It has to be UTF-8: in UTF-16, which that reader takes too, nothing of it could have been counted before. Of a
    number, Python takes a time that grows with the square of its digits.
    """
    try:
        return json.loads(text.decode("utf-8-sig", "surrogatepass"), parse_int=_short_int)
    except RecursionError as exc:
        raise ValueError(str(exc)) from exc


def _short_int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number has more than {MOST_DIGITS} digits")
    return int(digits)


def split_batch(body: bytes, most: int, name: Literal["calls", "items"] = "calls") -> list[bytes]:
    """The text of each item of a batch, so that what is wrong with one is its own affair, however wrong it is.

    `name` is that of its list. It looks at strings, brackets and the commas between items, and leaves the rest to
    whoever reads the items. Raises InvalidCall when the envelope is wrong, and CallTooLarge for more than `most` items.
    """
    opening = _OPENING.match(body)
    if opening is None or opening[1] != name.encode():
        raise InvalidCall(_ENVELOPE % name)
    if _CLOSING.fullmatch(body, opening.end()):
        return []
    items: list[bytes] = []
    start = at = opening.end()
    depth = 0
    for _ in range(_BATCH_BRACKETS):
        skipped = (_TO_BRACKET if depth else _TO_COMMA).match(body, at)
        assert skipped is not None, "both match nothing, too"
        at = skipped.end()
        mark = body[at : at + 1]
        if depth == 0 and mark not in {b"[", b"{"}:
            items.append(body[start:at])
            if len(items) > most:
                raise CallTooLarge(f"{name}: more than {most} in one batch")
            if mark != b",":
                break
            start = at + 1
        elif mark in {b"[", b"{"}:
            depth += 1
        elif mark in {b"]", b"}"}:
            depth -= 1
        else:
            raise InvalidCall("body: it ends inside of an item")
        at += 1
    else:
        raise InvalidCall("body: it has more brackets than a batch can have")
    if not _CLOSING.fullmatch(body, at):
        raise InvalidCall(_ENVELOPE % name)
    return items
