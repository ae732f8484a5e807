"""Figures of a run, and when they are not to be believed."""

from __future__ import annotations

import pytest

from loadtest.figures import Run, to_run
from loadtest.openloop import Sent


def sent(
    at_s: float = 0.0, late_s: float = 0.0, latency_s: float = 0.1, outcome: str = "ok", **more: object
) -> Sent:
    fields = {"is_right": outcome == "ok", "wall_s": None} | more
    return Sent("print", at_s, late_s, latency_s, outcome, **fields)  # type: ignore[arg-type]


def run(*calls: Sent, seconds: float = 10.0) -> Run:
    return to_run("a load", seconds, calls, started_s=0.0, generator_cpu_s=1.0, cpu_s=None)


def test_percentiles_are_those_of_the_latencies() -> None:
    """Of latencies from 1 to 1000 ms, the percentiles are known, to three digits."""
    found = run(*(sent(latency_s=n / 1000) for n in range(1, 1001)))

    assert found.mean_s == pytest.approx(0.5005)
    percentiles = [found.p50_s, found.p90_s, found.p95_s, found.p99_s, found.p999_s, found.max_s]
    assert percentiles == pytest.approx([0.5, 0.9, 0.95, 0.99, 0.999, 1.0], rel=0.002)


def test_added_is_the_latency_without_the_program() -> None:
    """Where the service tells the program's time, what is left of the latency is the service's."""
    found = run(sent(latency_s=0.5, wall_s=0.3), sent(latency_s=0.9))

    assert found.added_p50_s == pytest.approx(0.2, rel=0.002)


def test_outcomes_are_told_apart() -> None:
    """Right, wrong, refused and failed calls are each counted as that, with the words of the service."""
    calls = [
        sent(),
        sent(outcome="wrong_output"),
        sent(outcome="error"),
        sent(outcome="refused", why="full"),
        sent(outcome="internal_error", why="broken"),
        sent(outcome="no_answer"),
        sent(outcome="http_401", why="no key"),
        sent(outcome="http_401", why="again"),
    ]

    found = run(*calls)

    assert (found.calls, found.right, found.wrong, found.failed, found.answered) == (8, 1, 2, 4, 4)
    assert found.outcomes["http_401"] == 2
    assert found.reasons == {"refused": "full", "internal_error": "broken", "http_401": "no key"}


def test_a_quick_refusal_is_no_fast_answer_and_silence_is_no_missing_one() -> None:
    """Refused and broken calls are not in the latency; those that waited for nothing are, with all of their wait."""
    found = run(
        sent(latency_s=0.2), sent(latency_s=0.001, outcome="refused"), sent(latency_s=5, outcome="no_answer")
    )

    assert (found.mean_s, found.max_s) == (2.6, 5)


def test_a_run_without_any_answer_has_no_latency() -> None:
    """What is not known is None and not zero."""
    found = run(sent(outcome="connection_error"))

    assert (found.mean_s, found.p99_s, found.max_s, found.added_p50_s) == (None, None, None, None)
    assert found.answered_per_s == 0


def test_a_run_that_was_refused_as_a_whole_is_invalid() -> None:
    """A refusal fails no run, but of nothing else there are no figures."""
    assert run(sent(outcome="refused")).invalid == "no call was answered"
    assert run(sent(outcome="refused"), sent()).invalid == ""


def test_rates_are_of_what_was_planned_sent_and_answered() -> None:
    """Answers are counted over the time until the last of them, so a backlog lowers the rate."""
    found = run(*(sent(at_s=n / 10) for n in range(99)), sent(at_s=9.9, latency_s=10.1), seconds=10)

    assert (found.offered_per_s, found.achieved_per_s, found.took_s, found.answered_per_s) == (10, 10, 20, 5)
    assert found.generator_cpu_share == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("late_s", "latency_s", "is_valid"),
    [
        (0.0099, 0.1, True),
        (0.0101, 0.1, False),
        (0.0009, 0.002, True),  # below a millisecond no lateness counts
        (0.0011, 0.002, False),
    ],
)
def test_a_generator_that_was_late_makes_a_run_invalid(
    late_s: float, latency_s: float, is_valid: bool
) -> None:
    """A tenth of the mean, or more, that may be the generator's own is too much."""
    found = run(*(sent(late_s=late_s, latency_s=latency_s) for _ in range(100)))

    assert (found.invalid == "") == is_valid
    assert found.late_p99_s == pytest.approx(late_s, rel=0.01)


def test_a_few_late_calls_make_the_tail_invalid() -> None:
    """Lateness of two calls in a hundred spoils the p99 and not the mean."""
    calls = [sent(late_s=0.0, latency_s=0.1) for _ in range(98)] + [sent(late_s=0.05, latency_s=0.1)] * 2

    found = run(*calls)

    assert "p99" in found.invalid
    assert "mean" not in found.invalid


@pytest.mark.parametrize(("late_ones", "is_valid"), [(10, True), (11, False)])
def test_a_generator_that_does_not_keep_up_makes_a_run_invalid(late_ones: int, is_valid: bool) -> None:
    """99 % of the calls have to be sent within the planned time, however slow the service is."""
    calls = [sent(latency_s=100.0) for _ in range(1000 - late_ones)]
    calls += [sent(at_s=0.9, late_s=0.5, latency_s=100.0) for _ in range(late_ones)]

    found = run(*calls, seconds=1)

    assert (found.invalid == "") == is_valid
    assert found.achieved_per_s == 1000 - late_ones
