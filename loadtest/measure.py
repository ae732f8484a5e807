"""Measures a service under the loads of a bench: the part of `sandbox bench` that prints nothing."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import uvloop

from loadtest.figures import Run, is_answered, to_run
from loadtest.load import Arrivals, Load, loads, warm_up
from loadtest.machine import Machine, this_machine
from loadtest.openloop import PATIENCE_S, Sent, Target, run_open_loop
from loadtest.processes import used_by
from loadtest.stack import Stack, own_stack, settle
from loadtest.targets import check_calls, open_target
from loadtest.workloads import Workload, load_workload
from sandbox import ConfigError, SandboxClient, Unavailable

_OURS = {"v1", "client"}  # targets that tell who answered


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured."""

    url: str = ""  # empty: a stack of our own
    target: str = "v1"
    workload: str = "mixed"
    arrivals: Arrivals = field(default_factory=Arrivals)
    seed: int = 1
    patience_s: float = PATIENCE_S
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured, of whom, and where."""

    how: Literal["measured"]
    answered_by: str  # "jail", "stand-in", or a service that does not tell, by the name of its target
    target: str
    url: str  # empty: a stack of our own
    workload: str
    seed: int
    machine: Machine
    goes_first: bool  # the generator, where it and a service on this machine want the same core
    runs: list[Run]


def measure(
    options: Options, on_run: Callable[[Load], None] = lambda _: None
) -> tuple[Bench, list[list[Sent]]]:
    """Run every load and return the figures, and beside them the calls of each run.

    `on_run` is told of each load before it starts. Raises ConfigError and InvalidCall for what cannot be sent, before
    anything is, and Unavailable where nobody answers.
    """
    workload = load_workload(options.workload)
    planned = loads(options.arrivals, workload, options.seed)
    kinds = {id(plan.kind): plan.kind for load in planned for plan in load.planned}
    check_calls(options.target, (kind.call() for kind in kinds.values()))
    if not options.url and options.target not in _OURS:
        raise ConfigError(
            f"--target {options.target} is a service of somebody else: say by --url where it is"
        )
    with nullcontext() if options.url else own_stack() as stack, _before_others() as goes_first:
        return uvloop.run(_measure(options, stack, workload, planned, on_run, goes_first=goes_first))


async def _measure(
    options: Options,
    stack: Stack | None,
    workload: Workload,
    planned: list[Load],
    on_run: Callable[[Load], None],
    *,
    goes_first: bool,
) -> tuple[Bench, list[list[Sent]]]:
    machine = this_machine()
    url = stack.url if stack else options.url
    answered_by = await _who_answers(options, url)
    runs: list[Run] = []
    calls: list[list[Sent]] = []
    async with open_target(url, options.target, options.api_key) as target:
        await _warm_up(target, workload, options.patience_s)
        if stack:
            await settle(stack)
        first_s = time.monotonic()
        for load in planned:
            on_run(load)
            before, cpu_s, started_s = _cpu_s(stack), time.process_time(), time.monotonic()
            sent = await run_open_loop(target, load.planned, patience_s=options.patience_s)
            # A run lasts its time, also where its last answer is there before.
            await asyncio.sleep(started_s + load.seconds - time.monotonic())
            generator_cpu_s, after = time.process_time() - cpu_s, _cpu_s(stack)
            run = to_run(
                load.words,
                load.seconds,
                sent,
                started_s=started_s - first_s,
                generator_cpu_s=generator_cpu_s,
                cpu_s={part: after[part] - before.get(part, 0.0) for part in after},
            )
            runs.append(run)
            calls.append(sent)
    bench = Bench(
        how="measured",
        answered_by=answered_by,
        target=options.target,
        url=options.url,
        workload=workload.name,
        seed=options.seed,
        machine=machine,
        goes_first=goes_first,
        runs=runs,
    )
    return bench, calls


async def _who_answers(options: Options, url: str) -> str:
    """What a worker of ours says of itself; the name of the target where it does not tell."""
    if options.target not in _OURS:
        return options.target
    async with SandboxClient(url, api_key=options.api_key, attempts=1) as client:
        status = await client.status()
    return "stand-in" if "stand-in" in json.dumps(status["workers"]) else "jail"


async def _warm_up(target: Target, workload: Workload, patience_s: float) -> None:
    """Raises Unavailable where no call is answered at all: to measure that takes no load."""
    calls = await run_open_loop(target, warm_up(workload), patience_s=patience_s)
    if not any(map(is_answered, calls)):
        call = calls[-1]
        raise Unavailable(f"no call was served before the first run; the last was {call.outcome}: {call.why}")


def _cpu_s(stack: Stack | None) -> dict[str, float]:
    return {part: use.cpu_s for part, use in used_by(stack.pid).items()} if stack else {}


@contextmanager
def _before_others() -> Iterator[bool]:
    """Let the generator go first on cores that it shares with the service, where we may: as root. Says whether it does.

    Callers have cores of their own. Here they would be late whenever the service is busy, by 20 to 30 ms at p99
    instead of 2 to 5. Niceness does not help: a stack is a session, and the kernel shares cores out by session.
    """
    policy, param = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, param)
