"""Sends calls as a training job does, through one client, and notes how long each took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil

from sandbox import Answer, SandboxClient, SandboxError, ToolCall


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of a call, and when, on the caller's own monotonic clock."""

    outcome: Answer
    sent_s: float
    answered_s: float

    @property
    def latency_s(self) -> float:
        """The caller's seconds from sending to answer."""
        return self.answered_s - self.sent_s

    @property
    def status(self) -> str:
        """The status of the result, or the name of the error that came instead."""
        outcome = self.outcome
        return type(outcome).__name__ if isinstance(outcome, SandboxError) else outcome.status.value

    @property
    def added_s(self) -> float | None:
        """The seconds that were not the program's own: ways, waiting, jail. None where there is no result."""
        return None if isinstance(self.outcome, SandboxError) else self.latency_s - self.outcome.usage.wall_s


async def ask(client: SandboxClient, call: ToolCall) -> Answered:
    """Send one call and wait for its answer, whatever it is."""
    sent_s = time.perf_counter()
    (outcome,) = await client.run_many([call])
    return Answered(outcome, sent_s, time.perf_counter())


async def ask_all(
    client: SandboxClient,
    calls: Sequence[ToolCall],
    callers: int,
    on_answer: Callable[[], None],
) -> list[Answered]:
    """Send all calls, at most `callers` at a time, and return the answers in the order of the calls."""
    answers: dict[int, Answered] = {}
    waiting = iter(enumerate(calls))

    async def caller() -> None:
        for index, call in waiting:
            answers[index] = await ask(client, call)
            on_answer()

    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return [answers[index] for index in range(len(calls))]


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed; 0 where there is none."""
    ordered = sorted(values)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 0.0
