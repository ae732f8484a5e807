"""The answer to a batch as lines, one an item, each sent when it is done, or a moment later with others.

A chunk for each line costs 10 µs of CPU here and again at the caller, half of what the rest of a call costs. So after
a chunk has gone, what comes next waits for more: for `GATHER_S` after that chunk, or until `GATHER_BYTES` are there, or
the last line of the request. What comes after a longer silence goes at once, and so do the first and the word that all
calls which were handed over are known (`routes.py`). No line waits for longer than `GATHER_S`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial

from starlette.types import Send

from gateway.reader import CallerGone
from gateway.replies import Answer, Reply, Waiting
from sandbox.errors import SandboxError

NDJSON = b"application/x-ndjson"
#: Small beside the time of a call (0.3 s), and long enough for dozens of lines under load.
GATHER_S = 0.005
#: Beyond it a chunk's own cost is lost in that of its bytes.
GATHER_BYTES = 32 * 1024

_KNOWN = b'{"known":true}\n'
_HEADERS = [(b"content-type", NDJSON), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]


async def send_lines(
    send: Send,
    answers: Sequence[Waiting | SandboxError],
    gone: asyncio.Task[None],
    known: asyncio.Future[None] | None = None,
    gather_s: float = GATHER_S,
) -> None:
    """Answer a request with a line for each of these, and one when `known` is done unless all others have gone by then.

    Raises CallerGone once `gone` has ended.
    """
    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
    lines = _Lines(len(answers), gather_s)
    gone.add_done_callback(lines.give_up)
    if known is not None:
        known.add_done_callback(lines.add_known)
    for index, answer in enumerate(answers):
        if isinstance(answer, Waiting):
            answer.future.add_done_callback(partial(lines.add_done, index))
        else:
            lines.add(index, answer)
    try:
        while lines.left:
            body = await lines.gathered()
            await send({"type": "http.response.body", "body": body, "more_body": lines.left > 0})
    finally:
        lines.stop()
    if not answers:
        await send({"type": "http.response.body", "body": b""})


class _Lines:
    """Lines that are there and have not been taken."""

    def __init__(self, count: int, gather_s: float) -> None:
        self.left = count  # items that have not been taken
        self._gather_s = gather_s
        self._ready: list[bytes] = []
        self._items = 0  # among those
        self._size = 0
        self._enough = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None  # while it is not long ago that some were taken
        self._is_in_vain = False

    def add_done(self, index: int, future: asyncio.Future[Answer]) -> None:
        """One more is there. Whoever left a call before that is not held by its future."""
        self.add(index, future.result())

    def add(self, index: int, answer: Answer) -> None:
        """One more is there."""
        line = to_line(index, to_item(answer))
        self._ready.append(line)
        self._items += 1
        self._size += len(line)
        if self._gathering is None or self._items == self.left or self._size >= GATHER_BYTES:
            self._enough.set()

    def add_known(self, _: object) -> None:
        """The caller wants to cut other requests as soon as it reads this."""
        self._ready.append(_KNOWN)
        self._enough.set()

    def give_up(self, _: object) -> None:
        """There is nobody to take any."""
        self._is_in_vain = True
        self._enough.set()

    async def gathered(self) -> bytes:
        """Those that shall go now."""
        await self._enough.wait()
        if self._is_in_vain:
            raise CallerGone
        self._enough.clear()
        self.left -= self._items
        body = b"".join(self._ready)
        self._ready.clear()
        self._items = self._size = 0
        self.stop()
        self._gathering = asyncio.get_running_loop().call_later(self._gather_s, self._end_of_gathering)
        return body

    def stop(self) -> None:
        """Stop the clock."""
        if self._gathering is not None:
            self._gathering.cancel()

    def _end_of_gathering(self) -> None:
        self._gathering = None
        if self._ready:
            self._enough.set()


def to_item(answer: Answer) -> bytes:
    """An answer as the JSON object of one item."""
    if isinstance(answer, Reply):
        return answer.raw
    return json.dumps(answer.to_wire(), separators=(",", ":")).encode()


def to_line(index: int, item: bytes) -> bytes:
    """An item as a line, with its index as the first field; every item starts with a brace and a field."""
    return b'{"index":%d,%b\n' % (index, item[1:])
