"""What a run of the open loop comes to: a frozen `Run` of figures, and whether they can be believed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hdrh.histogram import HdrHistogram

from loadtest.openloop import NO_ANSWER, REFUSED, WRONG_OUTPUT, Sent
from sandbox import CallStatus

#: A generator's lateness is part of each latency. Beyond this share of a figure, the figure is about the generator.
_LATE_SHARE = 0.1
#: Lateness below a millisecond makes nothing invalid. It is what the scheduler of a machine that is not idle takes to
#: wake anybody, and an eighth of the smallest budget that is held against these figures (8 ms).
_LATE_FLOOR_S = 0.001
#: The share of the calls that has to be sent within the planned time, and what that time may be exceeded by.
_SENT_SHARE = 0.99
_GRACE_S = 0.1

_US = 1_000_000  # histograms count whole microseconds, to three digits
_LONGEST_US = 3600 * _US

_VERDICTS = {status.value for status in CallStatus if not status.is_fault}
_FAULTS = {status.value for status in CallStatus if status.is_fault}
_ANSWERED = _VERDICTS | _FAULTS | {WRONG_OUTPUT}


@dataclass(frozen=True, slots=True)
class Run:
    """One load, and how it was served. Seconds, and calls a second; None where no call tells.

    Latency is that of calls that were answered with a verdict or a fault, or of which the generator's patience came to
    an end: a refusal within a millisecond is no fast answer. It counts from the planned moment.
    """

    load: str  # in words, such as "poisson 20/s"
    started_s: float  # after the first run's start
    seconds: float  # for which calls were planned
    took_s: float  # until the last answer
    calls: int  # that were planned; each was sent
    offered_per_s: float
    achieved_per_s: float  # sent within the planned time
    answered_per_s: float  # with a verdict or a fault, until the last answer
    answered: int
    right: int  # with what had to come of the program; any verdict where nothing is known of it
    wrong: int  # with another verdict or other output
    failed: int  # every other one that was not refused: faults, errors, no answer
    outcomes: Mapping[str, int]
    reasons: Mapping[str, str]  # of an outcome, the service's own words for one of the calls
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p95_s: float | None
    p99_s: float | None
    p999_s: float | None
    max_s: float | None
    added_p50_s: float | None  # latency without the program's own wall time
    added_p99_s: float | None
    late_mean_s: float  # the generator, behind its plan
    late_p50_s: float
    late_p99_s: float
    late_max_s: float
    generator_cpu_share: float  # of one core
    cpu_s_per_call: Mapping[str, float] | None  # by the parts of a stack of our own
    invalid: str  # why the figures are not to be believed; empty where they are


def to_run(
    load: str,
    seconds: float,
    calls: Sequence[Sent],
    *,
    started_s: float,
    generator_cpu_s: float,
    cpu_s: Mapping[str, float] | None,
) -> Run:
    """The figures of calls that were planned for so many seconds. There is at least one call."""
    outcomes = Counter(call.outcome for call in calls)
    latencies = sorted(call.latency_s for call in calls if counts_for_latency(call))
    lateness = [call.late_s for call in calls]
    added = [call.latency_s - call.wall_s for call in calls if call.wall_s is not None]
    latency, late, beyond = histogram(latencies), histogram(lateness), histogram(added)
    took_s = max(seconds, *(call.at_s + call.latency_s for call in calls))
    in_time = sum(call.at_s + call.late_s <= seconds + _GRACE_S for call in calls)
    answered = sum(map(is_answered, calls))
    mean_s, late_mean_s = (fmean(latencies) if latencies else None), fmean(lateness)
    p99_s, late_p99_s = percentile_s(latency, 99), percentile_s(late, 99) or 0.0
    return Run(
        load=load,
        started_s=started_s,
        seconds=seconds,
        took_s=took_s,
        calls=len(calls),
        offered_per_s=len(calls) / seconds,
        achieved_per_s=in_time / seconds,
        answered_per_s=answered / took_s,
        answered=answered,
        right=sum(call.is_right for call in calls),
        wrong=sum(not call.is_right and call.outcome in _VERDICTS | {WRONG_OUTPUT} for call in calls),
        failed=sum(is_failure(call) for call in calls),
        outcomes=dict(outcomes.most_common()),
        reasons=_reasons(calls),
        mean_s=mean_s,
        p50_s=percentile_s(latency, 50),
        p90_s=percentile_s(latency, 90),
        p95_s=percentile_s(latency, 95),
        p99_s=p99_s,
        p999_s=percentile_s(latency, 99.9),
        max_s=latencies[-1] if latencies else None,
        added_p50_s=percentile_s(beyond, 50),
        added_p99_s=percentile_s(beyond, 99),
        late_mean_s=late_mean_s,
        late_p50_s=percentile_s(late, 50) or 0.0,
        late_p99_s=late_p99_s,
        late_max_s=max(lateness),
        generator_cpu_share=generator_cpu_s / took_s,
        cpu_s_per_call={part: used / len(calls) for part, used in cpu_s.items()} if cpu_s else None,
        invalid="; ".join(
            _whys(answered, in_time / len(calls), {"mean": (mean_s, late_mean_s), "p99": (p99_s, late_p99_s)})
        ),
    )


def is_answered(call: Sent) -> bool:
    """Whether the service said what came of the call, right or wrong."""
    return call.outcome in _ANSWERED


def counts_for_latency(call: Sent) -> bool:
    """See `Run`."""
    return is_answered(call) or call.outcome == NO_ANSWER


def is_failure(call: Sent) -> bool:
    """Whether a call got neither a verdict nor a refusal: the service, the network or our patience failed."""
    return call.outcome not in _VERDICTS | {WRONG_OUTPUT, REFUSED}


def histogram(values_s: Iterable[float]) -> HdrHistogram:
    """Of seconds, with three digits from a microsecond to an hour."""
    found = HdrHistogram(1, _LONGEST_US, 3)
    for value_s in values_s:
        found.record_value(min(_LONGEST_US, max(1, round(value_s * _US))))
    return found


def percentile_s(values: HdrHistogram, percent: float) -> float | None:
    """In seconds; None where there is no value."""
    if values.get_total_count() == 0:
        return None
    return float(values.get_value_at_percentile(percent)) / _US


def _reasons(calls: Iterable[Sent]) -> dict[str, str]:
    """The first words of each outcome that has any."""
    found: dict[str, str] = {}
    for call in calls:
        if call.why:
            found.setdefault(call.outcome, call.why)
    return found


def _whys(answered: int, sent_share: float, late: Mapping[str, tuple[float | None, float]]) -> list[str]:
    """The sentences that make a run invalid."""
    whys = [
        f"the generator itself was late by {late_s * 1e3:.1f} ms, a tenth or more of the {name} of {figure_s * 1e3:.1f}"
        for name, (figure_s, late_s) in late.items()
        if figure_s is not None and late_s >= max(_LATE_FLOOR_S, _LATE_SHARE * figure_s)
    ]
    if not answered:
        whys.append("no call was answered")
    if sent_share < _SENT_SHARE:
        whys.append(f"the generator sent {sent_share:.1%} of the calls in the planned time")
    return whys
