"""A row of the table that `make bench` prints: figures, each with its budget, and what they can be taken for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.validate import SHARES

MEASURED, SIMULATED = "measured", "simulated"
JAIL = "jail"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. The whole table takes less than five minutes on two cores with these."""

    edge_calls: int = 8192
    wall_calls: int = 60
    client_calls: int = 10_000
    callers: int = 256
    seconds: float = 5.0  # of each load
    sockets: int = 45_000
    gateways: int = 3
    batches: int = 704
    batch: int = 64
    workers: tuple[int, ...] = (1, 2, 4, 8)
    more_gateways: tuple[int, ...] = (2, 3)
    shares: tuple[float, ...] = SHARES  # of what fits, at which predictions are tried
    planned_calls: int = 45_000


@dataclass(frozen=True, slots=True)
class Figure:
    """One number. Its budget is a bound on one side, or none."""

    name: str  # empty where the row's own says all
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_missed(self) -> bool:
        """Whether it is beyond its budget."""
        return (self.at_most is not None and self.value > self.at_most) or (
            self.at_least is not None and self.value < self.at_least
        )

    def __str__(self) -> str:
        """The number in words, without its budget."""
        return f"{self.name} {number(self.value)} {self.unit}".strip()

    @property
    def budget(self) -> str:
        """The bound in the same unit; empty where there is none."""
        for sign, bound in (("≤", self.at_most), ("≥", self.at_least)):
            if bound is not None:
                return f"{sign} {bound:,g}"
        return ""


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured, or simulated."""

    what: str
    command: str  # that repeats it
    figures: tuple[Figure, ...] = ()
    answered_by: str = ""  # jail or stand-in, so that no figure can be taken for one of the other
    how: str = MEASURED
    wrong: str = ""  # what should not have happened meanwhile
    note: str = ""  # what a reader has to know, such as why there is no figure

    @property
    def missed(self) -> list[str]:
        """The figures that are beyond their budgets."""
        return [f"{self.what}: {figure}, not {figure.budget}" for figure in self.figures if figure.is_missed]


def number(value: float) -> str:
    """With as many digits as can mean something."""
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def to_markdown(machine: str, rows: Sequence[Row]) -> str:
    """The table for a page: the machine, then one line a row."""
    lines = [
        f"On {machine}.",
        "",
        "| what | figures | budget | how | answered by | repeat with |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [str(figure) for figure in row.figures]
        budgets = [
            f"{figure.budget} {figure.unit}{', **missed**' if figure.is_missed else ''}"
            for figure in row.figures
            if figure.budget
        ]
        texts = [text for text in (f"**{row.wrong}**" if row.wrong else "", row.note) if text]
        cells = (
            row.what,
            ", ".join(figures) + "".join(f" ({text})" for text in texts),
            "; ".join(budgets),
            row.how,
            row.answered_by,
            f"`{row.command}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
