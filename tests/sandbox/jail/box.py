"""A real jail for tests that are plain functions: they say what runs, and read what came of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from sandbox.calls import Base64File, Limits, Network, ToolCall, ToolResult
from sandbox.jail import PRELOADS, Host, Jail, Slots, prepare
from sandbox.jail.host import process_lack
from sandbox.settings import JailSettings, Level

T = TypeVar("T")

#: Tests are content with less than a caller gets by default, so that a wall that is missing costs little.
WALL_S = 5.0


SPIN = "while True: pass"
SLEEP = "import time\ntime.sleep(60)"


def program(
    code: str,
    *,
    stdin: str = "",
    files: dict[str, str | Base64File] | None = None,
    echo: bool = False,
    keep_bytes: int | None = None,
    random_seed: int | None = None,
    fetch_files: Sequence[str] = (),
    **limits: Any,
) -> ToolCall:
    """A call; keywords that are not named here are limits."""
    return ToolCall(
        code=code,
        stdin=stdin,
        files=files or {},
        echo_last_value=echo,
        keep_bytes=keep_bytes,
        random_seed=random_seed,
        fetch_files=list(fetch_files),
        limits=Limits(**{"wall_s": WALL_S, **limits}),
    )


def settings_at(level: Level) -> JailSettings:
    """What a jail of this level needs; skips the test where the host does not give the level process."""
    settings = JailSettings(level=level)
    is_root = os.geteuid() == 0
    if level == "process" and (lack := process_lack(settings.runtime / "root", is_root=is_root)):
        pytest.skip(f"not at this level: {lack[0]}")
    return settings


class Box:
    """One jail and its slots, on an event loop of the kind that the worker uses."""

    def __init__(
        self,
        preload: str = "standard",
        *,
        slots: int = 8,
        settings: JailSettings | None = None,
        network: Network = "none",
        hash_seed: int | None = None,
        **host: Any,
    ) -> None:
        """Start the jail; keywords that are not named here replace fields of the Host."""
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.host: Host = dataclasses.replace(prepare(settings or JailSettings(), slots), **host)
        self.slots = Slots(self.host)
        self._preload = next(each for each in PRELOADS if each.name == preload)
        self._network, self._hash_seed = network, hash_seed
        self.jail = self.do(self._start())

    def _start(self) -> Coroutine[Any, Any, Jail]:
        return Jail.start(self.host, self._preload, self._network, self._hash_seed)

    def do(self, work: Awaitable[T]) -> T:
        """Let the loop run until this is done."""

        async def wait() -> T:
            return await work

        return self._runner.run(wait())

    def renew(self) -> None:
        """Another jail in place of this one, which broke or was broken by a test."""
        self.do(self.end())
        self.jail = self.do(self._start())

    async def end(self, *, retire: bool = False) -> None:
        """End the jail, once."""
        if not self.jail._gone.done():
            await (self.jail.retire() if retire else self.jail.close())

    def run(self, code: str, *, slot: int = 0, **call: Any) -> ToolResult:
        """Run one call."""
        return self.do(self.jail.run(program(code, **call), self.slots.free[slot]))

    def out(self, code: str, **call: Any) -> str:
        """Run one call that must end well, and return what it printed."""
        result = self.run(code, **call)
        assert result.status == "ok", result
        return result.stdout

    def run_together(self, calls: Iterable[ToolCall]) -> list[ToolResult]:
        """Run many calls at once, each in a slot of its own."""

        async def all_of_them() -> list[ToolResult]:
            return await asyncio.gather(
                *(self.jail.run(call, self.slots.free[number]) for number, call in enumerate(calls))
            )

        return self.do(all_of_them())

    def forkserver_pid(self) -> int:
        """The host's number of the forkserver."""
        return self.jail.forkserver_pid

    def close(self) -> None:
        """End the jail and remove the slots."""
        self.do(self.end())
        self.slots.close()
        self._runner.close()


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    return False


def open_fds() -> int:
    """How many descriptors this process has."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that only /proc shows, and that nothing announces."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)
