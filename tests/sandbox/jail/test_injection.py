"""Every step that can fail is made to fail, one after the other: never a verdict, nothing left, the next call is well.

The forkserver of these jails is compiled with INJECT_FAULTS (fork.c): there a call's number says which step fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.costs import IN_FORKSERVER, IN_PROGRAM, injected
from loadtest.held import descendants
from sandbox.calls import Limits, Network, ToolCall, ToolResult
from sandbox.errors import JailError
from sandbox.jail import PRELOADS, Jail, host, runtime
from sandbox.jail.cgroups import Place, find_place
from sandbox.settings import JailSettings
from tests.worker.test_pool import jail_of
from worker import pool as pool_module
from worker.pool import JailPool

from .box import Box, alive, open_fds, program, until

SOURCE = Path(runtime.__file__).with_name("fork.c").read_text(encoding="utf-8")
NAMESPACES = int(re.findall(r"NAMESPACE_POOL = (\d+)", SOURCE)[0])
#: No step by name: where it fails the forkserver ends, and the call with it.
LEAVING = "leave pid namespace"
NONE = Place("none", {}, "a test")
ONLY_STRICT = {"user namespace", "user mapping"}
ONLY_PROCESS = {
    *("Landlock", "scratch folder", "enter scratch folder", "guardian"),
    *("handle on guardian", "watch guardian"),
}
ONLY_NAMESPACES = {
    *("namespaces", "mount /tmp", "mount /dev/shm", "mount /proc", "chdir", "net namespace"),
    *("start init", "enter pid namespace", LEAVING),
    *("handle on program", "watch program", "tell init", "tell program"),
}
ONLY_WATCHED = {"RLIMIT_DATA"}
ONLY_TOLD = {"tell init", "tell program"}  # where the worker looks at processes or sockets
ONLY_GROUPS = {"enter cgroup"}
ONLY_ROOT = {"setgroups", "setresgid", "setresuid"}


@pytest.fixture(scope="module")
def settings() -> Iterator[JailSettings]:
    """A runtime whose forkserver fails where it is told to."""
    with injected(JailSettings()) as copy:
        yield copy


def steps() -> list[str]:
    """The names of all steps, as they stand in the source: first those of the program, then those of the forkserver."""
    names = re.findall(r'\bSTEP\("([^"]+)"', SOURCE)
    names.insert(names.index("enter pid namespace") + 1, LEAVING)
    return names


def absent(box: Box) -> set[str]:
    """The steps that a jail like this one does not have."""
    watched = box.host.place.kind == "none"
    return (
        (ONLY_NAMESPACES if box.host.level == "process" else ONLY_PROCESS)
        | (set() if box.host.level == "strict" else ONLY_STRICT)
        | (ONLY_GROUPS if watched else ONLY_WATCHED)
        | (set() if watched or box.jail.network == "loopback" else ONLY_TOLD)
        | (ONLY_ROOT if box.host.identity.first_slot is None else set())
    )


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process stand for."""
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            links.append(fd.readlink().name)
    return sorted(links)


def held(box: Box) -> tuple[Any, ...]:
    """What a call could leave behind: descriptors here and in the forkserver, processes, members of the group."""
    forkserver = box.forkserver_pid()
    if box.jail.network == "loopback":  # each call takes one, and the time between calls brings another
        box.do(until(lambda: sum(link.startswith("net:") for link in descriptors(forkserver)) == NAMESPACES))
    kept = [link for link in descriptors(forkserver) if not link.startswith("net:")]
    return open_fds(), kept, descendants(forkserver), box.slots.free[0].group.is_empty()


def number_from(jail: Jail, *numbers: int) -> None:
    """Give the next calls these numbers, and those after them harmless ones."""
    jail._numbers = itertools.chain(numbers, itertools.count(1))  # type: ignore[assignment]


def failed_at(place: int, box: Box) -> Iterator[str]:
    """Let one step after the other fail, until there is no further one; name each."""
    for step in itertools.count(1):
        before = held(box)
        forkserver = box.forkserver_pid()
        number_from(box.jail, place + step)
        try:
            result = box.run("print('it ran')")
        except JailError as exc:
            failure = exc.message
        else:
            assert (result.status, result.stdout) == ("ok", "it ran\n")
            return
        if failure == "the jail broke while the call ran":
            yield LEAVING
            assert not alive(forkserver)
            box.renew()
        else:
            named = re.fullmatch(r"setting up the call failed at '(.+)': Input/output error", failure)
            assert named, failure
            yield named[1]
            assert held(box) == before
        assert box.out("print('the next')") == "the next\n"


@pytest.mark.parametrize("place", ["groups", "watched"])
@pytest.mark.parametrize("network", ["none", "loopback"])
@pytest.mark.parametrize("level", ["process", "namespaces", "strict"])
def test_every_step_fails_well(settings: JailSettings, level: str, network: Network, place: str) -> None:
    """The call is a fault that names the step, nothing is left of it, and the next call in the slot is well."""
    if place == "groups" and find_place().kind == "none":
        pytest.skip("no cgroup can be written here")
    if level == "process":
        if network != "none":
            pytest.skip("this level has no network to give")
        if lack := host.process_lack(settings.runtime / "root", is_root=os.geteuid() == 0):
            pytest.skip(f"not at this level: {lack[0]}")
    box = Box(
        settings=settings.model_copy(update={"level": level}),
        slots=1,
        network=network,
        **({"place": NONE} if place == "watched" else {}),
    )
    try:
        box.out("print('warm')")
        seen = [*failed_at(IN_PROGRAM, box), *failed_at(IN_FORKSERVER, box)]
        assert list(dict.fromkeys(seen)) == [name for name in steps() if name not in absent(box)]
        if box.host.place.kind == "v1":
            assert seen.count("enter cgroup") == len(box.slots.free[0].group.enter_fds)
    finally:
        box.close()


def test_every_step_of_the_source_is_known() -> None:
    """No step is left out above because of a name that the source does not have any more."""
    assert set(steps()) > (
        ONLY_STRICT | ONLY_PROCESS | ONLY_NAMESPACES | ONLY_WATCHED | ONLY_GROUPS | ONLY_ROOT
    )


def test_faults_beside_honest_calls(settings: JailSettings) -> None:
    """Calls that are set up at the same time have each their own outcome, whichever step of another's fails."""
    box = Box(settings=settings)
    try:
        faults = list(harmless_faults(box))
        assert len(faults) > 20
        while faults:
            batch, faults = faults[:4], faults[4:]
            numbers = [number for n, fault in enumerate(batch) for number in (fault, n + 1)]
            number_from(box.jail, *numbers)
            outcomes = box.do(together(box, [f"print({number})" for number in numbers]))
            for number, outcome in zip(numbers, outcomes, strict=True):
                if number > IN_FORKSERVER:
                    assert isinstance(outcome, JailError)
                else:
                    assert isinstance(outcome, ToolResult)
                    assert outcome.stdout == f"{number}\n"
    finally:
        box.close()


async def together(box: Box, codes: list[str]) -> list[ToolResult | BaseException]:
    """Run many calls at once, some of which are faults."""
    calls = (box.jail.run(program(code), slot) for code, slot in zip(codes, box.slots.free, strict=False))
    return await asyncio.gather(*calls, return_exceptions=True)


def harmless_faults(box: Box) -> Iterator[int]:
    """The numbers of all faults but the one that ends the forkserver."""
    for place in (IN_PROGRAM, IN_FORKSERVER):
        for step, name in enumerate(failed_at(place, box), 1):
            if name != LEAVING:
                yield place + step


class TestThroughThePool:
    """What a worker makes of it: the call is run once more, and then it is a fault of ours."""

    @pytest.fixture
    async def pool(self, settings: JailSettings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JailPool]:
        """A pool that has the lightest kind of jail only, so that a test knows where a call runs."""
        monkeypatch.setattr(pool_module, "PRELOADS", PRELOADS[:1])
        opened = await JailPool.open(settings, slots=2)
        yield opened
        await opened.close()

    @pytest.mark.parametrize("place", [IN_FORKSERVER, IN_PROGRAM])
    async def test_one_fault_is_not_seen(self, pool: JailPool, place: int) -> None:
        """A call whose set-up fails once is run once more, in the same jail, and answered."""
        jail = jail_of(pool)
        number_from(jail, place + 1)
        result = await pool.run(CALL)
        assert (result.status, result.stdout) == ("ok", "it ran\n")
        assert jail_of(pool) is jail

    @pytest.mark.parametrize("place", [IN_FORKSERVER, IN_PROGRAM])
    async def test_two_faults_are_no_verdict(self, pool: JailPool, place: int) -> None:
        """A call whose set-up fails twice raises what the worker answers as internal_error; the pool serves on."""
        number_from(jail_of(pool), place + 1, place + 2)
        with pytest.raises(JailError, match="setting up the call failed at"):
            await pool.run(CALL)
        assert (await pool.run(CALL)).stdout == "it ran\n"

    async def test_a_forkserver_that_ends_is_replaced(self, pool: JailPool) -> None:
        """The call under which the forkserver ends itself is run once more, in the next one."""
        jail = jail_of(pool)
        names = [name for name in steps()[steps().index("net namespace") :] if name not in ONLY_STRICT]
        number_from(jail, IN_FORKSERVER + names.index(LEAVING) + 1)
        result = await pool.run(CALL)
        assert (result.status, result.stdout) == ("ok", "it ran\n")
        assert jail.is_broken
        assert jail_of(pool) is not jail


CALL = ToolCall(code="print('it ran')", limits=Limits(wall_s=10.0))
