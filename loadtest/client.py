"""`python -m loadtest.client`: what `SandboxClient` costs its process for thousands of `run()` at one time.

What is measured: one event loop starts so many `run()` at once and waits for all of their results, a few times. A real
gateway and a real Redis answer, with a stand-in in the worker's place that holds each call for 0.3 s. CPU time is this
process's, user and system, from before the first call to after the last result: of the client, and of the tasks that
call it, which are a caller's own. Connections are counted from outside of the client, as the kernel lists them.
The first round connects and is not counted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from loadtest import budgets
from loadtest.connections import established_to
from loadtest.stack import standin_stack
from loadtest.standin import NAME, PRINTED
from loadtest.terminal import make_console, make_table, print_error, print_json
from loadtest.workloads import KINDS
from sandbox import InternalError, SandboxClient, SandboxError

_HOLD_S = 0.3
_ROUNDS = 3  # that are counted
_LOOK_S = 0.01  # between two counts of the connections


@dataclass(frozen=True, slots=True)
class ClientCost:
    """What a client uses for calls that are all made at once."""

    how: str
    answered_by: str
    calls: int  # at one time
    rounds: int
    cpu_us: float  # of a call
    cpu_budget_us: float
    connections: int  # most at one time
    connections_budget: int
    took_s: float  # a round


def measure_client(calls: int = 10_000) -> ClientCost:
    """Measure with so many calls at once.

    Raises ConfigError when the stack does not start, and InternalError for a result that is not the stand-in's.
    """
    with standin_stack("--hold", str(_HOLD_S)) as stack:
        return asyncio.run(_measure(stack.url, calls))


async def _measure(url: str, calls: int) -> ClientCost:
    async with SandboxClient(url, max_in_flight=calls) as client:
        with _counted(urlsplit(url).port or 0) as counter:
            await _run_all(client, calls)
            started, cpu_s = time.perf_counter(), time.process_time() - counter.cpu_s()
            for _ in range(_ROUNDS):
                await _run_all(client, calls)
            took_s = time.perf_counter() - started
            cpu_s = time.process_time() - counter.cpu_s() - cpu_s
    return ClientCost(
        how="measured",
        answered_by=NAME,
        calls=calls,
        rounds=_ROUNDS,
        cpu_us=1e6 * cpu_s / (calls * _ROUNDS),
        cpu_budget_us=budgets.CLIENT_US,
        connections=counter.most,
        connections_budget=budgets.CLIENT_CONNECTIONS,
        took_s=took_s / _ROUNDS,
    )


async def _run_all(client: SandboxClient, calls: int) -> None:
    code = KINDS["print"].code
    results = await asyncio.gather(*(client.run(code) for _ in range(calls)))
    if wrong := [result for result in results if result.stdout != PRINTED]:
        raise InternalError(
            f"a {NAME} should have answered, and {wrong[0].worker} answered {wrong[0].stdout!r}"
        )


class _Counter(threading.Thread):
    """Counts the connections to a port over and over, in a thread, whose own CPU time is none of the client's."""

    def __init__(self, port: int) -> None:
        super().__init__(name="connections", daemon=True)
        self.most = 0
        self._port = port
        self._told = threading.Event()

    def run(self) -> None:
        """Count until told to stop."""
        while not self._told.wait(_LOOK_S):
            self.most = max(self.most, established_to(self._port))

    def cpu_s(self) -> float:
        """What it has used."""
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def stop(self) -> None:
        """Count no more."""
        self._told.set()
        self.join()


@contextmanager
def _counted(port: int) -> Iterator[_Counter]:
    counter = _Counter(port)
    counter.start()
    try:
        yield counter
    finally:
        counter.stop()


def main(
    calls: Annotated[int, typer.Option(min=1, help="Made at one time.")] = 10_000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
) -> None:
    """Measure the CPU and the connections of one client for so many calls at once."""
    console = Console(stderr=True) if as_json else make_console()
    try:
        cost = measure_client(calls)
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    if as_json:
        print_json(asdict(cost))
        return
    table = make_table(f"{cost.calls} calls at once ({cost.how}; a {cost.answered_by} answers)")
    table.add_column("what")
    for heading in ("figure", "budget"):
        table.add_column(heading, justify="right")
    table.add_row("CPU of the client's process, µs a call", f"{cost.cpu_us:.1f}", f"{cost.cpu_budget_us:.0f}")
    table.add_row("connections, most at one time", str(cost.connections), str(cost.connections_budget))
    table.add_row(f"all answered, s (each held {_HOLD_S:g} s)", f"{cost.took_s:.2f}", "")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
