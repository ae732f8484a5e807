"""`python -m tests.system.chaos`: a whole service under load, whose parts die all the time, and what its callers saw.

Theory of operation. One `sandbox up` of our own: two gateways, three workers with short leases, a Redis. One task
sends requests at moments fixed in advance, whatever has become of those before (`plan.requests`); another one kills,
asks to end, and freezes processes (`plan.faults`); both follow from the seed. Every attempt and answer goes to the
oracle, which knows what each program must print. At the end nothing may be left: in Redis when no call is open any
more, and on the machine when the service has ended.

We signal nobody but descendants of our own supervisor, through a pidfd whose process was looked at after it was
opened, so that a number which was given out again is none of theirs. What we have frozen goes on when we end, however
we end; SIGINT and SIGTERM end us in this order too.

The last line on stdout is one JSON object. Exit code 0: calls were answered, faults were done, and `duplicates`,
`wrong` and `lost` are 0 and `leftovers` is empty. 130: interrupted.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from .callers import Callers
from .leftovers import in_redis, mounts_of_ours, on_machine, settled
from .oracle import Ending, Oracle, fault_of
from .plan import FAULTS, Request, Step, faults, requests
from .processes import Process, family, until
from .stack import Stack

GATEWAYS, WORKERS, SLOTS = 2, 3, 8
LEASE_S = 2.5
#: How long callers send a call again whose connection broke.
PATIENCE_S = 30.0
#: What comes of a fault that is done in a moment is over by then: a lease, and a look for what has none.
EFFECT_S = 4.0
REPORT_S = 5.0
#: How long we look for somebody whom a fault can befall: no init is there while no program runs.
FIND_S = 2.0


@dataclass(slots=True)
class Done:
    """A fault that was done, and the time in which it could be felt."""

    name: str
    begin: float
    end: float


class Chaos:
    """One run against one stack."""

    def __init__(self, stack: Stack, oracle: Oracle) -> None:
        self.oracle = oracle
        self.done: list[Done] = []
        self.workers: set[int] = set()  # all that there ever were
        self.worst_lag_s = 0.0  # of ourselves: how late a request was sent
        self._stack = stack
        self._callers = Callers(stack.url, oracle)
        self._frozen: set[Process] = set()
        self._start = time.monotonic()

    async def run(self, steps: list[Step], sent: list[Request]) -> None:
        """Do all of it, and return when the last caller has its answer or has given up."""
        self._start = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                report = group.create_task(self._report())
                async with asyncio.TaskGroup() as parts:
                    parts.create_task(self._send_all(sent))
                    parts.create_task(self._befall_all(steps))
                report.cancel()
        finally:
            for process in self._frozen:
                send_signal(process, signal.SIGCONT)
            await self._callers.close()

    # ---- calls ----

    async def _send_all(self, sent: list[Request]) -> None:
        async with asyncio.TaskGroup() as group:
            for request in sent:
                await self._until(request.at_s)
                self.worst_lag_s = max(self.worst_lag_s, self._at_s() - request.at_s)
                group.create_task(self._send(request))

    async def _send(self, request: Request) -> None:
        for _ in range(1 + request.asks_again):
            await self._callers.send(
                request.calls,
                way=request.way,
                patience_s=0.0 if request.leave_after_s is not None else PATIENCE_S,
                leave_after_s=request.leave_after_s,
            )

    # ---- faults ----

    async def _befall_all(self, steps: list[Step]) -> None:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                await self._until(step.at_s)
                group.create_task(self._befall(step))

    async def _befall(self, step: Step) -> None:
        fault = FAULTS[step.fault]
        victim = await self._find(fault.target, step.share)
        if victim is None or not send_signal(victim, signal.Signals[f"SIG{fault.signal}"]):
            say(f"{step}: nobody is there for it")
            return
        begin = time.monotonic()
        say(f"{step}: process {victim.pid}")
        self.done.append(Done(step.fault, begin, begin + max(step.lasts_s, EFFECT_S)))
        if fault.signal == "STOP":
            self._frozen.add(victim)
            await asyncio.sleep(step.lasts_s)
            send_signal(victim, signal.SIGCONT)
            self._frozen.discard(victim)
        elif fault.target == "redis":
            with self.oracle.forgetting():
                await self._end_of(victim)
        elif fault.target == "gateway":
            # Its listening socket is the supervisor's, and connections wait in it for the next gateway, as soon as this
            # one takes none any more.
            await self._end_of(victim)
            mark = len(self._stack.log)
            await asyncio.to_thread(self._stack.wait_log, mark, "listening", program="gateway")
        if fault.target == "gateway":
            self.oracle.stood_still(begin, time.monotonic())
        elif fault.target == "redis":
            await asyncio.to_thread(until, self._is_ready, "Redis", 60)
            self.oracle.had_no_redis(begin, time.monotonic())

    def _is_ready(self) -> bool:
        try:
            return self._stack.is_ready()
        except httpx.TransportError:  # of a gateway that was killed meanwhile
            return False

    async def _end_of(self, victim: Process) -> None:
        await asyncio.to_thread(until, lambda: not victim.lives, f"the end of {victim}", 60)

    async def _find(self, target: str, share: float) -> Process | None:
        end = time.monotonic() + FIND_S
        while not (there := await asyncio.to_thread(targets, self._stack.pid, target)):
            if time.monotonic() > end:
                return None
            await asyncio.sleep(0.01)  # nothing announces a process
        return there[int(share * len(there))]

    # ---- what a person sees ----

    async def _report(self) -> None:
        next_s = REPORT_S
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(0.5)
            if self._at_s() > next_s:
                counts = self.oracle.count()
                say(
                    f"{self._at_s():6.1f} s  answered {counts.answered}, faults {sum(counts.faults.values())}, "
                    f"refused {counts.refused}, sent again {counts.sent_again}; "
                    f"duplicates {counts.duplicates}, wrong {counts.wrong}, lost {counts.lost}"
                )
                next_s += REPORT_S

    def _look(self) -> None:
        """Keep in mind who was there, to know who has to be gone."""
        self._stack.processes()
        self.workers.update(self._stack.workers)

    def _at_s(self) -> float:
        return time.monotonic() - self._start

    async def _until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._at_s()))


def targets(supervisor: int, target: str) -> list[Process]:
    """The processes of a stack that a kind of fault can befall, the oldest first."""
    tree = family(supervisor)
    children = [process for process in tree if process.parent == supervisor]
    workers = [process for process in children if "-m worker" in process.command]
    nsjails = _below(workers, tree, "nsjail")
    forkservers = _below(nsjails, tree, "forkserver")
    found = {
        "gateway": [process for process in children if "-m gateway" in process.command],
        "worker": workers,
        "redis": [process for process in children if "redis.sock" in process.command],
        "nsjail": nsjails,
        "forkserver": forkservers,
        "init": [process for process in _below(forkservers, tree, "init") if process.command == "init"],
    }
    return sorted(found[target], key=lambda process: (process.started, process.pid))


def _below(parents: list[Process], tree: list[Process], word: str) -> list[Process]:
    pids = {process.pid for process in parents}
    return [process for process in tree if process.parent in pids and word in process.command]


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Send a signal to this life of a process, and to no other; False when it has ended."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not process.lives:
            return False
        with suppress(ProcessLookupError):  # between the look and the signal; the pidfd makes it harmless
            signal.pidfd_send_signal(pidfd, number)
            return True
        return False
    finally:
        os.close(pidfd)


def by_fault(oracle: Oracle, done: list[Done]) -> dict[str, dict[str, Any]]:
    """For each kind of fault: how often, and the worst latency and the faults of calls that were open meanwhile.

    Two faults that last at one time both have the calls of that time.
    """
    told: dict[str, dict[str, Any]] = {
        name: {"times": times, "worst_latency_s": 0.0, "faults": Counter()}
        for name, times in sorted(Counter(each.name for each in done).items())
    }
    for attempt in oracle.attempts():
        if not attempt.answers:
            continue
        at, body = attempt.answers[0]
        word = "refused" if attempt.ending is Ending.REFUSED else fault_of(body)
        for name in {each.name for each in done if attempt.sent_at < each.end and at > each.begin}:
            told[name]["worst_latency_s"] = max(told[name]["worst_latency_s"], round(at - attempt.sent_at, 2))
            if word is not None:
                told[name]["faults"][word] += 1
    return told


def main(
    seconds: Annotated[float, typer.Option(min=15, help="How long calls are sent.")] = 600.0,
    seed: Annotated[int | None, typer.Option(help="The same plan again. [default: from the clock]")] = None,
) -> None:
    """Kill, end and freeze the parts of a service under load, and hold every answer against what it must be."""
    seed = int(time.time()) if seed is None else seed
    say(f"seed {seed}, {seconds:g} s")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    raise typer.Exit(_run(seed, seconds))


def _run(seed: int, seconds: float) -> int:
    mounts = mounts_of_ours()
    options = ("--gateways", str(GATEWAYS), "--workers", str(WORKERS), "--slots", str(SLOTS))
    stack = Stack(*options, SANDBOX_WORKER__LEASE_S=str(LEASE_S))
    chaos = Chaos(stack, Oracle())
    try:
        with asyncio.Runner() as runner:
            runner.run(chaos.run(faults(seed, seconds), requests(seed, seconds)))
        left = _leftovers(chaos, stack, mounts)
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (AssertionError, ExceptionGroup) as exc:  # it does not serve again, or we have a mistake in us
        say("".join(traceback.format_exception(exc)) + stack.tail())
        left = [f"the run broke off: {exc}"]
    finally:
        stack.close()
    return _tell(chaos, seed, seconds, left)


def _leftovers(chaos: Chaos, stack: Stack, mounts: set[str]) -> list[str]:
    until(
        lambda: stack.is_ready() and len(stack.worker_ids()) == WORKERS, "the whole stack, as it was at first"
    )
    with stack.redis_client() as client:
        left = settled(lambda: in_redis(client))
    chaos.workers.update(stack.workers)
    if code := stack.end():
        left.append(f"the supervisor's exit code {code}")
    return left + settled(lambda: on_machine(stack, chaos.workers, mounts))


def _tell(chaos: Chaos, seed: int, seconds: float, left: list[str]) -> int:
    counts = chaos.oracle.count()
    for sentence in [*counts.complaints[:50], *(f"left behind: {each}" for each in left)]:
        say(sentence)
    told = counts.figures() | {
        "seed": seed,
        "seconds": seconds,
        "worst_lag_s": round(chaos.worst_lag_s, 2),
        "leftovers": left,
        "by_fault": by_fault(chaos.oracle, chaos.done),
    }
    print(json.dumps(told), flush=True)
    is_well = counts.is_clean and not left and counts.answered > 0 and len(chaos.done) > 0
    return 0 if is_well else 1


def say(line: str) -> None:
    """Tell a person."""
    print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
