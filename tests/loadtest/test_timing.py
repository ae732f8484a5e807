"""The figures that the tools print."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.timing import Answered, percentile
from sandbox import ToolResult, Unavailable

FLOATS = st.lists(st.floats(allow_nan=False), min_size=1)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.99, 99), (1.0, 100)])
def test_percentiles_of_a_hundred_values(share: float, value: float) -> None:
    """Of 1 to 100, the percentile is the number itself."""
    assert percentile(range(1, 101), share) == value


@given(FLOATS, st.floats(min_value=0, max_value=1))
def test_a_percentile_is_a_value_with_its_share_below(values: list[float], share: float) -> None:
    """The percentile is one of the values, and at least its share of all are no larger."""
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_nothing_has_the_percentile_zero() -> None:
    """A run without answers prints 0 and does not fail."""
    assert percentile([], 0.99) == 0


def test_the_programs_own_time_is_not_ours() -> None:
    """What the service added is the latency without the program's wall time; an error added nothing we know."""
    outcome = ToolResult.model_validate({"id": "1", "status": "ok", "usage": {"wall_s": 1.0}})
    assert Answered(outcome, sent_s=10.0, answered_s=11.5).added_s == 0.5
    assert Answered(Unavailable("gone"), sent_s=10.0, answered_s=11.5).added_s is None


def test_an_error_is_counted_under_its_name() -> None:
    """Statuses and errors can be counted together."""
    outcome = ToolResult.model_validate({"id": "1", "status": "memory_limit"})
    assert Answered(outcome, 0.0, 1.0).status == "memory_limit"
    assert Answered(Unavailable("gone"), 0.0, 1.0).status == "Unavailable"
