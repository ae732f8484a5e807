"""Files of calls, one JSON object a line, and their way through a client: what `sandbox map` does."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pydantic_core import from_json

from sandbox.calls import ToolCall, parse_call
from sandbox.client import SandboxClient
from sandbox.errors import ConfigError, InvalidCall, SandboxError
from sandbox.wire import Answer

#: Calls that are read and whose answers are not written yet. A slow one holds up the writing of those behind
#: it, and never for longer than its limits, so the window is as wide as memory for results easily allows.
_WINDOW = 2048


def read_calls(path: Path, *, lenient: bool) -> Iterator[ToolCall]:
    """The calls of a file, blank lines left out. `lenient` ignores fields that are none of a call.

    Raises InvalidCall with the number of the line that is wrong, ConfigError for a file that cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _read_call(line, f"{path}:{number}", lenient=lenient)
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror}") from exc


def _read_call(line: bytes, where: str, *, lenient: bool) -> ToolCall:
    try:
        if lenient and isinstance(fields := from_json(line), dict):
            return parse_call({name: fields[name] for name in ToolCall.model_fields if name in fields})
        return parse_call(line)
    except ValueError as exc:
        raise InvalidCall(f"{where}: {exc}") from exc
    except InvalidCall as exc:
        raise InvalidCall(f"{where}: {exc.message}") from exc


def to_line(call: ToolCall, answer: Answer) -> bytes:
    """A result, or the call's id with the error that kept it from having one."""
    if isinstance(answer, SandboxError):
        return json.dumps({"id": call.id, **answer.to_wire()}).encode() + b"\n"
    return answer.model_dump_json().encode() + b"\n"


@contextmanager
def writing(path: Path | None) -> Iterator[IO[bytes]]:
    """Our stdout, or a file that takes the place of `path` when the block has ended well.

    Until then, and when the block does not end well, what was written is in `part_of(path)`. Raises ConfigError
    where the system refuses to write.
    """
    part = part_of(path) if path else None
    try:
        # Stdout too is opened anew: what its own buffer cannot get rid of is tried again when Python ends.
        with open(part or sys.stdout.fileno(), "wb", closefd=part is not None) as file:
            yield file
        if path and part and part != path.resolve():
            part.replace(path.resolve())  # a link stays, and leads to the new file
    except OSError as exc:
        raise ConfigError(f"cannot write {path or 'to stdout'}: {exc.strerror or exc}") from exc


def part_of(path: Path) -> Path:
    """Where the lines for `path` are until all of them are there: beside it, but at once in a device or pipe."""
    path = path.resolve()
    return path.with_name(f"{path.name}.part") if path.is_file() or not path.exists() else path


async def run_in_order(
    url: str,
    calls: Iterable[ToolCall],
    on_answer: Callable[[ToolCall, Answer], None],
    on_done: Callable[[], None],
    *,
    api_key: str | None = None,
) -> None:
    """Run calls and hand on their answers in the order of the calls; `on_done` is told of each at once.

    Holds a bounded number of calls and answers at a time. Raises Unavailable if there is no gateway, and
    Unauthorized if it wants another key.
    """
    window: deque[tuple[ToolCall, asyncio.Task[list[Answer]]]] = deque()

    async def hand_on() -> None:
        call, task = window[0]
        [answer] = await task
        window.popleft()
        on_answer(call, answer)

    def note(task: asyncio.Task[list[Answer]]) -> None:
        if not task.cancelled():
            on_done()

    async with SandboxClient(url, api_key=api_key) as client:
        await client.status()
        try:
            for call in calls:
                if len(window) == _WINDOW:
                    await hand_on()
                task = asyncio.create_task(client.run_many([call]))
                task.add_done_callback(note)
                window.append((call, task))
            while window:
                await hand_on()
        finally:
            for _, task in window:
                task.cancel()
            await asyncio.gather(*(task for _, task in window), return_exceptions=True)
