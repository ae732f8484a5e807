"""The measurement of gateway, queue and client, on a real gateway and a real Redis."""

from __future__ import annotations

import json

import pytest

from loadtest.edge import main


def test_what_is_measured_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    """Every call by every way is answered by the stand-in, and each party has used some CPU for it."""
    main(calls=2048, as_json=True)

    edge = json.loads(capsys.readouterr().out)
    assert (edge["how"], edge["answered_by"]) == ("measured", "stand-in")
    single, batch = edge["ways"]
    for way in (single, batch):
        assert way["calls"] == 2048
        assert all(way[f"{part}_us"] > 0 for part in ("gateway", "redis", "standin", "client"))
    queue = edge["queue"]
    assert [step["name"] for step in queue["steps"]] == ["put", "take", "settle", "replies"]
    parts = [step[f"{part}_us"] for step in queue["steps"] for part in ("python", "redis")]
    assert queue["cpu_us"] == pytest.approx(sum(parts))
    assert all(part > 0 for part in parts)


def test_the_table_names_the_budgets(capsys: pytest.CaptureFixture[str]) -> None:
    """A person reads what was measured beside what was meant, and who answered."""
    main(calls=64, as_json=False)

    printed = capsys.readouterr().out
    assert "a stand-in answers" in printed
    assert all(budget in printed for budget in ("200.0", "30.0", "80.0"))
