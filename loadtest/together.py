"""Very many calls in flight together, counted from three sides while they are.

Theory of operation. Gateways and Redis are the real ones; a stand-in (`standin.py`) takes the place of the workers,
and takes nothing before one call more waits than the clients send. That last call is ours, and it is the gate: we send
it when the queue itself counts all the others as waiting, and so none of them has been taken, let alone answered. At
that moment the kernel is asked for the connections and for everybody's memory. Then every call is answered, and an
oracle holds the answers against the calls (`oracle.py`).

The clients are processes of their own (`crowds.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from pydantic import TypeAdapter
from rich.console import Console

from loadtest.connections import established
from loadtest.crowd import Spec
from loadtest.crowds import Crowd, all_reports, started
from loadtest.oracle import judge, most_at_once
from loadtest.processes import Use, rss_bytes, used_by
from loadtest.sizing import Plan
from loadtest.stack import Stack, standin_stack
from loadtest.standin import NAME, PRINTED
from loadtest.terminal import make_table
from loadtest.timing import percentile
from sandbox import SandboxClient, ToolCall, Unavailable
from sandbox.calls import MIB
from sandbox.queue import Backlog

CODE = "print('held')"  # a program that would bring what the stand-in answers

_DEADLINE_S = 3600.0  # the highest that a service allows by default; see the help of the stand-in's `up`
_LOOK_S = 0.05  # how often the queue is asked how many wait
_STALL_S = 20.0  # without one call more that waits
_BACKLOG = TypeAdapter(Backlog)


@dataclass(frozen=True, slots=True)
class Together:
    """What was measured."""

    calls: int
    connections: int
    gateways: int
    clients: int
    hold_s: float
    in_flight_peak: int  # calls that clients had sent and not been answered at one moment
    waiting_at_gate: int  # of them, as the queue counted before the first was taken
    connections_at_gate: int  # established, as the kernel counted then
    answered: int  # right, and once
    errors: int  # calls that were not, and answers that belong to none
    unanswered: int
    duplicates: int
    foreign: int
    wrong: int
    errors_by_name: dict[str, int]  # of what came instead of answers
    mean_s: float  # from before the connection to the answer, like the two below
    p50_s: float
    p99_s: float
    queued_s: float  # from the first connection until the queue held all calls
    counted_s: float  # from then to the gate
    answered_s: float  # from the gate to the last answer
    rss_bytes: int  # of gateways, Redis and stand-in at the gate
    rss_idle_bytes: int  # before the first connection
    client_rss_bytes: int  # at the gate
    cpu_s_per_call: dict[str, float]  # by part
    note: str
    answered_by: str = NAME
    how: str = "measured"

    @property
    def is_proved(self) -> bool:
        """All calls were in flight at one moment, whoever counted, and each got its one answer."""
        peaks = self.in_flight_peak, self.waiting_at_gate
        is_full = min(peaks) >= self.calls and self.connections_at_gate >= self.connections
        return is_full and self.answered == self.calls and not self.errors


def measure(plan: Plan, size: int, hold_s: float, say: Callable[[str], None]) -> Together:
    """Send `size` calls on each connection of the plan at once and wait for all answers.

    Raises Unavailable when they cannot all wait at once, ConfigError when the stack does not start.
    """
    calls = plan.connections * size
    if plan.note:
        say(plan.note)
    options = {"gateways": plan.gateways, "hold": hold_s, "after": calls + 1}
    with standin_stack(
        *(word for name, value in options.items() for word in (f"--{name}", str(value)))
    ) as stack:
        say(f"{calls} calls on {plan.connections} connections from {len(plan.crowds)} client process(es)")
        return asyncio.run(_measure(stack, plan, size, hold_s, say))


async def _measure(
    stack: Stack, plan: Plan, size: int, hold_s: float, say: Callable[[str], None]
) -> Together:
    calls = plan.connections * size
    idle = used_by(stack.pid)
    specs = [
        _spec(stack, plan, size, number, requests) for number, requests in enumerate(plan.crowds, start=1)
    ]
    async with SandboxClient(stack.url) as client, started(specs) as crowds:
        waiting = await _until_all_wait(client, crowds, calls)
        queued_at = time.monotonic()
        at_gate = used_by(stack.pid)
        sources = {spec.source for spec in specs}
        connections = established(urlsplit(stack.url).port or 0, sources)
        client_rss_bytes = sum(rss_bytes(crowd.process.pid) for crowd in crowds)
        say(f"all {calls} wait in the queue, and none has been taken: now they are")
        gate_at = time.monotonic()
        gate = asyncio.create_task(client.run_many([ToolCall(code=CODE, deadline_s=_DEADLINE_S)]))
        try:
            reports = await all_reports(crowds)
            used = used_by(stack.pid)
        finally:
            gate.cancel()
            await asyncio.wait({gate})
    sent = {name: call for crowd, report in reports for name, call in report.calls(crowd.spec)}
    heard = [answer for crowd, report in reports for answer in report.answers(crowd.spec)]
    verdict = judge(sent, heard)
    answered = len(verdict.latencies_s)
    errors: Counter[str] = sum((report.errors for _, report in reports), Counter())
    cpu_s = {part: use.cpu_s - idle.get(part, Use()).cpu_s for part, use in used.items()}
    cpu_s["clients"] = sum(report.cpu_s for _, report in reports)
    begun_at = min(call.begun_s for call in sent.values())
    return Together(
        calls=calls,
        connections=plan.connections,
        gateways=plan.gateways,
        clients=len(crowds),
        hold_s=hold_s,
        in_flight_peak=most_at_once(sent.values(), heard),
        waiting_at_gate=waiting,
        connections_at_gate=connections,
        answered=answered,
        errors=calls - answered + verdict.foreign,
        unanswered=verdict.unanswered,
        duplicates=verdict.duplicates,
        foreign=verdict.foreign,
        wrong=verdict.wrong,
        errors_by_name=dict(errors),
        mean_s=sum(verdict.latencies_s) / max(1, answered),
        p50_s=percentile(verdict.latencies_s, 0.5),
        p99_s=percentile(verdict.latencies_s, 0.99),
        queued_s=queued_at - begun_at,
        counted_s=gate_at - queued_at,
        answered_s=max((answer.at_s for answer in heard), default=gate_at) - gate_at,
        rss_bytes=sum(use.rss_bytes for use in at_gate.values()),
        rss_idle_bytes=sum(use.rss_bytes for use in idle.values()),
        client_rss_bytes=client_rss_bytes,
        cpu_s_per_call={part: seconds / calls for part, seconds in cpu_s.items()},
        note=plan.note,
    )


def _spec(stack: Stack, plan: Plan, size: int, number: int, requests: int) -> Spec:
    url = urlsplit(stack.url)
    return Spec(
        host=url.hostname or "",
        port=url.port or 0,
        source=f"127.0.0.{number + 1}",
        name=f"c{number}",
        requests=requests,
        size=size,
        code=CODE,
        deadline_s=_DEADLINE_S,
        printed=PRINTED,
        worker=NAME,
        burst=plan.burst,
        queue=plan.queue,
    )


async def _until_all_wait(client: SandboxClient, crowds: list[Crowd], calls: int) -> int:
    """Return when the queue counts all calls as waiting, and its count. Raises Unavailable when that will not be."""
    most, grown_at = 0, time.monotonic()
    while (waiting := await _waiting(client)) < calls:
        for crowd in crowds:
            if crowd.reading.done():
                crowd.reading.result()
                raise Unavailable("calls were answered before the first was taken")
            if crowd.trouble is not None:
                raise Unavailable(f"not all calls could wait at once: {crowd.trouble}")
        now = time.monotonic()
        if waiting > most:
            most, grown_at = waiting, now
        elif now - grown_at > _STALL_S:
            raise Unavailable(f"{most} of {calls} calls wait, and none more came for {_STALL_S:.0f} s")
        await asyncio.sleep(_LOOK_S)  # nobody tells us, so we ask again
    return waiting


async def _waiting(client: SandboxClient) -> int:
    """How many calls wait in the queue, and none is taken; 0 where the gateway that was asked cannot tell now."""
    told = (await client.status())["backlog"]
    if told is None:
        return 0
    backlog = _BACKLOG.validate_python(told)
    if backlog.running:
        raise Unavailable(f"{backlog.running} calls were taken before all waited")
    return backlog.waiting


def show(console: Console, title: str, it: Together) -> None:
    """Print it for a person."""
    table = make_table(f"{title} ({it.how}, answered by a {it.answered_by})")
    table.add_column("")
    table.add_column("", justify="right")
    table.show_header = False
    names = ", ".join(f"{name} {count}" for name, count in it.errors_by_name.items())
    more_bytes = (it.rss_bytes - it.rss_idle_bytes) / it.calls
    for what, figure in (
        ("calls", it.calls),
        ("connections, gateways, clients", f"{it.connections}, {it.gateways}, {it.clients}"),
        ("unanswered at one moment: the clients' count", it.in_flight_peak),
        ("waiting then, none taken: the queue's count", it.waiting_at_gate),
        ("connections then: the kernel's count", it.connections_at_gate),
        ("answered, right and once", it.answered),
        (
            "unanswered, doubled, foreign, wrong",
            f"{it.unanswered}, {it.duplicates}, {it.foreign}, {it.wrong}",
        ),
        ("errors", names or "none"),
        ("until all were queued", f"{it.queued_s:.2f} s"),
        ("all held in the queue, to be counted", f"{it.counted_s:.2f} s"),
        (f"from the first take to the last answer ({it.hold_s:g} s held)", f"{it.answered_s:.2f} s"),
        ("latency with all of that: mean", f"{it.mean_s:.2f} s"),
        ("p50, p99", f"{it.p50_s:.2f} s, {it.p99_s:.2f} s"),
        ("memory of gateways, Redis, stand-in", f"{it.rss_bytes / MIB:.0f} MiB"),
        ("of it for each call in flight", f"{more_bytes / 1024:.1f} KiB"),
        ("memory of the clients", f"{it.client_rss_bytes / MIB:.0f} MiB"),
        *((f"CPU of each call: {part}", f"{1e6 * cpu:.0f} µs") for part, cpu in it.cpu_s_per_call.items()),
    ):
        table.add_row(what, str(figure))
    console.print(table)
