"""Calls under way while something dies, and an oracle that knows what each of them must print."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from typing import Any

import httpx

#: Statuses and errors that say that we failed, and nothing about the program.
FAULTS = {"queue_timeout", "internal_error"}
ERRORS = {"Unavailable", "QueueTimeout", "InternalError"}


class Load:
    """Calls in one batch request, answered line by line; each prints a value that only its own id gives."""

    def __init__(self, url: str, name: str, count: int, *, seconds: float = 0.05, **fields: Any) -> None:
        """Send `count` calls, each of which sleeps for `seconds`; `fields` are fields of every call."""
        self.ids = [f"{name}-{number}" for number in range(count)]
        calls = [{"id": id_, "code": _program(id_, seconds), **fields} for id_ in self.ids]
        self._url = url
        self._body = {"calls": calls}
        self._lines: list[dict[str, Any]] = []
        self._error: Exception | None = None
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._send)
        self._thread.start()

    def _send(self) -> None:
        headers = {"accept": "application/x-ndjson"}
        try:
            with (
                httpx.Client(timeout=60, trust_env=False) as http,
                http.stream("POST", f"{self._url}/v1/batch", json=self._body, headers=headers) as response,
            ):
                response.raise_for_status()
                for line in response.iter_lines():
                    with self._changed:
                        self._lines.append(json.loads(line))
                        self._changed.notify_all()
        except httpx.HTTPError as exc:
            self._error = exc
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_answers(self, count: int) -> None:
        """Wait until so many calls are answered and others are still under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._lines) >= count or self._ended, 60)
            assert not self._ended, f"too early to tell anything: {self._error!r}, {len(self._lines)} answers"

    def answers(self) -> list[dict[str, Any]]:
        """The answers in the order of the calls, when all are there. Each call must have exactly one."""
        self._join()
        if self._error is not None:
            raise self._error
        assert sorted(line["index"] for line in self._lines) == list(range(len(self.ids)))
        return sorted(self._lines, key=lambda line: int(line["index"]))

    def broke_off(self) -> bool:
        """Whether the connection broke before the last answer; waits for the end of either."""
        self._join()
        return self._error is not None

    def _join(self) -> None:
        self._thread.join(120)
        assert not self._thread.is_alive(), f"{len(self._lines)} of {len(self.ids)} answers"


def all_right(load: Load) -> None:
    """Every call is answered once, with its own value."""
    _none_wrong(load.ids, load.answers())


def right_or_fault(load: Load) -> int:
    """Every call is answered once, with its own value or by a fault that says what failed; how many are right."""
    answers = load.answers()
    faults = [answer for answer in answers if _is_fault(answer)]
    left = [answer for answer in answers if not _is_fault(answer)]
    _none_wrong([load.ids[answer["index"]] for answer in left], left)
    return len(answers) - len(faults)


def value(id_: str) -> str:
    """What the call of this id prints."""
    return hashlib.sha256(id_.encode()).hexdigest()


def _program(id_: str, seconds: float) -> str:
    return f"import hashlib, time\ntime.sleep({seconds})\nprint(hashlib.sha256({id_.encode()!r}).hexdigest())"


def _none_wrong(ids: Sequence[str], answers: Sequence[dict[str, Any]]) -> None:
    """Each answer is what the program of that id prints."""
    wrong = [
        answer
        for id_, answer in zip(ids, answers, strict=True)
        if (answer.get("id"), answer.get("status"), answer.get("stdout")) != (id_, "ok", f"{value(id_)}\n")
    ]
    assert not wrong, f"{len(wrong)} of {len(answers)} are wrong, the first are {wrong[:3]}"


def _is_fault(answer: dict[str, Any]) -> bool:
    if "error" in answer:
        return answer["error"]["name"] in ERRORS and bool(answer["error"]["message"])
    return answer["status"] in FAULTS and bool(answer["reason"])
