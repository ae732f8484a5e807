"""Whether each call was answered exactly once, and by its own answer, told from what was sent and what was heard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Sent(NamedTuple):
    """A call on its way. Times are on the clock that all processes of a machine share."""

    request: str  # the one that carries it
    begun_s: float  # before its connection was opened
    sent_s: float  # when all of its request was written


class Heard(NamedTuple):
    """An answer, as it came."""

    request: str  # that it came for
    call_id: str  # in the answer
    at_s: float
    is_right: bool  # what it says is what a call must bring


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of all calls."""

    latencies_s: Sequence[float]  # of the calls that were answered right and once
    unanswered: int
    duplicates: int  # answers beside the first one
    foreign: int  # answers of a call that this request did not carry
    wrong: int

    @property
    def is_good(self) -> bool:
        """Every call has exactly one answer, and the right one."""
        return not (self.unanswered or self.duplicates or self.foreign or self.wrong)


def judge(sent: Mapping[str, Sent], heard: Iterable[Heard]) -> Verdict:
    """Hold the answers against the calls, by their ids."""
    answers: Counter[str] = Counter()
    latencies_s: dict[str, float] = {}
    foreign = wrong = 0
    for answer in heard:
        call = sent.get(answer.call_id)
        if call is None or call.request != answer.request:
            foreign += 1
            continue
        answers[answer.call_id] += 1
        if answer.is_right:
            latencies_s[answer.call_id] = answer.at_s - call.begun_s
        else:
            wrong += 1
    return Verdict(
        latencies_s=[seconds for call_id, seconds in latencies_s.items() if answers[call_id] == 1],
        unanswered=len(sent) - len(answers),
        duplicates=answers.total() - len(answers),
        foreign=foreign,
        wrong=wrong,
    )


def most_at_once(sent: Iterable[Sent], heard: Iterable[Heard]) -> int:
    """The most calls that were sent as a whole and not answered at one moment."""
    # At equal times the answer goes first, so that nothing is counted which may not have been.
    changes = sorted([(call.sent_s, 1) for call in sent] + [(answer.at_s, -1) for answer in heard])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
