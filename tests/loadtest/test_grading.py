"""The tasks that grading is measured with."""

from __future__ import annotations

from collections import Counter

from loadtest.grading import make_items
from sandbox import MathGrade, MathTask
from sandbox.grading.math import prepare


def test_tasks_are_distinct_and_the_same_for_a_seed() -> None:
    """So that no cache answers, and two runs compare."""
    items = make_items(500, seed=1)
    assert items == make_items(500, seed=1) != make_items(500, seed=2)
    assert len({tuple(item.values()) for item in items}) == 500


def test_most_are_plain_unless_none_may_be() -> None:
    """Two thirds or so are decided by the gateway; written otherwise, all take a jail."""
    steps = [prepare(MathTask.model_validate(item)) for item in make_items(1000, seed=3)]
    reasons = Counter(step.reason for step in steps if isinstance(step, MathGrade))
    assert 600 < sum(reasons.values()) < 800
    assert reasons["different"] > 200
    hard = [prepare(MathTask.model_validate(item)) for item in make_items(1000, seed=3, plain=False)]
    assert not any(isinstance(step, MathGrade) for step in hard)
