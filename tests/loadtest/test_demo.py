"""What the demonstration shows."""

from __future__ import annotations

from loadtest.demo import SHOWN, _excerpt
from loadtest.samples import load_samples
from sandbox import CallStatus


def test_one_example_of_each_verdict_is_shown() -> None:
    """The examples that are shown are there, and have each verdict once."""
    verdicts = [sample.expected.status for sample in load_samples() if sample.name in SHOWN]
    assert sorted(verdicts) == sorted(status for status in CallStatus if not status.is_fault)


def test_output_cannot_steer_the_terminal() -> None:
    """Escape sequences of a program are shown as dots, and a long line is cut."""
    assert _excerpt("a\x1b[2Jb\x07\u202ec") == "a·[2Jb··c"
    assert len(_excerpt("x" * 1000)) < 100
