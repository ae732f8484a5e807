"""`python -m loadtest.judging`: what a judgement of a program costs, and how many a second there are.

Starts a service of its own and sends batches of right submissions: programs that read and print, against ten cases,
which is ten calls each, and functions against five assertions, which is one. CPU is that of each part of the service,
read from /proc, so it holds on a busy machine, too; the rate does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from loadtest.batches import send_all
from loadtest.machine import this_machine
from loadtest.stack import Stack, own_stack, settle
from loadtest.terminal import make_console, make_table, print_error
from sandbox import SandboxError

_BATCH = 32

#: What a submission is judged by, by its name in the table.
TASKS: Mapping[str, dict[str, Any]] = {
    "10 cases": {
        "code": "n = int(input())\nprint(sum(int(word) for word in input().split()[:n]))",
        "cases": [
            {"stdin": f"{n}\n{' '.join(map(str, range(n)))}\n", "expected": f"{n * (n - 1) // 2}\n"}
            for n in range(1, 11)
        ],
    },
    "5 assertions": {
        "code": "def squares(n): return [k * k for k in range(n)]",
        "tests": [f"assert squares({n}) == {[k * k for k in range(n)]}" for n in range(5)],
    },
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of task."""

    judgements: int
    seconds: float
    cpu_s: dict[str, float]

    @property
    def all_ms(self) -> float:
        """CPU of a judgement, all parts together."""
        return sum(self.cpu_s.values()) / self.judgements * 1e3


async def measure(stack: Stack, task: dict[str, Any], judgements: int) -> Measured:
    """Send this task many times. Raises httpx.HTTPError, and ValueError where one is not accepted."""
    waiting = iter([task] * min(_BATCH, judgements - at) for at in range(0, judgements, _BATCH))

    def look(results: list[dict[str, Any]]) -> None:
        if bad := [result for result in results if result.get("verdict") != "accepted"]:
            raise ValueError(f"a right submission was not accepted: {bad[0]}")

    seconds, cpu_s = await send_all(stack, "/v1/judge/batch", waiting, look)
    return Measured(judgements, seconds, cpu_s)


async def _measure_all(stack: Stack, judgements: int) -> dict[str, Measured]:
    await settle(stack)
    return {name: await measure(stack, task, judgements) for name, task in TASKS.items()}


def main(judgements: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 512) -> None:
    """Judge many submissions, and print CPU by part and judgements a second."""
    console = make_console()
    try:
        with own_stack() as stack:
            found = asyncio.run(_measure_all(stack, judgements))
    except SandboxError as exc:
        print_error(console, exc)
        raise typer.Exit(1) from exc
    table = make_table(f"{judgements} judgements of each kind, CPU ms of one")
    for column in ("", *found):
        table.add_column(column, justify="right")
    for part in sorted(next(iter(found.values())).cpu_s):
        table.add_row(part, *(f"{each.cpu_s[part] / judgements * 1e3:.2f}" for each in found.values()))
    table.add_row("all", *(f"{each.all_ms:.2f}" for each in found.values()))
    table.add_row("a second here", *(f"{judgements / each.seconds:.0f}" for each in found.values()))
    table.add_row("a second on two cores alone", *(f"{2e3 / each.all_ms:.0f}" for each in found.values()))
    console.print(table)
    console.print(f"load of the machine: {this_machine().load_1min:.1f}")


if __name__ == "__main__":
    typer.run(main)
