"""From the bytes of a request to calls.

Everything is bounded before it is read, and no caller is awaited for longer than `BODY_WITHIN_S`.
"""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from starlette.types import Receive, Scope

from gateway.admission import Permit
from sandbox.calls import Limits, ToolCall, parse_call
from sandbox.errors import CallTooLarge, InvalidCall
from sandbox.settings import CeilingSettings, GatewaySettings

#: A caller that stalls in the middle of a body holds a permit; 16 MiB in this time is a very slow line.
BODY_WITHIN_S = 30.0


class CallerGone(Exception):  # no error: there is nobody to have it
    """The connection broke before the request was whole; there is nobody to answer."""


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

    def one(self, body: bytes) -> ToolCall:
        """The call in the body of `/v1/run`. Raises InvalidCall."""
        return self._bounded(parse_call(body))

    def many(self, body: bytes) -> list[ToolCall | InvalidCall]:
        """The items of a `/v1/batch`, each a call or what is wrong with it.

        Raises InvalidCall when the envelope itself is wrong, and CallTooLarge for too many items.
        """
        try:
            calls = self.BatchRequest.model_validate_json(body).calls  # type: ignore[attr-defined]
        except ValidationError:
            return [self._item(item) for item in self._items(body)]
        return [self._item(call) for call in calls]

    def _item(self, item: object) -> ToolCall | InvalidCall:
        try:
            if isinstance(item, ToolCall):
                return self._bounded(item)
            return self._bounded(parse_call(json.dumps(item)))  # the rules of a text are stricter
        except InvalidCall as exc:
            return exc

    def _items(self, body: bytes) -> list[Any]:
        """The items of an envelope of which at least one part is wrong."""
        try:
            envelope = json.loads(body.decode())
        except (ValueError, RecursionError) as exc:
            raise InvalidCall(f"body: Invalid JSON: {exc}") from exc
        if not isinstance(envelope, dict):
            raise InvalidCall("body: Input should be an object")
        if "calls" not in envelope:
            raise InvalidCall("calls: Field required")
        if unknown := next((name for name in envelope if name != "calls"), None):
            raise InvalidCall(f"{unknown[:100]!r}: only 'calls' is permitted beside the calls")
        items = envelope["calls"]
        if not isinstance(items, list):
            raise InvalidCall("calls: Input should be an array")
        if len(items) > self.max_batch:
            raise CallTooLarge(f"calls: {len(items)} in one batch, and {self.max_batch} is the most")
        return items

    def _bounded(self, call: ToolCall) -> ToolCall:
        """The call with our defaults. Raises InvalidCall for what it names above a ceiling."""
        named = call.limits.model_fields_set
        for name in named:
            self._check(f"limits.{name}", getattr(call.limits, name), getattr(self.ceilings, name))
        if "deadline_s" in call.model_fields_set:
            self._check("deadline_s", call.deadline_s, self.ceilings.deadline_s)
        if call.network != "none" and self.ceilings.network == "none":
            raise InvalidCall(
                f"network: this service allows no {call.network}; "
                f"whoever runs it can, by SANDBOX_CEILINGS__NETWORK={call.network}"
            )
        if self._replace_defaults:
            limits = self.defaults.model_copy(update={name: getattr(call.limits, name) for name in named})
            call = call.model_copy(update={"limits": limits})
        if call.deadline_s > self.ceilings.deadline_s:
            call = call.model_copy(update={"deadline_s": self.ceilings.deadline_s})
        return call

    @staticmethod
    def _check(field: str, value: float, ceiling: float) -> None:
        if value > ceiling:
            raise InvalidCall(f"{field}: {value:g} is above this service's ceiling of {ceiling:g}")


def _batch_request(max_batch: int) -> type[BaseModel]:
    """The model of a batch. It stops at the first wrong item, which is then looked for one by one."""
    calls = Annotated[list[ToolCall], Field(max_length=max_batch, fail_fast=True)]
    return create_model("BatchRequest", __config__=ConfigDict(extra="forbid"), calls=(calls, ...))
