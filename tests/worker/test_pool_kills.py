"""A worker whose jails are killed under it again and again: calls are run once more or are faults, and it serves on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from loadtest.held import descendants
from sandbox.calls import Limits, ToolCall, ToolResult
from sandbox.errors import JailError
from sandbox.jail import PRELOADS, Jail, Slot
from sandbox.settings import JailSettings
from tests.sandbox.jail.box import open_fds, until
from worker import pool as pool_module
from worker.pool import JailPool

SLOTS = 4
KILLS = 12


class Watch:
    """Counts how often each call is started in a jail, and tells the killer that one was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.starts: Counter[str] = Counter()
        self.started = asyncio.Semaphore(0)
        run = Jail.run

        async def counted(jail: Jail, call: ToolCall, slot: Slot) -> ToolResult:
            self.starts[call.id] += 1
            self.started.release()
            return await run(jail, call, slot)

        monkeypatch.setattr(Jail, "run", counted)


def victims(others: set[int]) -> list[int]:
    """Every nsjail, forkserver and init of the pool, also those that are just starting. Nothing is expected of programs."""
    found = []
    for pid in set(descendants(os.getpid())) - others:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            inside = next(line for line in status if line.startswith("NSpid:")).split()[1:]
            if inside[-1] == "1" or "Name:\tnsjail" in status:
                found.append(pid)
    return found


async def kill_again_and_again(watch: Watch, others: set[int], chance: random.Random) -> None:
    """Each time that a few more calls were started, some turns of the loop later, kill one of them."""
    for _ in range(KILLS):
        for _ in range(chance.randint(1, 2 * SLOTS)):
            await watch.started.acquire()
        for _ in range(int(2 ** chance.uniform(0, 10))):
            await asyncio.sleep(0)
        await until(lambda: bool(victims(others)))
        with contextlib.suppress(ProcessLookupError):
            os.kill(chance.choice(sorted(victims(others))), signal.SIGKILL)


async def test_killed_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is answered rightly, after two attempts at most, or is a fault after two; nothing of it all is left."""
    monkeypatch.setattr(pool_module, "PRELOADS", PRELOADS[:1])
    watch = Watch(monkeypatch)
    others = set(descendants(os.getpid()))  # jails that other tests share
    pool = await JailPool.open(JailSettings(), SLOTS)
    before = open_fds(), len(set(descendants(os.getpid())) - others)
    try:
        killer = asyncio.create_task(kill_again_and_again(watch, others, random.Random(4)))

        async def call_until_it_ends(caller: int) -> None:
            code = f"import time\ntime.sleep(0.02)\nprint({caller})"
            while not killer.done():
                call = ToolCall(code=code, limits=Limits(wall_s=10))
                try:
                    result = await pool.run(call)
                except JailError:
                    assert watch.starts[call.id] == 2
                else:
                    assert (result.status, result.stdout) == ("ok", f"{caller}\n")
                    assert watch.starts[call.id] in {1, 2}

        async with asyncio.TaskGroup() as callers:
            for caller in range(SLOTS):
                callers.create_task(call_until_it_ends(caller))
        await killer
        assert 2 in watch.starts.values()
        await pool.renew()
        assert (open_fds(), len(set(descendants(os.getpid())) - others)) == before
        assert len(pool._slots.free) == SLOTS
        assert all(slot.group.is_empty() for slot in pool._slots.free)
        again = await asyncio.gather(*(pool.run(ToolCall(code="print(1)")) for _ in range(SLOTS)))
        assert [result.stdout for result in again] == ["1\n"] * SLOTS
    finally:
        await pool.close()
