"""The routes for dead letters: calls that no worker survived, for a person to look at.

A call is given to a third worker by nobody: it is answered as a fault, and kept, so that whoever runs the service can
see what it was, try it again once the cause is mended, or drop it.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any
from uuid import uuid4

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, Field

from gateway.gateway import Gateway
from gateway.openapi import ErrorAnswer
from gateway.tenants import Tenant
from sandbox.calls import ToolResult
from sandbox.errors import NotFound, SandboxError
from sandbox.queue import DeadLetter

#: Redis counts up to 2 ** 64, which has twenty digits; ours have thirteen, and one.
Entry = Annotated[str, Path(pattern=r"^[0-9]{1,19}-[0-9]{1,19}$")]

_NONE: dict[int | str, dict[str, Any]] = {
    404: {"model": ErrorAnswer, "description": "There is no such letter."},
    422: {"model": ErrorAnswer, "description": "That can be no letter's entry."},
    503: {"model": ErrorAnswer, "description": "No Redis."},
}
_SENT = _NONE | {
    200: {"model": ToolResult, "description": "What came of it."},
    409: {"model": ErrorAnswer, "description": "Somebody has asked for its end."},
    429: {"model": ErrorAnswer, "description": "Full."},
}

#: As many as are kept.
MOST = 1000


class DeadLetterLine(BaseModel):
    """A dead letter in a list."""

    entry: str = Field(description="Names it in the other routes.")
    id: str = Field(description="Of the call.")
    tenant: str
    reason: str
    times_delivered: int
    died_ms: int = Field(description="Unix time in milliseconds.")


class DeadLetters(BaseModel):
    """The last ones, the newest first."""

    letters: list[DeadLetterLine]


def make_dead_letters(gateway: Gateway) -> APIRouter:
    """All of them below `/v1/dead`."""
    router = APIRouter(prefix="/v1/dead")

    async def find(entry: str) -> DeadLetter:
        letter = await gateway.queue.dead_letter(entry)
        if letter is None:
            raise NotFound(f"there is no dead letter {entry}")
        return letter

    @router.get("", responses={422: _NONE[422], 503: _NONE[503]})
    async def dead_letters(count: int = Query(default=100, ge=1, le=MOST)) -> DeadLetters:
        """Calls that no worker survived."""
        found = await gateway.queue.dead_letters(count)
        lines = [
            DeadLetterLine(entry=entry, id=letter.call.id, **letter.model_dump(exclude={"call"}))
            for entry, letter in found
        ]
        return DeadLetters(letters=lines)

    @router.get("/{entry}", responses=_NONE)
    async def dead_letter(entry: Entry) -> DeadLetter:
        """One of them, with its program."""
        return await find(entry)

    @router.post("/{entry}/send", responses=_SENT)
    async def send(entry: Entry) -> Response:
        """Run it again under a new id, and wait for its result. A verdict takes it off the list."""
        letter = await find(entry)
        tenant = Tenant(letter.tenant)
        with gateway.admission.enter(tenant):
            waiting = gateway.submit(letter.call.model_copy(update={"id": uuid4().hex}), tenant)
            try:
                await asyncio.wait({waiting.future})
            finally:
                gateway.leave(waiting)
        answer = waiting.future.result()
        if isinstance(answer, SandboxError):
            raise answer
        if not answer.status.is_fault:
            await gateway.queue.drop_dead_letter(entry)
        return Response(answer.raw, media_type="application/json")

    @router.post("/{entry}/drop", status_code=204, responses=_NONE)
    async def drop(entry: Entry) -> None:
        """Forget it."""
        if not await gateway.queue.drop_dead_letter(entry):
            raise NotFound(f"there is no dead letter {entry}")

    return router
