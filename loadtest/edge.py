"""`python -m loadtest.edge`: the CPU that gateway, queue and client use for a call, whatever the jail costs.

What is measured: a real gateway and a real Redis, and a stand-in in a worker's place that answers every call at once.
This process sends ready-made requests over as many connections as it has requests open, and only looks whether each
answer is the stand-in's, so its own share is what HTTP costs a client that does nothing else. CPU time is each
process's own, user and system, from before the first request to after the last answer; what others do on the machine
adds a little to that, so compare within one run.

- `single`: `POST /v1/run`, 64 open at a time.
- `batch`: `POST /v1/batch` with 64 calls each, answered line by line, 8 open at a time.
- `queue`: the four steps of `CallQueue` that each call passes, 64 calls at a time, in this process, with a Redis of
  its own: what gateway and worker pay for the queue, and what Redis does for both.

The budgets are goals, on two cores of a virtual machine.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, NamedTuple
from uuid import uuid4

import aiohttp
import typer
import uvloop
from rich.console import Console

from loadtest import budgets
from loadtest.processes import used_by
from loadtest.stack import Stack, standin_stack
from loadtest.standin import NAME, PRINTED
from loadtest.terminal import make_console, make_table, print_error, print_json
from loadtest.workloads import KINDS
from sandbox.calls import CallStatus, ToolResult
from sandbox.errors import InternalError, SandboxError
from sandbox.queue import CallQueue, Outcome, QueuedCall
from sandbox.redis_server import RedisServer, private_directory, wait_ready
from sandbox.settings import RedisSettings

_AT_A_TIME = 64  # calls in a batch, and in a round trip of the queue's own measurement
_WARM_UP = 16  # times as many, before anything is measured
_REDIS_READY_S = 10.0
_GATEWAY = "edge"  # names the reply stream of the queue's own measurement


@dataclass(frozen=True, slots=True)
class Way:
    """A way by which calls come, and the CPU of each part for one of them."""

    name: str
    calls: int
    calls_per_s: float
    gateway_us: float
    redis_us: float
    standin_us: float
    client_us: float
    gateway_budget_us: float


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a call through the queue, and its CPU."""

    name: str
    python_us: float
    redis_us: float


@dataclass(frozen=True, slots=True)
class Queue:
    """All steps of a call through the queue."""

    calls: int
    at_a_time: int
    steps: tuple[Step, ...]
    cpu_us: float
    budget_us: float


@dataclass(frozen=True, slots=True)
class Edge:
    """What a call costs around the jail."""

    how: str
    answered_by: str
    ways: tuple[Way, ...]
    queue: Queue


def measure_edge(calls: int = 16_384) -> Edge:
    """Measure with so many calls by each way, and as many through the queue alone.

    Raises ConfigError when the stack does not start, and InternalError for an answer that is not the stand-in's.
    """
    with standin_stack("--hold", "0") as stack:
        ways = uvloop.run(_measure_ways(stack, calls))
    with _redis() as (url, pid):
        queue = uvloop.run(_measure_queue(RedisSettings(url=url), pid, calls))
    return Edge("measured", NAME, ways, queue)


class _Shape(NamedTuple):
    """How calls are sent."""

    name: str
    path: str
    calls: int  # in a request
    open: int  # requests at a time
    budget_us: float

    def bodies(self, calls: int) -> list[bytes]:
        """As many calls as whole requests can have, each with an id of its own."""
        code = json.dumps(KINDS["print"].code).encode()
        requests = range(calls // self.calls)
        singles = (
            [b'{"id":"%b","code":%b}' % (uuid4().hex.encode(), code) for _ in range(self.calls)]
            for _ in requests
        )
        if self.calls == 1:
            return [body for (body,) in singles]
        return [b'{"calls":[%b]}' % b",".join(bodies) for bodies in singles]


_SINGLE = _Shape("single", "/v1/run", 1, 64, budgets.GATEWAY_SINGLE_US)
_BATCH = _Shape("batch", "/v1/batch", _AT_A_TIME, 8, budgets.GATEWAY_BATCH_US)


async def _measure_ways(stack: Stack, calls: int) -> tuple[Way, ...]:
    connections = aiohttp.TCPConnector(limit=_SINGLE.open)
    async with aiohttp.ClientSession(stack.url, connector=connections) as http:
        for shape in (_SINGLE, _BATCH):
            await _send_all(http, shape, shape.bodies(_WARM_UP * _AT_A_TIME))
        return tuple([await _measure_way(stack, http, shape, calls) for shape in (_SINGLE, _BATCH)])


async def _measure_way(stack: Stack, http: aiohttp.ClientSession, shape: _Shape, calls: int) -> Way:
    bodies = shape.bodies(calls)
    used, cpu_s, started = used_by(stack.pid), time.process_time(), time.perf_counter()
    await _send_all(http, shape, bodies)
    took_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    used_since = used_by(stack.pid)
    sent = len(bodies) * shape.calls

    def share_us(part: str) -> float:
        return 1e6 * (used_since[part].cpu_s - used[part].cpu_s) / sent

    return Way(
        name=shape.name,
        calls=sent,
        calls_per_s=sent / took_s,
        gateway_us=share_us("gateway"),
        redis_us=share_us("redis"),
        standin_us=share_us(NAME),
        client_us=1e6 * cpu_s / sent,
        gateway_budget_us=shape.budget_us,
    )


async def _send_all(http: aiohttp.ClientSession, shape: _Shape, bodies: Sequence[bytes]) -> None:
    """Send all bodies, and see to it that each has as many right answers as it has calls."""
    waiting = iter(bodies)
    headers = {"content-type": "application/json", "accept": "application/x-ndjson, application/json"}

    async def send() -> None:
        for body in waiting:
            async with http.post(shape.path, data=body, headers=headers) as response:
                answer = await response.read()
            if answer.count(_RIGHT) != shape.calls:
                raise InternalError(f"{shape.path} answered {response.status} and {answer[:200]!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(shape.open):
            group.create_task(send())


#: In each answer of the stand-in, once.
_RIGHT = b'"stdout":%b' % json.dumps(PRINTED).encode()


@contextmanager
def _redis() -> Iterator[tuple[str, int]]:
    """A Redis of our own: its URL and its pid."""
    server = RedisServer.find()
    with private_directory() as (directory, fd):
        process = subprocess.Popen(server.command(directory), stdout=subprocess.DEVNULL, pass_fds=[fd])
        try:
            url = server.url(directory)
            asyncio.run(wait_ready(url, _REDIS_READY_S))
            yield url, process.pid
        finally:
            process.terminate()
            process.wait()


async def _measure_queue(settings: RedisSettings, redis_pid: int, calls: int) -> Queue:
    async with _opened(settings) as gateway, _opened(settings) as worker:
        meter = _Meter(redis_pid)
        for _ in range(_WARM_UP):
            await _pass(gateway, worker, _Meter(redis_pid))
        rounds = max(1, calls // _AT_A_TIME)
        for _ in range(rounds):
            await _pass(gateway, worker, meter)
    steps = meter.steps(rounds * _AT_A_TIME)
    cpu_us = sum(step.python_us + step.redis_us for step in steps)
    return Queue(rounds * _AT_A_TIME, _AT_A_TIME, steps, cpu_us, budgets.QUEUE_US)


@asynccontextmanager
async def _opened(settings: RedisSettings) -> AsyncIterator[CallQueue]:
    queue = CallQueue(settings)
    try:
        await queue.open()
        yield queue
    finally:
        await queue.close()


async def _pass(gateway: CallQueue, worker: CallQueue, meter: _Meter) -> None:
    """Lead one load of calls through the queue."""
    now_ms = gateway.now_ms()
    calls = [KINDS["print"].call() for _ in range(_AT_A_TIME)]
    queued = [QueuedCall(call, gateway.record("edge", call.id), now_ms, now_ms + 60_000) for call in calls]
    with meter.reading("put"):
        await gateway.put(_GATEWAY, queued)
    with meter.reading("take"):
        taken = await worker.take(NAME, _AT_A_TIME, 0)
    done = [
        Outcome(
            held, ToolResult(id=held.call.id, status=CallStatus.OK, exit_code=0, stdout=PRINTED, worker=NAME)
        )
        for held in taken
    ]
    with meter.reading("settle"):
        await worker.settle(done)
    with meter.reading("replies"):
        replies = await gateway.replies(_GATEWAY)
    if len(replies) != _AT_A_TIME:
        raise InternalError(f"{len(replies)} of {_AT_A_TIME} calls have come back through the queue")


class _Meter:
    """CPU seconds of this process and of Redis, by what we do meanwhile."""

    def __init__(self, redis_pid: int) -> None:
        # The kernel's number for the clock of all CPU time of another process: clock_getcpuclockid(3), which Python
        # has for threads only. The counters in /proc are ticks of 10 ms, longer than a step.
        self._redis_clock = (~redis_pid << 3) | 2
        self._used: dict[str, tuple[float, float]] = {}

    @contextmanager
    def reading(self, step: str) -> Iterator[None]:
        """Count what is used inside of the block."""
        python_s, redis_s = time.process_time(), time.clock_gettime(self._redis_clock)
        yield
        before = self._used.get(step, (0.0, 0.0))
        python_s, redis_s = time.process_time() - python_s, time.clock_gettime(self._redis_clock) - redis_s
        self._used[step] = (before[0] + python_s, before[1] + redis_s)

    def steps(self, calls: int) -> tuple[Step, ...]:
        """What each step has used for one of so many calls."""
        return tuple(
            Step(name, 1e6 * python_s / calls, 1e6 * redis_s / calls)
            for name, (python_s, redis_s) in self._used.items()
        )


def main(
    calls: Annotated[int, typer.Option(min=_AT_A_TIME, help="Calls by each way.")] = 16_384,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    """Measure the CPU of gateway, queue and client for a call, with a stand-in in the worker's place."""
    console = Console(stderr=True) if as_json else make_console()
    try:
        edge = measure_edge(calls)
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    if as_json:
        print_json(asdict(edge))
    else:
        _print_ways(console, edge)
        _print_queue(console, edge.queue)


def _print_ways(console: Console, edge: Edge) -> None:
    table = make_table(f"Through HTTP, µs of CPU a call ({edge.how}; a {edge.answered_by} answers)")
    table.add_column("calls come")
    for heading in ("calls", "calls/s", "gateway", "budget", "Redis", edge.answered_by, "client"):
        table.add_column(heading, justify="right")
    for way in edge.ways:
        figures = (way.gateway_us, way.gateway_budget_us, way.redis_us, way.standin_us, way.client_us)
        table.add_row(
            way.name, str(way.calls), f"{way.calls_per_s:.0f}", *(f"{figure:.1f}" for figure in figures)
        )
    console.print(table)


def _print_queue(console: Console, queue: Queue) -> None:
    table = make_table(f"The queue alone, µs of CPU a call, {queue.at_a_time} calls at a time (measured)")
    table.add_column("step")
    for heading in ("Python", "Redis", "together", "budget"):
        table.add_column(heading, justify="right")
    for step in queue.steps:
        table.add_row(
            step.name,
            *(f"{figure:.1f}" for figure in (step.python_us, step.redis_us, step.python_us + step.redis_us)),
        )
    python_us = sum(step.python_us for step in queue.steps)
    redis_us = sum(step.redis_us for step in queue.steps)
    table.add_row(
        "all", f"{python_us:.1f}", f"{redis_us:.1f}", f"{queue.cpu_us:.1f}", f"{queue.budget_us:.1f}"
    )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
