"""The table of `make bench`: its rows from the real tools, and what it says of them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from loadtest.budgets import PLANNED_MEAN_S
from loadtest.standin import NAME
from loadtest.table.__main__ import measure_table, sum_up
from loadtest.table.forecast import beside
from loadtest.table.rows import JAIL, MEASURED, SIMULATED, Figure, Row, Size, to_markdown
from loadtest.table.sections import SECTIONS
from loadtest.validate import Compared, Times

pytestmark = pytest.mark.usefixtures("_jail_runtime")

SMALL = Size(
    edge_calls=2048,
    wall_calls=3,
    client_calls=500,
    callers=4,
    seconds=0.5,
    sockets=60,
    gateways=2,
    batches=4,
    batch=8,
    workers=(1,),
    more_gateways=(2,),
    shares=(0.2,),
    planned_calls=500,
)
BY_NAME = {section.measure.__name__: section for section in SECTIONS}


def measured(*names: str) -> list[Row]:
    """The rows of some sections, and that they were shown as they came."""
    shown: list[Row] = []
    rows = measure_table([BY_NAME[name] for name in names], SMALL, shown.append)
    assert shown == rows
    return rows


def figures_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """The numbers, by row and name."""
    return {row.what: {figure.name: figure.value for figure in row.figures} for row in rows}


@pytest.mark.parametrize(
    ("name", "answered_by"),
    [
        ("start", JAIL),
        ("edge", NAME),
        ("client", NAME),
        ("closed_loop", JAIL),
        ("low_load", JAIL),
        ("sweep", JAIL),
        ("scaling", JAIL),
        ("sockets", NAME),
        ("inflight", NAME),
    ],
)
def test_each_tool_gives_rows_that_say_who_answered(name: str, answered_by: str) -> None:
    """Real parts are measured, nothing goes wrong, and each row has figures and the word `measured`."""
    rows = measured(name)
    assert rows
    for row in rows:
        assert (row.wrong, row.how, row.answered_by) == ("", MEASURED, answered_by)
        assert row.figures
        assert any(figure.value > 0 for figure in row.figures)


def test_the_walls_are_measured_or_the_row_says_why_not() -> None:
    """A host without cgroups gets a row without figures, and nothing has failed."""
    rows = measured("walls")
    assert not any(row.wrong for row in rows)
    assert all(row.figures or row.note.startswith("not measured: ") for row in rows)


def test_what_is_simulated_says_so() -> None:
    """The row of what very many calls need names the machine whose costs it rests on."""
    (row,) = measured("cores")
    assert (row.wrong, row.how) == ("", SIMULATED)
    assert figures_of([row])[row.what]["mean"] <= PLANNED_MEAN_S
    assert row.note.startswith("from costs that were measured on ")


def test_a_prediction_stands_beside_what_was_measured() -> None:
    """Both words stand on the row, and the larger difference is held against the tolerance."""
    load = Compared(
        share=0.3, rate=50.0, seconds=4.0, seed=1, calls=200, foretold=Times(0.009, 0.020), slower=1.1, predicted=Times(0.010, 0.021),
        measured=Times(0.010, 0.030), others_cores=0.0, late_s=0.0, is_disturbed=False,
    )  # fmt: skip
    row = beside(load, "mixed", JAIL)
    assert row.how == "simulated, measured"
    assert row.missed == ["mixed at 50 calls/s, 30% of what fits: off by 30 %, not ≤ 20"]


def test_what_was_in_flight_is_in_the_row() -> None:
    """All calls of the batches were in flight at one moment and each was answered."""
    ((_, figures),) = figures_of(measured("inflight")).items()
    assert (figures["peak"], figures["answered"], figures["errors"]) == (32, 32, 0)


def test_a_tool_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours stands in the row of its section; the table fails and is whole."""
    monkeypatch.setenv("SANDBOX_WORKER__SLOTZ", "1")
    rows = measured("start", "closed_loop")
    assert len(rows) == 2
    assert all(row.wrong.startswith("ConfigError: ") for row in rows)
    assert sum_up(Console(file=io.StringIO()), rows) == 1


MISSED = Row(
    "a", "sandbox bench", (Figure("p50", 9.0, "ms", at_most=8), Figure("", 600, "calls/s", at_least=500))
)
WRONG = Row("b | c", "sandbox bench", answered_by=JAIL, wrong="3 wrong (ok)")
PLAN = Row("cores", "sandbox plan", (Figure("", 1234.5, "cores"),), how=SIMULATED)


def test_a_missed_budget_is_marked_and_fails_nothing() -> None:
    """Only what was wrong has an exit code of its own."""
    output = io.StringIO()
    assert sum_up(Console(file=output), [MISSED, PLAN]) == 0
    assert output.getvalue() == "missed: a: p50 9 ms, not ≤ 8\n"
    assert sum_up(Console(file=output), [MISSED, WRONG]) == 1
    assert "WRONG: b | c: 3 wrong (ok)" in output.getvalue()


def test_the_table_for_a_page_names_the_machine_and_marks_each_row() -> None:
    """Markdown with a line a row: figures, budgets, the word for how, who answered, and the command."""
    assert to_markdown("2 cores of a machine", [MISSED, WRONG, PLAN]).splitlines() == [
        "On 2 cores of a machine.",
        "",
        "| what | figures | budget | how | answered by | repeat with |",
        "|---|---|---|---|---|---|",
        "| a | p50 9 ms, 600 calls/s | ≤ 8 ms, **missed**; ≥ 500 calls/s | measured |  | `sandbox bench` |",
        "| b \\| c |  (**3 wrong (ok)**) |  | measured | jail | `sandbox bench` |",
        "| cores | 1,234 cores |  | simulated |  | `sandbox plan` |",
    ]
