"""`python -m loadtest.soak`: hostile programs and honest ones in the real jails for a while, and what is left after.

Theory of operation. One worker's pool of jails runs in this process, without gateway and queue. As many callers as
there are slots each run one program after the other, drawn at random, so that every slot is busy all the time. Each
answer is compared with what must come of its program: the examples that ship with the project say it in their heads,
programs of a folder (`--hostile`) in heads of their own. At each quarter of the time all jails are replaced under the
running calls, as they are when they have served their time; so what a jail leaks shows in those of the last quarter,
and what is lost on replacing them shows in the worker.

What is held is counted before the first call and after the last one: descriptors, processes, mounts, groups, files,
memory. The kernel takes some things down after the call has been answered, so the second count gets some seconds to
become equal. A difference that stays is a leak.

A difference, a wrong answer or a fault: exit code 1. With the same seed the same programs are drawn in the same order;
which of them meet is up to the machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.text import Text

from loadtest.held import GROWTH, Held, compare, count_held
from loadtest.samples import complaints, load_samples
from loadtest.terminal import make_console, make_table, print_error
from loadtest.timing import percentile
from sandbox import CallStatus, ConfigError, JailError, Limits, SandboxError, ToolCall, ToolResult
from sandbox.settings import SLOTS_PER_CORE, load_settings
from worker.pool import JailPool

_HOSTILE_SHARE = 0.25  # of the programs; of the time it is most, for many of them go on until a limit
_PARTS = 4  # of the time, with fresh jails for each
_REPORT_S = 10.0
SETTLE_S = 30.0  # what differs for longer is a leak
_PATIENT_S, _BUSY_S = (
    60.0,
    4.0,
)  # wall-clock limits of programs that must not meet one, and of those that must
#: Heads of a folder's programs were written for these.
_FOLDER_LIMITS = Limits(wall_s=4, cpu_s=6, memory_bytes=512 * 2**20, processes=48, output_bytes=64 * 1024)
_VERDICTS = "|".join(status for status in CallStatus if not status.is_fault)


@dataclass(frozen=True, slots=True)
class Program:
    """One program of the mix, and what speaks against its result: nothing, if it is as it must be."""

    name: str
    call: ToolCall
    is_hostile: bool
    complaints: Callable[[ToolResult], list[str]]


class Tally:
    """What came of all calls so far."""

    def __init__(self, console: Console) -> None:
        self.statuses: Counter[str] = Counter()
        self.honest_s = array("d")
        self.wrong = 0
        self._console = console
        self._started = time.monotonic()

    def add(self, program: Program, status: str, complaints: Sequence[str]) -> None:
        """Count one answer, and show at once what is wrong with it."""
        self.statuses[status] += 1
        if complaints:
            self.wrong += 1
            self._console.print(
                Text(f"WRONG: {program.name}: {'; '.join(complaints)}", style="red"), soft_wrap=True
            )

    def line(self) -> str:
        """All of it in one line."""
        p50, p99, longest = (1000 * percentile(self.honest_s, share) for share in (0.5, 0.99, 1))
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.statuses.items()))
        return (
            f"{time.monotonic() - self._started:.0f} s: {counts}; wrong {self.wrong}; "
            f"honest {len(self.honest_s)} in p50 {p50:.0f}, p99 {p99:.0f}, at most {longest:.0f} ms"
        )


def main(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long programs are run.")] = 20.0,
    hostile: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder of further hostile programs.")
    ] = None,
    slots: Annotated[
        int, typer.Option(min=0, help="Calls at a time. 0: as many as a worker would run here.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Draws the same programs again. 0: another one each time.")] = 0,
) -> None:
    """Run hostile programs among honest ones for a while, check every answer, and look for what was leaked."""
    console = make_console()
    seed = seed or random.SystemRandom().randrange(1, 10**6)
    slots = slots or SLOTS_PER_CORE * len(os.sched_getaffinity(0))

    async def run() -> bool:
        programs = [*shipped_programs(), *(folder_programs(hostile) if hostile else [])]
        if load_settings().jail.level != "process":  # which has no loopback device to give
            programs += [with_sockets(program) for program in programs if not program.is_hostile]
        console.print(f"{len(programs)} programs in {slots} slots for {minutes:g} min, seed {seed}")
        pool = await JailPool.open(load_settings().jail, slots)
        try:
            return await soak(pool, programs, 60 * minutes, random.Random(seed), console)
        finally:
            await pool.close()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            is_well = runner.run(run())
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    raise typer.Exit(0 if is_well else 1)


def shipped_programs() -> list[Program]:
    """The examples; those about limits, signals and walls are the hostile ones."""
    return [
        Program(
            sample.name,
            _patient(sample.call, ends_by_clock=sample.expected.status is CallStatus.TIMEOUT),
            sample.name.startswith(("limit_", "signal_", "wall_")),
            partial(complaints, sample.expected),
        )
        for sample in load_samples()
    ]


def with_sockets(program: Program) -> Program:
    """The same program with a loopback device, in another jail: its answer is the same."""
    call = program.call.model_copy(update={"network": "loopback"})
    return replace(program, name=f"{program.name} with sockets", call=call)


def folder_programs(folder: Path) -> list[Program]:
    """Programs whose head says `# EXPECT:` with the statuses that may come of them.

    A line with BREACH, which one of them prints when a wall gave way, is never right. Raises ConfigError for a
    folder without programs, or a program that expects nothing.
    """
    programs = [_folder_program(file) for file in sorted(folder.glob("*.py"))]
    if not programs:
        raise ConfigError(f"there are no programs in {folder}")
    return programs


def _folder_program(file: Path) -> Program:
    code = file.read_text(encoding="utf-8")
    head = re.search(r"^# EXPECT:(.*)", code, re.MULTILINE)
    words = re.sub(r"\b(not|never)\b[^;,]*", "", head[1]) if head else ""
    allowed = set(re.findall(rf"\b({_VERDICTS})\b", words))
    if not allowed:
        raise ConfigError(f"{file} expects no status in a line '# EXPECT: …'")
    if "error" in allowed or "signal" in words:
        allowed.add("signaled")  # to whoever writes such heads, an end by a signal is an error

    def judge(result: ToolResult) -> list[str]:
        breaches = [line for line in (result.stdout + result.stderr).splitlines() if "BREACH" in line]
        unexpected = (
            [] if result.status in allowed else [f"status is {result.status}: {result.stderr[-300:]!r}"]
        )
        return breaches + unexpected

    call = _patient(ToolCall(code=code, limits=_FOLDER_LIMITS), ends_by_clock="timeout" in allowed)
    return Program(file.stem, call, True, judge)


def _patient(call: ToolCall, *, ends_by_clock: bool) -> ToolCall:
    """More wall-clock time than the call asks for: neighbours that take the machine are no fault of its program."""
    wall_s = max(call.limits.wall_s, _BUSY_S if ends_by_clock else _PATIENT_S)
    return call.model_copy(update={"limits": call.limits.model_copy(update={"wall_s": wall_s})})


async def soak(
    pool: JailPool, programs: Sequence[Program], seconds: float, draw: random.Random, console: Console
) -> bool:
    """Keep every slot busy for so long, print what came of it, and return whether all was as it must be."""
    networks = {program.call.network: program.call for program in programs}
    await asyncio.gather(
        *(pool.run(call) for call in networks.values()), return_exceptions=True
    )  # the mix will tell
    await pool.renew()  # and with that, every kind of jail is there
    count = partial(count_held, pool.host.slots, pool.host.identity.first_slot)
    before = await _steady(count)
    tally = Tally(console)
    async with asyncio.TaskGroup() as group:
        reports = group.create_task(_report(console, tally))
        group.create_task(_renew(pool, seconds / _PARTS))
        end = time.monotonic() + seconds
        callers = [
            group.create_task(_call_until(end, pool, programs, draw, tally)) for _ in range(pool.host.slots)
        ]
        await asyncio.wait(callers)
        reports.cancel()
    held = await _settle(before, count)
    _print_held(console, held)
    console.print(tally.line(), soft_wrap=True)
    return not tally.wrong and not any(each.is_leak for each in held)


async def _call_until(
    end: float, pool: JailPool, programs: Sequence[Program], draw: random.Random, tally: Tally
) -> None:
    """One caller: program after program, each answer checked."""
    kinds = [[program for program in programs if program.is_hostile is hostile] for hostile in (False, True)]
    while (sent := time.monotonic()) < end:
        program = draw.choice(kinds[draw.random() < _HOSTILE_SHARE])
        try:
            result = await pool.run(program.call)
        except JailError as exc:
            tally.add(program, "JailError", [str(exc)])
            continue
        tally.add(program, result.status, program.complaints(result))
        if not program.is_hostile:
            tally.honest_s.append(time.monotonic() - sent)


async def _renew(pool: JailPool, every_s: float) -> None:
    for _ in range(_PARTS - 1):
        await asyncio.sleep(every_s)
        await pool.renew()


async def _report(console: Console, tally: Tally) -> None:
    while True:
        await asyncio.sleep(_REPORT_S)
        console.print(tally.line(), soft_wrap=True)


async def _steady(count: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The counts when they stand still: a new jail makes net namespaces, and opens a file for each for a moment."""
    while True:
        first = count()
        await asyncio.sleep(0.2)  # nothing announces that it has all of them
        if all(value == first[what] for what, value in count().items() if what not in GROWTH):
            return first


async def _settle(before: dict[str, int], count: Callable[[], dict[str, int]]) -> list[Held]:
    """The counts as soon as none of them is a leak, or as they are when that takes too long."""
    end = time.monotonic() + SETTLE_S
    while True:
        held = compare(before, count())
        if time.monotonic() > end or not any(each.is_leak for each in held):
            return held
        await asyncio.sleep(0.2)  # nothing announces that the kernel has taken down what ended


def _print_held(console: Console, held: Sequence[Held]) -> None:
    table = make_table("What is held")
    table.add_column("")
    for heading in ("before", "after", "allowed"):
        table.add_column(heading, justify="right")
    for each in held:
        table.add_row(
            each.what,
            str(each.before),
            Text(str(each.after), style="red" if each.is_leak else ""),
            each.allowed,
        )
    console.print(table)
    for each in held:
        if each.is_leak:
            console.print(Text(f"LEAK: {each.what}: {each.before} before, {each.after} after", style="red"))


if __name__ == "__main__":
    typer.run(main)
