"""`python -m loadtest.costs`: what a call costs in CPU, by forkserver and by wall, on the machine at hand.

All in one run, since machines and hours differ and ratios carry over:

1. For each forkserver, `print(1)` and one line of its kind: CPU of the program (with its init), of the forkserver and
   of the worker's side, beside a bare fork of the same warm interpreter without any wall, and beside a fresh nsjail
   that starts an interpreter for the call.
2. For the lightest forkserver, what each layer of the set-up adds. A call of that jail can be ended at any step (its
   fork.c is compiled with INJECT_FAULTS), so a layer costs what ending after it costs, less what ending before it does.

Figures are medians of CPU time. Wall time is what the machine's other users leave, so none is shown. Runs as root on a
host with cgroups, whose counters give the program's share.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from loadtest.terminal import make_console, make_table, print_error
from loadtest.workloads import KINDS
from sandbox.calls import CallStatus, Limits, ToolCall, first_error
from sandbox.errors import ConfigError, JailError, SandboxError
from sandbox.jail import PRELOADS, Host, Jail, Slots, prepare, runtime
from sandbox.jail.host import MOUNT_POINT
from sandbox.jail.policy import nsjail_argv
from sandbox.jail.preload import Preload
from sandbox.settings import JailSettings, Level, load_settings

#: By forkserver: what is run in it, under a short name.
_CODES = {
    "standard": {"print(1)": KINDS["print"].code},
    "numpy": {"print(1)": KINDS["print"].code, "det": KINDS["numpy"].code},
    "sympy": {"print(1)": KINDS["print"].code, "solve": KINDS["sympy"].code},
    "data": {
        "print(1)": KINDS["print"].code,
        "sum": "import pandas as pd; print(pd.DataFrame({'a': [1, 2]}).sum().a)",
    },
}
IN_FORKSERVER, IN_PROGRAM = 1_000_000, 2_000_000  # of fork.c
_NSJAIL_OFTEN = 5
#: What happens from one step on, until the next of these.
_LAYERS = {
    "net namespace": "net namespace of the place",
    "start init": "init in a new pid namespace",
    "enter pid namespace": "fork, and a watch on its end",
    "enter cgroup": "the cgroups (from here its end counts, too)",
    "user namespace": "user namespace",
    "namespaces": "mount and ipc namespace",
    "stdin": "stdin, stdout, stderr, close_range",
    "mount /tmp": "tmpfs twice, /proc",
    "setsid": "session and limits",
    "bounding set": "user, groups, capabilities",
    "parent-death signal": "what cannot be had back",
    "filter": "the filter, and the program `pass`",
    "": "",  # the end of it
}
_FAILED = re.compile(r"setting up the call failed at '(.+)'")


@dataclass(frozen=True, slots=True)
class Cost:
    """Median CPU milliseconds of one call."""

    program: float
    forkserver: float
    worker: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.program + self.forkserver + self.worker


@dataclass(frozen=True, slots=True)
class Row:
    """One code in one forkserver, and what else it could have run in."""

    preload: str
    code: str
    call: Cost
    bare: Cost
    nsjail_ms: float

    @property
    def inside_ms(self) -> float:
        """Program and forkserver."""
        return self.call.program + self.call.forkserver

    @property
    def walls_ms(self) -> float:
        """What they use beyond a bare fork of the same warm interpreter."""
        return self.inside_ms - self.bare.total


def main(
    calls: Annotated[int, typer.Option(help="Calls that each figure is the median of.", min=3)] = 200,
    level: Annotated[str, typer.Option(help="namespaces or strict; without it, that of the settings.")] = "",
) -> None:
    """Measure what a call costs in each forkserver, and what each layer of the walls adds."""
    console = make_console()
    try:
        settings = load_settings().jail
        settings = JailSettings.model_validate(settings.model_dump() | ({"level": level} if level else {}))
        _print_forkservers(console, settings.level, asyncio.run(measure_forkservers(settings, calls)))
        _print_layers(console, settings.level, asyncio.run(_measure_layers(settings, calls)))
    except (SandboxError, ValidationError) as exc:
        print_error(console, exc if isinstance(exc, SandboxError) else ConfigError(first_error(exc)))
        raise typer.Exit(1) from exc


async def measure_forkservers(
    settings: JailSettings, calls: int, names: Collection[str] = _CODES.keys()
) -> list[Row]:
    """The rows of the first table, for these forkservers.

    Raises ConfigError on a host that cannot tell, JailError if a call goes wrong.
    """
    if settings.level == "process":
        raise ConfigError(
            "costs are measured beside nsjail, which the level process does without; give --level namespaces or strict"
        )
    host = prepare(settings, slots=1)
    if host.place.kind == "none":
        raise ConfigError(f"this host gives no cgroup, whose counters are needed: {host.place.reason}")
    rows = []
    with closing(Slots(host)) as slots:
        for preload in (each for each in PRELOADS if each.name in names):
            rows += await _forkserver(host, slots, preload, calls)
    return rows


async def _measure_layers(settings: JailSettings, calls: int) -> list[tuple[str, Cost]]:
    with injected(settings) as copy:
        host = prepare(copy, slots=1)
        with closing(Slots(host)) as slots:
            return await _layers(host, slots, calls)


# ---- by forkserver ----


async def _forkserver(host: Host, slots: Slots, preload: Preload, often: int) -> list[Row]:
    codes = _CODES[preload.name]
    bare = _bare_forks(host, preload, list(codes.values()), often)
    jail = await Jail.start(host, preload)
    try:
        costs = {code: await _calls(jail, slots, code, often) for code in codes.values()}
    finally:
        await jail.close()
    return [
        Row(preload.name, name, costs[code], bare[code], _nsjail_ms(host, code, _NSJAIL_OFTEN))
        for name, code in codes.items()
    ]


async def _calls(jail: Jail, slots: Slots, code: str, often: int) -> Cost:
    call = ToolCall(code=code, limits=Limits(wall_s=60.0))
    forkserver = jail.forkserver_pid
    program, worker, before = [], [], 0
    for number in range(often + 5):
        if number == 5:  # the first ones find everything cold
            before = _cpu_ns(forkserver)
        start = time.process_time()
        result = await jail.run(call, slots.free[0])
        if number >= 5:
            worker.append((time.process_time() - start) * 1e3)
            program.append(result.usage.cpu_s * 1e3)
        if result.status != CallStatus.OK:
            raise JailError(f"{code!r} ended as {result.status}: {result.stderr}")
    served_ms = (_cpu_ns(forkserver) - before) / 1e6 / often
    return Cost(statistics.median(program), served_ms, statistics.median(worker))


def _cpu_ns(pid: int) -> int:
    return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()[0])


def _bare_forks(host: Host, preload: Preload, codes: list[str], often: int) -> dict[str, Cost]:
    asked = {
        "root": str(host.root),
        "modules": preload.modules,
        "warm_up": preload.warm_up,
        "codes": codes,
        "often": often,
    }
    answer = subprocess.run(
        [host.root / "python/bin/python3", "-s", "-B", Path(__file__).with_name("bare_fork.py")],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        env={
            "PYTHONPATH": str(host.root / "python/site"),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    if answer.returncode:
        raise JailError(f"the bare fork failed: {answer.stderr[-1000:]}")
    pairs: dict[str, list[tuple[float, float]]] = json.loads(answer.stdout)
    return {
        code: Cost(*(statistics.median(column) for column in zip(*each, strict=True)))
        for code, each in pairs.items()
    }


def _nsjail_ms(host: Host, code: str, often: int) -> float:
    """An interpreter in a jail of its own, with the same outer walls, for one call."""
    assert host.nsjail is not None  # as at every level but `process`
    argv = nsjail_argv(host.nsjail, host.root, host.identity)
    argv[argv.index("--") + 1 :] = ["/python/bin/python3", "-s", "-B", "-c", code]
    control = argv.index("--pass_fd")
    del argv[control : control + 2]
    spent = []
    for _ in range(often):
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if status:
            raise JailError(f"nsjail ended with {process.returncode}")
        spent.append((usage.ru_utime + usage.ru_stime) * 1e3)
    return statistics.median(spent)


# ---- by step ----


@contextmanager
def injected(settings: JailSettings) -> Iterator[JailSettings]:
    """A copy of the runtime, by links, whose forkserver ends a call where its number says."""
    whole = settings.runtime
    with tempfile.TemporaryDirectory(dir=whole.parent, prefix="injected-") as folder:
        copy = Path(folder)
        copy.chmod(0o755)
        shutil.copyfile(whole / "manifest.json", copy / "manifest.json")
        shutil.copytree(whole / "root", copy / "root", symlinks=True, copy_function=os.link)
        library = copy / "root" / "jail" / "libfork.so"
        library.unlink()
        subprocess.run(runtime.compile_argv(library.name, library, "-DINJECT_FAULTS"), check=True)
        library.chmod(0o755)
        try:
            yield settings.model_copy(update={"runtime": copy})
        finally:
            # A worker has one runtime and binds it once. Here it lies over the one that was bound before.
            while MOUNT_POINT.is_dir() and MOUNT_POINT.samefile(copy / "root"):
                subprocess.run(["umount", "--lazy", MOUNT_POINT], check=True)  # noqa: S607


async def _layers(host: Host, slots: Slots, often: int) -> list[tuple[str, Cost]]:
    """For each layer, the cost of a call that ends where it begins; last that of a whole call."""
    jail = await Jail.start(host, PRELOADS[0])
    reached: dict[str, Cost] = {}
    try:
        for place in (IN_FORKSERVER, IN_PROGRAM):
            for step in itertools.count(1):
                try:
                    name, _ = await _ended_at(jail, slots, place + step, 1)
                except JailError:
                    if not jail.is_broken:
                        raise
                    await jail.close()  # a step without which no forkserver goes on
                    jail = await Jail.start(host, PRELOADS[0])
                    continue
                if name in _LAYERS and name not in reached and (name or place == IN_PROGRAM):
                    reached[name] = (await _ended_at(jail, slots, place + step, often))[1]
                if not name:
                    break
    finally:
        await jail.close()
    return [(_LAYERS[name], cost) for name, cost in reached.items()]


async def _ended_at(jail: Jail, slots: Slots, number: int, often: int) -> tuple[str, Cost]:
    """The step at which calls of this number end, empty where they come to their own end, and what one costs."""
    forkserver, slot = jail.forkserver_pid, slots.free[0]
    name, program = "", []
    before = _cpu_ns(forkserver)
    for _ in range(often):
        jail._numbers = itertools.chain([number], itertools.count(1))  # type: ignore[assignment]
        try:
            await jail.run(ToolCall(code="pass"), slot)
        except JailError as exc:
            match = _FAILED.match(exc.message)
            if match is None:
                raise
            name = match[1]
        program.append(slot.group.end().cpu_s * 1e3)
    return name, Cost(statistics.median(program), (_cpu_ns(forkserver) - before) / 1e6 / often)


# ---- tables ----


def _print_forkservers(console: Console, level: Level, rows: list[Row]) -> None:
    table = make_table(f"CPU ms of one call, level {level}")
    for heading in ("forkserver", "code"):
        table.add_column(heading, no_wrap=True)
    for heading in ("program", "server", "worker", "total", "bare fork", "walls", "nsjail", "times", "cores"):
        table.add_column(heading, justify="right")
    for row in rows:
        call = row.call
        figures = (
            call.program,
            call.forkserver,
            call.worker,
            call.total,
            row.bare.total,
            row.walls_ms,
        )
        table.add_row(
            row.preload,
            row.code,
            *(f"{figure:.2f}" for figure in figures),
            f"{row.nsjail_ms:.0f}",
            f"{row.nsjail_ms / row.inside_ms:.0f}",
            f"{call.total / call.forkserver:.1f}",
        )
    console.print(table)
    console.print("walls: program and forkserver, beyond a bare fork of the same warm interpreter")
    console.print("times: a fresh nsjail with an interpreter for each call, against program and forkserver")
    console.print("cores: how many one forkserver keeps busy before its loop, one thread, is the bound")


def _print_layers(console: Console, level: Level, reached: list[tuple[str, Cost]]) -> None:
    table = make_table(f"What each layer adds, standard forkserver, level {level}: CPU µs")
    table.add_column("layer")
    for heading in ("program", "forkserver", "so far"):
        table.add_column(heading, justify="right")
    names = ["reading the call, telling its end", *(name for name, _ in reached)]
    costs = [Cost(0.0, 0.0), *(cost for _, cost in reached)]
    for name, (before, after) in zip(names, itertools.pairwise(costs), strict=False):
        added = (after.program - before.program, after.forkserver - before.forkserver, after.total)
        table.add_row(name, *(f"{1e3 * figure:.0f}" for figure in added))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
