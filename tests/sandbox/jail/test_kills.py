"""Sudden death: somebody kills a part of a running jail, at any moment, and no call gets an answer that is not true."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from loadtest.held import descendants
from sandbox.calls import ToolCall, ToolResult
from sandbox.errors import JailError

from .box import SLEEP, SPIN, Box, open_fds, program, until

SLOTS = 4
FAMILY = "import os, time\nfor _ in range(12):\n    if os.fork() == 0:\n        time.sleep(60)\n        os._exit(0)\n"

#: What runs when somebody dies, and the one verdict that is true of it.
CALLS: tuple[tuple[ToolCall, tuple[str, str]], ...] = (
    (program("print('quick')"), ("ok", "quick\n")),
    (program("import time\ntime.sleep(0.05)\nprint('slow')"), ("ok", "slow\n")),
    (program(f"{FAMILY}print('family')"), ("ok", "family\n")),
    (program(f"print('spin')\n{SPIN}", wall_s=0.15), ("timeout", "spin\n")),
    (program(f"{FAMILY}print('x' * 99)\n", output_bytes=9), ("output_limit", "x" * 9)),
    (program("raise SystemExit(3)"), ("error", "")),
)
Outcome = ToolResult | BaseException


def inits_and_programs(box: Box) -> tuple[list[int], list[int]]:
    """The processes that the forkserver has started, in the two kinds there are, by their numbers inside."""
    kinds: dict[str, list[int]] = {"1": [], "2": []}
    forkserver = box.forkserver_pid()
    children = Path(f"/proc/{forkserver}/task/{forkserver}/children").read_text(encoding="ascii")
    for pid in map(int, children.split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
            inside = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1]
            kinds.get(inside, []).append(pid)
    return kinds["1"], kinds["2"]


#: Who dies -> the processes that are of this kind now.
VICTIMS: dict[str, Callable[[Box], list[int]]] = {
    "forkserver": lambda box: [box.forkserver_pid()],
    "nsjail": lambda box: [box.jail._pid],
    "init": lambda box: inits_and_programs(box)[0],
    "program": lambda box: inits_and_programs(box)[1],
}


async def sent(box: Box, chance: random.Random) -> None:
    """The requests are with the forkserver, which has read none of them yet; whoever dies is in the middle of a set-up."""
    await until(lambda: len(box.jail._runs) == SLOTS)


async def killed(box: Box, chance: random.Random) -> None:
    """The forkserver was just told to end a call; or none had to be ended, and all of them are over."""
    await sent(box, chance)
    await until(lambda: not box.jail._runs or any(run.is_killed for run in box.jail._runs.values()))


async def any_time(box: Box, chance: random.Random) -> None:
    """Some turns of the loop later, few or many."""
    for _ in range(int(2 ** chance.uniform(0, 12))):
        await asyncio.sleep(0)


MOMENTS: dict[str, Callable[[Box, random.Random], Awaitable[None]]] = {
    "sent": sent,
    "killed": killed,
    "any_time": any_time,
}


@pytest.fixture(scope="module")
def own_box() -> Iterator[Box]:
    """A jail that these tests may end."""
    box = Box(slots=SLOTS)
    yield box
    box.close()


def strike(box: Box, who: str, chance: random.Random) -> bool:
    """Kill one process of a kind; False when there is none at this moment."""
    there = VICTIMS[who](box)
    if not there:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(chance.choice(there), signal.SIGKILL)
        return True
    return False


def is_true(outcome: Outcome, expected: tuple[str, str]) -> bool:
    """No verdict, or the one that the program has earned; a clock may end it before it has printed all."""
    if isinstance(outcome, ToolResult):
        status, stdout = expected
        is_whole = outcome.stdout == stdout or (status == "timeout" and stdout.startswith(outcome.stdout))
        return outcome.status == status and is_whole
    return isinstance(outcome, JailError)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("who", VICTIMS)
def test_sudden_death(own_box: Box, who: str, moment: str) -> None:
    """Each call has its true verdict or none, and the slots are as good as before."""
    chance = random.Random(f"{who} {moment}")
    ends_jail = who in {"forkserver", "nsjail"}
    before = open_fds()

    async def round_of_calls() -> tuple[bool, list[tuple[Outcome, tuple[str, str]]]]:
        drawn = chance.choices(CALLS, k=SLOTS)
        tasks = [
            asyncio.create_task(own_box.jail.run(call, slot))
            for (call, _), slot in zip(drawn, own_box.slots.free, strict=True)
        ]
        await MOMENTS[moment](own_box, chance)
        await until(lambda: bool(VICTIMS[who](own_box)) or not own_box.jail._runs)
        struck = strike(own_box, who, chance)
        async with asyncio.timeout(20):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        return struck, list(zip(outcomes, (expected for _, expected in drawn), strict=True))

    strikes = 0
    for _ in range(6 if ends_jail else 24):
        struck, outcomes = own_box.do(round_of_calls())
        strikes += struck
        untrue = [pair for pair in outcomes if not is_true(*pair)]
        if who == "program" and untrue:  # a signal from nowhere is what it met
            [(outcome, _)] = untrue
            assert isinstance(outcome, ToolResult), outcome
            assert (outcome.status, outcome.signal) == ("signaled", signal.SIGKILL)
        else:
            assert untrue == []
        without = sum(isinstance(outcome, JailError) for outcome, _ in outcomes)
        assert without <= (SLOTS if ends_jail else 1), outcomes
        if struck and ends_jail:
            own_box.do(own_box.jail.close())
            own_box.renew()
        else:
            assert not own_box.jail.is_broken
        assert descendants(own_box.forkserver_pid()) == []
        assert all(slot.group.is_empty() for slot in own_box.slots.free)
        again = own_box.run_together([program("print('again')")] * SLOTS)
        assert [result.stdout for result in again] == ["again\n"] * SLOTS
    assert strikes > 0
    assert open_fds() == before


def test_an_init_that_somebody_killed_is_no_verdict(own_box: Box) -> None:
    """The program dies with its init, by a signal that it did not earn: that is a fault of ours, and only for that call."""

    async def kill_one() -> BaseException | None:
        sleepers = [
            asyncio.create_task(own_box.jail.run(program(SLEEP, wall_s=50), slot))
            for slot in own_box.slots.free
        ]
        await until(lambda: len(inits_and_programs(own_box)[1]) == SLOTS)
        os.kill(inits_and_programs(own_box)[0][0], signal.SIGKILL)
        [ended], others = await asyncio.wait(sleepers, return_when=asyncio.FIRST_COMPLETED)
        assert len(inits_and_programs(own_box)[1]) == len(others) == SLOTS - 1
        for sleeper in others:
            sleeper.cancel()
        await asyncio.wait(others)
        return ended.exception()

    fault = own_box.do(kill_one())
    assert isinstance(fault, JailError)
    assert fault.message.startswith("setting up the call failed at 'keep init'")


def test_a_program_that_kills_itself_is_one(own_box: Box) -> None:
    """The same wait status, earned: the init lives, so the signal was the program's own doing."""
    result = own_box.run("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert (result.status, result.signal) == ("signaled", signal.SIGKILL)


def test_nobody_inside_can_end_the_init(own_box: Box) -> None:
    """Whatever a program sends to its init, and to all that it sees, the verdict is about the program."""
    code = (
        "import os, signal\n"
        "for number in range(1, 65):\n"
        "    if number != signal.SIGCHLD:\n"
        "        for pid in (1, -1):\n"
        "            try:\n                os.kill(pid, number)\n"
        "            except OSError:\n                pass\n"
        "print('still here')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    result = own_box.run(code)
    assert (result.status, result.signal, result.stdout) == ("signaled", signal.SIGKILL, "still here\n")
