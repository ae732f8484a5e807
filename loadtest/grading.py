"""`python -m loadtest.grading`: what a grade of mathematics costs, and how many a second there are.

Starts a service of its own and sends batches of distinct tasks: of 100, 60 whole numbers, 25 decimals, fractions and
simple LaTeX, 15 that take algebra; half of the answers are right. CPU is that of each part of the service, read from
/proc: on a busy machine it is higher, but still tells the parts apart, while the rate tells nothing. With `--no-plain`
all answers have a unit, so that nothing is decided without the jail.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer

from loadtest.batches import send_all
from loadtest.machine import this_machine
from loadtest.stack import Stack, own_stack, settle
from loadtest.terminal import make_console, make_table, print_error
from sandbox import SandboxError

Pair = tuple[str, str]  # gold, answer


def _whole(number: random.Random) -> Pair:
    gold = number.randrange(10**6)
    return str(gold), str(gold + number.choice((0, 0, 1, 10)) * number.randrange(1, 9))


def _simple(number: random.Random) -> Pair:
    a, b, k, wrong = (number.randrange(1, 999) for _ in range(4))
    gold = a + number.choice((0, wrong))
    return number.choice(
        (
            (f"{gold}.{b}", f"{a}.{b}0"),
            (f"{gold}/{b}", rf"\frac{{{a}}}{{{b}}}"),
            (rf"\frac{{{gold}}}{{{b}}}", rf"\dfrac{{{a * 2}}}{{{b * 2}}}"),
            (rf"{gold}\sqrt{{{b}}}", rf"{a} \sqrt {{{b}}}"),
            (rf"({gold}, {k})", f"({a},{k})"),
            (rf"\frac{{{gold}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi"),
            (rf"{gold}\%", f"{a}%"),
        )
    )


def _symbolic(number: random.Random) -> Pair:
    a, b, k, wrong = (number.randrange(2, 99) for _ in range(4))
    gold = a + number.choice((0, wrong))
    return number.choice(
        (
            (f"x^2+{gold + b}x+{gold * b}", f"(x+{a})(x+{b})"),
            (rf"{gold}\sqrt{{{k}}}+{b}", rf"\sqrt{{{a * a * k}}}+{b}"),
            (rf"\frac{{x+{gold}}}{{{b}}}", rf"\frac{{x}}{{{b}}}+\frac{{{a}}}{{{b}}}"),
            (rf"\{{{gold},{b},{k}\}}", f"{k}, {b}, {a}"),
            (rf"[{gold},{gold + b})", rf"\left[{a},{a + b}\right)"),
            (rf"y={gold}x+{b}", f"{b}+{a}x"),
            (rf"2^{{{gold}}}", rf"4^{{{a}/2}}"),
        )
    )


#: How many of a hundred.
_MIX: Sequence[tuple[int, Callable[[random.Random], Pair]]] = ((60, _whole), (25, _simple), (15, _symbolic))


def make_items(count: int, seed: int, *, plain: bool = True) -> list[dict[str, str]]:
    """So many distinct tasks."""
    number = random.Random(seed)
    weights = [weight for weight, _ in _MIX]
    pairs: dict[Pair, None] = {}
    while len(pairs) < count:
        [(_, make)] = number.choices(_MIX, weights)
        pairs[make(number)] = None
    form = r"The answer is \boxed{%s}." if plain else r"The answer is \boxed{%s\text{ cm}}."
    return [{"gold": gold, "answer": form % answer} for gold, answer in pairs]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run."""

    grades: int
    seconds: float
    cpu_s: dict[str, float]
    reasons: Counter[str]


async def measure(stack: Stack, items: Sequence[dict[str, str]], batch: int) -> Measured:
    """Send them, a few batches at a time. Raises httpx.HTTPError."""
    waiting = iter([items[at : at + batch] for at in range(0, len(items), batch)])
    reasons: Counter[str] = Counter()

    def look(results: list[dict[str, Any]]) -> None:
        reasons.update(grade["reason"] for grade in results)

    seconds, cpu_s = await send_all(stack, "/v1/grade/math/batch", waiting, look)
    return Measured(len(items), seconds, cpu_s, reasons)


def main(
    items: Annotated[int, typer.Option(min=1, help="Grades.")] = 3000,
    batch: Annotated[int, typer.Option(min=1, max=1024, help="Of one request.")] = 256,
    seed: Annotated[int, typer.Option(help="Other tasks by another seed.")] = 0,
    plain: Annotated[bool, typer.Option(help="Let the gateway decide what it can by itself.")] = True,
) -> None:
    """Grade many answers, and print CPU by part and grades a second."""
    console = make_console()
    try:
        with own_stack() as stack:
            asyncio.run(settle(stack))
            found = asyncio.run(measure(stack, make_items(items, seed, plain=plain), batch))
    except (SandboxError, httpx.HTTPError) as exc:
        if isinstance(exc, SandboxError):
            print_error(console, exc)
            raise typer.Exit(1) from exc
        raise
    table = make_table(f"{found.grades} grades, CPU ms of each")
    table.add_column("part")
    table.add_column("ms", justify="right")
    for part, cpu_s in sorted(found.cpu_s.items()):
        table.add_row(part, f"{cpu_s / found.grades * 1e3:.2f}")
    all_ms = sum(found.cpu_s.values()) / found.grades * 1e3
    table.add_row("all", f"{all_ms:.2f}")
    console.print(table)
    machine = this_machine()
    console.print(f"{found.grades / found.seconds:.0f} a second here, with a load of {machine.load_1min:.1f}; "
                  f"{1e3 * 2 / all_ms:.0f} on two cores that do nothing else")  # fmt: skip
    console.print(", ".join(f"{reason} {count}" for reason, count in found.reasons.most_common()))


if __name__ == "__main__":
    typer.run(main)
