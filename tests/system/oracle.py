"""An oracle: what every call must print, what was heard of each, and what is wrong between the two.

It knows of no part of the service. Callers tell it of every attempt to send a call and of everything that came back;
`count` then holds that against the promise: a call that was taken is answered once, with the truth about its program
or with a fault that says so, within its deadline and a second.

The truth. A program prints a value that only its own id gives, and how it ends is a part of its call: nobody can
answer for it without having run it. Beside the value stands a number that each run draws anew, so that two runs of
one call, which print the same value, are told apart when both are given to a caller.

Taken, refused, lost. A call is refused when the last attempt to send it was: 429 or 503, soon. A connection that
breaks is no answer, and the caller sends the call again under its id. What has no answer after its last attempt is
lost, and so is what was answered later than its deadline, the second, and `ALLOWANCE_S`.

Two things are no fault of the service, and whoever causes them says so. While a gateway stands still or is gone
(`stood_still`), nobody can answer on its connections. When Redis starts again empty (`forgetting`), a call that had its
answer can run once more if it is sent once more.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import Enum, auto
from typing import Any

from sandbox import CallStatus

#: The promise: an answer within the deadline and this.
PROMISE_S = 1.0
#: What a machine of two cores, busy with restarting workers and with others' work, may add on both ways.
ALLOWANCE_S = 2.0
#: Errors that say that we failed, by the word under which they are counted.
_FAULTS = {"Unavailable": "unavailable", "QueueTimeout": "queue_timeout", "InternalError": "internal_error"}
_REFUSALS = {"Unavailable", "Overloaded"}

_PROGRAM = """\
import hashlib, os, sys, time
{imports}
time.sleep({seconds})
value = hashlib.sha256({id!r}.encode()).hexdigest()
print(value, os.urandom(8).hex(), flush=True)
{end}
"""
#: How a program ends, and the limit that it runs into. Three seconds are long enough to have printed before.
_ENDS: dict[CallStatus, tuple[str, dict[str, Any]]] = {
    CallStatus.OK: ("", {}),
    CallStatus.ERROR: ("sys.exit(1 + int(value[:2], 16) % 100)", {}),
    CallStatus.TIMEOUT: ("time.sleep(1000)", {"wall_s": 3}),
    CallStatus.MEMORY_LIMIT: ("x = bytearray(200 * 2**20)", {"memory_bytes": 64 * 2**20}),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose truth is known."""

    id: str
    end: CallStatus = CallStatus.OK
    seconds: float = 0.05
    imports: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    header_s: float | None = None  # how long its caller waits, told beside the call; one for all of a batch

    @property
    def deadline_s(self) -> float:
        """Seconds within which its answer is due."""
        return float(self.fields.get("deadline_s", self.header_s or 60))

    def headers(self) -> dict[str, str]:
        """What is told beside it."""
        return {} if self.header_s is None else {"x-deadline-ms": str(round(1000 * self.header_s))}

    def body(self) -> dict[str, Any]:
        """As it is sent."""
        end, limits = _ENDS[self.end]
        code = _PROGRAM.format(imports=self.imports, seconds=self.seconds, id=self.id, end=end)
        return {"id": self.id, "code": code, "limits": limits, **self.fields}

    def value(self) -> str:
        """What its program prints before it ends."""
        return hashlib.sha256(self.id.encode()).hexdigest()

    def exit_code(self) -> int | None:
        """What its program ends with, where it ends by itself."""
        codes = {CallStatus.OK: 0, CallStatus.ERROR: 1 + int(self.value()[:2], 16) % 100}
        return codes.get(self.end)

    def is_true(self, result: Mapping[str, Any]) -> bool:
        """Whether a result is what this call's program does."""
        printed = re.fullmatch(r"([0-9a-f]{64}) [0-9a-f]{16}\n", result["stdout"])
        told = (result["id"], result["status"], result["exit_code"], printed and printed[1])
        return told == (self.id, self.end, self.exit_code(), self.value())


class Ending(Enum):
    """How an attempt to send a call ended."""

    ANSWERED = auto()
    REFUSED = auto()  # 429 or 503, before anything else
    BROKE = auto()  # the connection did
    SILENT = auto()  # the caller's patience ended first
    LEFT = auto()  # the caller went, as it was to


@dataclass(slots=True)
class Attempt:
    """One time that a call was sent, and what came back for it; usually one answer."""

    call: Call
    request: int  # several calls share one in a batch
    sent_at: float
    answers: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    ending: Ending | None = None  # none yet
    is_job: bool = False  # taken as one; its answer lies in Redis and has to be asked for


@dataclass(slots=True)
class Counts:
    """What came of all calls whose last attempt has ended."""

    accepted: int = 0
    answered: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    wrong: int = 0
    lost: int = 0
    late: int = 0  # after the promise and within the allowance
    worst_over_deadline_s: float = 0.0
    executed: int = 0  # proved by a value
    refused: int = 0
    worst_refusal_s: float = 0.0  # until a caller heard that it was refused
    left: int = 0
    sent_again: int = 0  # attempts beyond a call's first
    ran_again: int = 0  # calls with two values, for which Redis is excused
    #: A sentence for each call that makes one of `duplicates`, `wrong` and `lost`.
    complaints: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether the promise was kept."""
        return not (self.duplicates or self.wrong or self.lost)

    def figures(self) -> dict[str, Any]:
        """All but the sentences, by name."""
        told = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "complaints"}
        rounded = ("worst_over_deadline_s", "worst_refusal_s")
        return told | {name: round(told[name], 2) for name in rounded}


class Oracle:
    """The story of every call. Threads may share one; `changed` is notified of every answer and end."""

    def __init__(
        self, *, allowance_s: float = ALLOWANCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.changed = threading.Condition()
        self.now = clock
        self.allowance_s = allowance_s
        self._stories: dict[str, list[Attempt]] = {}
        self._strays: list[str] = []
        self._still: list[tuple[float, float]] = []
        self._no_redis: list[tuple[float, float]] = []
        self._forgot: list[tuple[float, float]] = []

    # ---- what callers tell ----

    def attempt(self, call: Call, request: int) -> Attempt:
        """A call is about to be sent."""
        attempt = Attempt(call, request, self.now())
        with self.changed:
            self._stories.setdefault(call.id, []).append(attempt)
        return attempt

    def answer(self, attempt: Attempt, body: dict[str, Any]) -> None:
        """Something came back for it: a result, or an error as HTTP or an item of a batch carries it."""
        with self.changed:
            at = self.now()
            attempt.answers.append((at, body))
            if attempt.ending is None:
                soon = at - attempt.sent_at <= PROMISE_S + self.allowance_s
                is_refused = soon and body.get("error", {}).get("name") in _REFUSALS
                attempt.ending = Ending.REFUSED if is_refused else Ending.ANSWERED
            self.changed.notify_all()

    def end(self, attempt: Attempt, ending: Ending) -> None:
        """Nothing more will come back for it."""
        with self.changed:
            if attempt.ending is None:
                attempt.ending = ending
            self.changed.notify_all()

    def stray(self, what: str) -> None:
        """Something came back that belongs to no call."""
        with self.changed:
            self._strays.append(what)

    # ---- what is no fault of the service ----

    def stood_still(self, begin: float, end: float) -> None:
        """A gateway could not answer in this time."""
        with self.changed:
            self._still.append((begin, end))

    def had_no_redis(self, begin: float, end: float) -> None:
        """Nobody could be told of a job in this time; who asked got 503 at once."""
        with self.changed:
            self._no_redis.append((begin, end))

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Redis loses all that it holds, at some moment of this block."""
        with self.changed:
            number = len(self._forgot)
            self._forgot.append((self.now(), math.inf))
        try:
            yield
        finally:
            with self.changed:
                self._forgot[number] = (self._forgot[number][0], self.now())

    def has_forgotten(self, since: float) -> bool:
        """Whether Redis has lost all that it held since then."""
        with self.changed:
            return any(end >= since for _, end in self._forgot)

    # ---- what came of it ----

    def attempts(self) -> list[Attempt]:
        """All that there were, in the order of their calls."""
        with self.changed:
            return [attempt for story in self._stories.values() for attempt in story]

    def answers(self) -> int:
        """How many calls are answered by now."""
        with self.changed:
            return sum(any(attempt.answers for attempt in story) for story in self._stories.values())

    def count(self) -> Counts:
        """What came of all calls up to now."""
        counts = Counts()
        with self.changed:
            counts.wrong = len(self._strays)
            counts.complaints += [f"wrong: {what}" for what in self._strays]
            for story in self._stories.values():
                self._count(counts, story)
        return counts

    def _count(self, counts: Counts, story: list[Attempt]) -> None:
        call = story[0].call
        counts.sent_again += len(story) - 1
        self._count_values(counts, story)
        for attempt in story:
            if attempt.ending is Ending.REFUSED:
                at, _ = attempt.answers[0]
                refusal_s = at - attempt.sent_at - _covered_s(self._still, attempt.sent_at, at)
                counts.worst_refusal_s = max(counts.worst_refusal_s, refusal_s)
        answered = next((attempt for attempt in story if attempt.ending is Ending.ANSWERED), None)
        last = story[-1].ending
        if answered is not None:
            self._count_answer(counts, answered)
        elif last is Ending.REFUSED:
            counts.refused += 1
        elif last is Ending.LEFT:
            counts.left += 1
        elif last is not None:
            counts.accepted += 1
            counts.lost += 1
            tries = ", ".join(attempt.ending.name.lower() for attempt in story if attempt.ending)
            counts.complaints.append(f"lost: {call.id} has no answer ({tries})")

    def _count_values(self, counts: Counts, story: list[Attempt]) -> None:
        call = story[0].call
        results = [body for attempt in story for _, body in attempt.answers if _verdict(body)]
        untrue = [body for body in results if not call.is_true(body)]
        if untrue:
            counts.wrong += 1
            told = {
                name: untrue[0].get(name)
                for name in ("id", "status", "exit_code", "signal", "stdout", "usage")
            }
            counts.complaints.append(f"wrong: {call.id}, which ends with {call.end}, is answered by {told}")
        counts.executed += any(call.is_true(body) for body in results)
        twice = sum(max(0, len(attempt.answers) - 1) for attempt in story)
        values = len({(body["status"], body["stdout"]) for body in results})
        if values > 1 and not twice and self._is_excused(story):
            counts.ran_again += 1
        elif twice or values > 1:
            counts.duplicates += max(twice, values - 1)
            counts.complaints.append(f"duplicate: {call.id} has {twice + 1} answers with {values} values")

    def _count_answer(self, counts: Counts, attempt: Attempt) -> None:
        at, body = attempt.answers[0]
        counts.accepted += 1
        fault = fault_of(body)
        if fault is not None:
            counts.faults[fault] += 1
        elif not _verdict(body):
            counts.wrong += 1
            counts.complaints.append(f"wrong: {attempt.call.id} is answered by {str(body)[:300]}")
        due = attempt.sent_at + attempt.call.deadline_s
        excuses = self._still + (self._no_redis if attempt.is_job else [])
        over_s = at - due - _covered_s(excuses, attempt.sent_at, at)
        counts.worst_over_deadline_s = max(counts.worst_over_deadline_s, over_s)
        if over_s > PROMISE_S + self.allowance_s:
            counts.lost += 1
            counts.complaints.append(f"lost: {attempt.call.id} is answered {over_s:.1f} s after its deadline")
        else:
            counts.answered += 1
            counts.late += over_s > PROMISE_S

    def _is_excused(self, story: Iterable[Attempt]) -> bool:
        """Whether Redis lost everything while this call was in use."""
        times = [at for attempt in story for at in (attempt.sent_at, *(at for at, _ in attempt.answers))]
        return any(begin <= max(times) and end >= min(times) for begin, end in self._forgot)


def _covered_s(times: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """How much of the time between begin and end these cover; what several cover counts once."""
    total, seen = 0.0, begin
    for first, last in sorted(times):
        total += max(0.0, min(last, end) - max(first, seen))
        seen = max(seen, last)
    return total


def fault_of(body: Mapping[str, Any]) -> str | None:
    """The word of a fault that says what failed; None for anything else."""
    error = body.get("error")
    if error is not None:
        return _FAULTS.get(error["name"]) if error["message"] else None
    status = body.get("status")
    return status if status in _FAULTS.values() and body["reason"] else None


def _verdict(body: Mapping[str, Any]) -> bool:
    """Whether it is a result that says something of the program."""
    return body.get("status") in {status.value for status in CallStatus if not status.is_fault}
