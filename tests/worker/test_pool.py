"""The jails of a worker, for real: which one runs a call, and what happens when one goes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from loadtest.held import descendants
from sandbox.calls import Limits, ToolCall, ToolResult
from sandbox.errors import JailError
from sandbox.jail import PRELOADS, Jail
from sandbox.jail import jail as jail_module
from sandbox.settings import JailSettings
from tests.sandbox.jail.box import SLEEP, alive, open_fds, until
from worker import pool as pool_module
from worker.pool import Family, JailPool

SLOTS = 3


def call(code: str, **limits: float) -> ToolCall:
    """A call whose limits are short."""
    return ToolCall(code=code, limits=Limits(**{"wall_s": 10.0, **limits}))  # type: ignore[arg-type]


@pytest.fixture
async def pool() -> AsyncIterator[JailPool]:
    """A pool whose lightest jail serves; the others may still warm up."""
    opened = await JailPool.open(JailSettings(), SLOTS)
    yield opened
    await opened.close()


@pytest.fixture
async def light_pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JailPool]:
    """A pool that has the lightest kind of jail only, so that a test knows which one it kills."""
    monkeypatch.setattr(pool_module, "PRELOADS", PRELOADS[:1])
    opened = await JailPool.open(JailSettings(), SLOTS)
    yield opened
    await opened.close()


def jail_of(pool: JailPool, kind: int = 0) -> Jail:
    """The jail of one kind that takes calls now."""
    jail = pool._jails[Family()][kind]
    assert jail is not None
    return jail


def kill(jail: Jail) -> None:
    """End a jail as a crash would."""
    os.kill(jail._pid, signal.SIGKILL)


def groups_of(pool: JailPool) -> list[Path]:
    """The folders of all slots' groups."""
    groups = pool._slots._groups
    fds = [fd for group in groups._groups for fd in group.enter_fds] if groups else []
    return [Path(f"/proc/self/fd/{fd}").readlink().parent for fd in fds]


async def running(pool: JailPool, programs: int) -> None:
    """Wait until so many programs run in the lightest jail, each under its init."""
    await until(lambda: len(descendants(jail_of(pool)._pid)) == 1 + 2 * programs)


async def test_each_call_finds_warm_what_it_imports(pool: JailPool) -> None:
    """Once all kinds are up, a call runs in the lightest jail that holds what it imports."""
    await until(lambda: None not in pool._jails[Family()])
    look = "import sys\nprint(*('numpy sympy scipy'.split()), *(n in sys.modules for n in ('numpy', 'sympy', 'scipy')))\nif 0: import "
    for modules, warm in {
        "json": "False False False",
        "numpy": "True False False",
        "sympy": "True True",
        "scipy.stats": "True True True",
    }.items():
        result = await pool.run(call(look + modules))
        assert result.stdout.startswith(f"numpy sympy scipy {warm}"), modules


async def test_serves_while_the_rest_warms_up(pool: JailPool) -> None:
    """A call that needs no library is answered before the heavy jails are up."""
    assert None in pool._jails[Family()]
    assert (await pool.run(call("print(1)"))).stdout == "1\n"
    assert None in pool._jails[Family()]


async def test_nobody_pays_for_an_import_that_will_be_warm(pool: JailPool) -> None:
    """A call that wants a jail which still warms up waits for it; the import is not its time."""
    assert None in pool._jails[Family()]
    result = await pool.run(call("import sympy\nprint(sympy.sqrt(8))", cpu_s=0.25))
    assert (result.status, result.stdout) == ("ok", "2*sqrt(2)\n")


async def test_where_no_such_jail_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose kinds of jail all fail to start runs in a lighter one, and imports for itself."""
    broken = tuple(dataclasses.replace(each, modules=("no_such_module",)) for each in PRELOADS[2:])
    monkeypatch.setattr(pool_module, "PRELOADS", PRELOADS[:1] + PRELOADS[:1] + broken)
    pool = await JailPool.open(JailSettings(), SLOTS)
    try:
        result = await pool.run(call("import mpmath, sys\nprint(mpmath.mpf(1) / 4)"))
        assert result.stdout == "0.25\n"
        assert pool._failing == {(Family(), 2), (Family(), 3)}
    finally:
        await pool.close()


async def test_as_many_at_once_as_slots(light_pool: JailPool) -> None:
    """Calls that run together have a slot each, and every slot comes back."""
    code = "import os, time\ntime.sleep(0.2)\nprint(os.getuid())"
    results = await asyncio.gather(*(light_pool.run(call(code)) for _ in range(SLOTS)))
    if os.geteuid() == 0:
        assert sorted(result.stdout for result in results) == [f"{n}\n" for n in range(1, SLOTS + 1)]
    assert len(light_pool._slots.free) == SLOTS


async def test_calls_survive_their_jail(light_pool: JailPool) -> None:
    """Calls whose jail is killed under them are run again in the next one; the caller sees an answer."""
    code = "import time\ntime.sleep(0.5)\nprint('done')"
    calls = [asyncio.create_task(light_pool.run(call(code))) for _ in range(SLOTS)]
    await running(light_pool, SLOTS)
    first = jail_of(light_pool)
    kill(first)
    results = await asyncio.gather(*calls)
    assert [(result.status, result.stdout) for result in results] == [("ok", "done\n")] * SLOTS
    assert jail_of(light_pool) is not first
    assert len(light_pool._slots.free) == SLOTS


async def test_a_call_is_not_tried_for_ever(light_pool: JailPool) -> None:
    """A call under which a second jail breaks is a fault, and the pool serves on."""
    task = asyncio.create_task(light_pool.run(call(SLEEP)))
    for _ in range(2):
        await running(light_pool, 1)
        first = jail_of(light_pool)
        kill(first)
        await until(lambda first=first: jail_of(light_pool) is not first or task.done())  # type: ignore[misc]
    with pytest.raises(JailError, match="broke while the call ran"):
        await task
    assert (await light_pool.run(call("print(1)"))).stdout == "1\n"


async def test_a_jail_is_replaced_while_nobody_calls(light_pool: JailPool) -> None:
    """The next call after a crash finds another jail, however long nobody called."""
    first = jail_of(light_pool)
    processes = [first._pid, *descendants(first._pid)]
    kill(first)
    await until(lambda: jail_of(light_pool) is not first)
    assert not any(alive(pid) for pid in processes)
    assert (await light_pool.run(call("print(1)"))).stdout == "1\n"


async def test_worn_jails_are_replaced_without_a_gap(
    light_pool: JailPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jail that has served its time is followed by another; no call fails or waits for it, and long ones finish."""
    monkeypatch.setattr(jail_module, "WORN_CALLS", 5)
    jails = set()
    long = asyncio.create_task(light_pool.run(call("import time\ntime.sleep(1.5)\nprint('long')")))
    while len(jails) < 3:
        results = await asyncio.gather(*(light_pool.run(call("print(1)")) for _ in range(SLOTS - 1)))
        assert [result.stdout for result in results] == ["1\n"] * (SLOTS - 1)
        jails.add(jail_of(light_pool)._pid)
    assert (await long).stdout == "long\n"
    await until(lambda: not light_pool._retiring)
    assert sum(alive(pid) for pid in jails) <= 1


async def test_renew_replaces_every_jail(pool: JailPool) -> None:
    """All jails are others afterwards, the old ones are gone, and a call that ran meanwhile has its answer."""
    first = jail_of(pool)
    await until(lambda: None not in pool._jails[Family()])
    before = len(descendants(os.getpid()))
    long = asyncio.create_task(pool.run(call("import time\ntime.sleep(0.5)\nprint('long')")))
    await running(pool, 1)
    for _ in range(2):
        old = [jail for jail in pool._jails[Family()] if jail is not None]
        processes = [pid for jail in old for pid in (jail._pid, *descendants(jail._pid))]
        await pool.renew()
        assert None not in pool._jails[Family()]
        assert not set(old) & set(pool._jails[Family()])
        assert not any(alive(pid) for pid in processes)
    assert first.is_broken
    assert (await long).stdout == "long\n"
    assert len(descendants(os.getpid())) == before


async def test_a_jail_that_will_not_start(light_pool: JailPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no jail starts, calls become faults after a while; when the host is well again, so are they."""
    monkeypatch.setattr(pool_module, "NO_JAIL_S", 0.2)
    monkeypatch.setattr(pool_module, "FIRST_WAIT_S", 0.05)
    well = light_pool.host
    light_pool.host = dataclasses.replace(well, nsjail=Path("/bin/false"))
    kill(jail_of(light_pool))
    await until(lambda: jail_of(light_pool).is_broken)
    with pytest.raises(JailError, match="no jail has started"):
        await light_pool.run(call("print(1)"))
    light_pool.host = well
    monkeypatch.setattr(pool_module, "NO_JAIL_S", 30)
    assert (await light_pool.run(call("print(1)"))).stdout == "1\n"


async def test_cancelled_calls_give_their_slots_back(light_pool: JailPool) -> None:
    """A cancelled call is killed before its slot serves again, and its jail serves on."""
    jail = jail_of(light_pool)
    calls = [asyncio.create_task(light_pool.run(call(SLEEP))) for _ in range(SLOTS)]
    await running(light_pool, SLOTS)
    for task in calls:
        task.cancel()
    assert all(
        isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*calls, return_exceptions=True)
    )
    assert all(slot.group.is_empty() for slot in light_pool._slots.free)
    assert len(light_pool._slots.free) == SLOTS
    assert (await light_pool.run(call("print(1)"))).stdout == "1\n"
    assert jail_of(light_pool) is jail
    assert not jail.is_broken


async def test_a_millisecond_is_a_limit(light_pool: JailPool) -> None:
    """As little as may be left of a deadline ends a program like any other limit."""
    result = await light_pool.run(call(SLEEP, wall_s=0.001))
    assert (result.status, result.signal) == ("timeout", signal.SIGKILL)
    assert (await light_pool.run(call("print(1)"))).stdout == "1\n"


async def test_close_while_calls_run() -> None:
    """Closing ends running calls as faults, leaves nobody waiting, and no process, descriptor or group behind."""
    before = open_fds(), set(descendants(os.getpid()))
    pool = await JailPool.open(JailSettings(), SLOTS)
    calls = [asyncio.create_task(pool.run(call(SLEEP))) for _ in range(SLOTS)]
    await running(pool, SLOTS)
    groups = groups_of(pool)
    await pool.close()
    results: list[ToolResult | BaseException] = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, JailError) for result in results)
    assert (open_fds(), set(descendants(os.getpid()))) == before
    assert not any(group.exists() for group in groups)


async def test_open_fails_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a wall is missing the start is refused, and nothing of it stays."""

    async def refuse(*_: object) -> None:
        raise JailError("walls of the jail are missing: all")

    before = open_fds(), set(descendants(os.getpid()))
    monkeypatch.setattr(pool_module, "check_walls", refuse)
    with pytest.raises(JailError, match="missing"):
        await JailPool.open(JailSettings(), SLOTS)
    assert (open_fds(), set(descendants(os.getpid()))) == before


async def test_calls_with_sockets_have_jails_of_their_own(pool: JailPool) -> None:
    """The first one starts them, and calls of both kinds then run side by side."""
    code = "import socket\nsocket.create_server(('127.0.0.1', 0))\nprint('served')"
    without, within = call(code), call(code).model_copy(update={"network": "loopback"})
    for _ in range(3):
        refused, ran = await asyncio.gather(pool.run(without), pool.run(within))
        assert "PermissionError" in refused.stderr
        assert ran.stdout == "served\n", ran


async def test_calls_with_a_hash_seed_have_jails_of_their_own(light_pool: JailPool) -> None:
    """On two workers, in two jails of each, text has the same hashes where a call asks for it, and there only."""
    code = "print(hash('a'), {'one', 'two', 'three', 'four', 'five'})"
    seeded, free = call(code).model_copy(update={"hash_seed": 0}), call(code)
    printed = []
    other = await JailPool.open(JailSettings(), SLOTS)
    try:
        for pool in (light_pool, other):
            printed.append(await pool.run(seeded))
            assert (await pool.run(free)).stdout != printed[-1].stdout
            await pool.renew()
            printed.append(await pool.run(seeded))
    finally:
        await other.close()
    assert len({result.stdout for result in printed}) == 1
    assert printed[0].status == "ok"


async def test_close_ends_what_runs_in_a_retiring_jail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a call that will not end: it is a fault, in whichever jail it runs."""
    monkeypatch.setattr(pool_module, "PRELOADS", PRELOADS[:1])
    pool = await JailPool.open(JailSettings(), SLOTS)
    old = jail_of(pool)
    endless = asyncio.create_task(pool.run(call(SLEEP, wall_s=60)))
    await running(pool, 1)
    old.worn.set()
    await until(lambda: pool._jails[Family()][0] is not old)
    await pool.close()
    with pytest.raises(JailError):
        await endless
