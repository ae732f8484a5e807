"""The open loop: sends calls at times that were fixed before the first of them, whatever the service does.

A closed loop waits for answers before it asks again, so a service that stalls is asked less while it does, and its
worst moments are missing from the figures (coordinated omission). Here a stall meets the calls that real callers
would have sent meanwhile, and each of them counts its latency from the moment at which it should have been sent.

A generator can be slow itself: it says of every call how late it was, and that is part of the latency, too. What it
takes to get to an answer it cannot tell, but a loop that is late for answers is late for calls as well.

One task keeps the times and starts a task for each call; nothing that a call waits for holds the next one back. A call
that is never answered ends after `patience_s`, which is an outcome like any other.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from loadtest.clock import Clock, KernelClock
from loadtest.workloads import Kind
from sandbox import CallStatus, ToolCall

#: Outcomes beside the words of `CallStatus`, which stand for what the service said of the program.
REFUSED = "refused"  # 429, 503: it takes no more for now
CONNECTION_ERROR = "connection_error"  # no connection, or one that broke
NO_ANSWER = "no_answer"  # within the generator's patience
UNREADABLE = "unreadable"  # an answer in no shape that the adapter knows, or longer than it may be
WRONG_OUTPUT = "wrong_output"  # the status that was to come, and another text

#: Longer than any answer of ours takes: a deadline (60 s), a second, and the way.
PATIENCE_S = 65.0

_VERDICTS = {status.value for status in CallStatus if not status.is_fault}


@dataclass(frozen=True, slots=True)
class Planned:
    """A call that will be sent."""

    at_s: float  # from the start of the run
    kind: Kind


@dataclass(frozen=True, slots=True)
class Reply:
    """What a service made of a call, in our words; what it does not tell is None."""

    outcome: str
    stdout: str | None = None
    cpu_s: float | None = None
    wall_s: float | None = None
    queue_s: float | None = None
    why: str = ""  # the service's own words for what is no verdict; nobody we trust wrote them


@dataclass(frozen=True, slots=True)
class Sent:
    """A call that was sent, and what came of it."""

    kind: str
    at_s: float  # when it was to be sent, from the start of the run
    late_s: float  # how much later the generator got to it
    latency_s: float  # from when it was to be sent until its end
    outcome: str
    is_right: bool  # what had to come of such a program; of one of which nothing is known, any verdict
    cpu_s: float | None = None  # of the program, as the service tells it
    wall_s: float | None = None
    queue_s: float | None = None
    why: str = ""


class Target(Protocol):
    """A service that is measured."""

    async def ask(self, call: ToolCall) -> Reply:
        """Send one call. Whatever the service or the network does to it is a reply, and nothing is raised for it."""
        ...


async def run_open_loop(
    target: Target,
    planned: Iterable[Planned],
    *,
    patience_s: float = PATIENCE_S,
    clock: Clock | None = None,
) -> list[Sent]:
    """Send each call at its time, and wait for the last answer. What was sent is in the order of the plan."""
    # All that can be made before the start is.
    calls = [(plan, plan.kind.call()) for plan in sorted(planned, key=lambda plan: plan.at_s)]
    with _few_collections():
        if clock is not None:
            return await _send_all(target, calls, patience_s, clock)
        with KernelClock() as kernel_clock:
            return await _send_all(target, calls, patience_s, kernel_clock)


async def _send_all(
    target: Target, calls: list[tuple[Planned, ToolCall]], patience_s: float, clock: Clock
) -> list[Sent]:
    start = clock.now()
    async with asyncio.TaskGroup() as group:
        tasks = []
        for plan, call in calls:
            await clock.sleep_until(start + plan.at_s)
            tasks.append(group.create_task(_send(target, plan, call, start, patience_s, clock)))
    return [task.result() for task in tasks]


async def _send(
    target: Target, plan: Planned, call: ToolCall, start: float, patience_s: float, clock: Clock
) -> Sent:
    late_s = clock.now() - start - plan.at_s  # here and not where the task was made: others may go before it
    try:
        async with asyncio.timeout(patience_s):
            reply = await target.ask(call)
    except TimeoutError:
        reply = Reply(NO_ANSWER)
    latency_s = clock.now() - start - plan.at_s
    outcome, is_right = _judge(plan.kind, reply)
    return Sent(
        kind=plan.kind.name,
        at_s=plan.at_s,
        late_s=late_s,
        latency_s=latency_s,
        outcome=outcome,
        is_right=is_right,
        cpu_s=reply.cpu_s,
        wall_s=reply.wall_s,
        queue_s=reply.queue_s,
        why=reply.why,
    )


def _judge(kind: Kind, reply: Reply) -> tuple[str, bool]:
    if kind.status is None:
        return reply.outcome, reply.outcome in _VERDICTS
    if reply.outcome != kind.status:
        return reply.outcome, False
    if kind.stdout is not None and reply.stdout != kind.stdout:
        return WRONG_OUTPUT, False
    return reply.outcome, True


@contextmanager
def _few_collections() -> Iterator[None]:
    """Let no collection of garbage go through what was there before the run, which takes longer than a call."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
