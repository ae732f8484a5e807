"""The measurement of the client, on a real gateway and a real Redis."""

from __future__ import annotations

import json

import pytest

from loadtest.client import main


def test_what_is_measured_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """All calls are answered by the stand-in; CPU time was used for them, and a few connections were seen."""
    main(calls=2000, as_json=True)

    cost = json.loads(capsys.readouterr().out)
    assert (cost["how"], cost["answered_by"], cost["calls"]) == ("measured", "stand-in", 2000)
    assert cost["cpu_us"] > 0
    assert 1 <= cost["connections"] <= cost["connections_budget"] == 16
    assert cost["took_s"] >= 0.3


def test_the_table_names_the_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """A person reads what was measured beside what was meant, and who answered."""
    main(calls=10, as_json=False)

    printed = capsys.readouterr().out
    assert "a stand-in answers" in printed
    lines = [line.split() for line in printed.splitlines()]
    assert [line[-1] for line in lines if line[:1] in (["CPU"], ["connections,"])] == ["100", "16"]
