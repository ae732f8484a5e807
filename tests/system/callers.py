"""Callers as patient as the client: what they send and what they hear goes to an oracle.

A connection serves one request, so that the kernel spreads requests over the gateways, and so that one which breaks
says which calls have to be sent again. They are, under their ids, as long as the caller's patience lasts.

A job is sent once it is queued. To ask for its result is no second sending, and is done until it is there. A service
that does not know a job any more has lost it, unless Redis has lost everything: then it is sent again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Sequence
from typing import Any, Literal
from uuid import uuid4

import httpx

from sandbox import CallStatus

from .oracle import PROMISE_S, Attempt, Call, Counts, Ending, Oracle

#: Between two attempts.
PAUSE_S = 0.2
#: An answer that comes too late is waited for nevertheless, to learn how late; also behind a gateway that stands still.
CURIOSITY_S = 10.0

#: How long one question for a job waits.
ASK_S = 5.0

#: How calls are sent: one for its result, many for a line each, one for its result later.
Way = Literal["run", "batch", "job"]

_LINES = {"accept": "application/x-ndjson"}


class Callers:
    """All that send calls to one address."""

    def __init__(self, url: str, oracle: Oracle, *, curiosity_s: float = CURIOSITY_S) -> None:
        self.oracle = oracle
        self._curiosity_s = curiosity_s
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False)
        self._requests = itertools.count(1)
        self._ways = {"run": self._run, "batch": self._batch, "job": self._job}

    async def close(self) -> None:
        """After the last call."""
        await self._http.aclose()

    async def send(
        self,
        calls: Sequence[Call],
        *,
        way: Way,
        patience_s: float = 0.0,
        leave_after_s: float | None = None,
    ) -> None:
        """Send calls, one or a batch, and send again what has no answer because its connection broke.

        After `patience_s` nothing is sent any more. `leave_after_s` is when the caller turns away instead.
        """
        over_at = self.oracle.now() + patience_s
        left, is_first = list(calls), True
        while left:
            request = next(self._requests)
            attempts = [self.oracle.attempt(call, request) for call in left]
            await self._request(attempts, way, leave_after_s)
            # Who was refused at once knows where he stands. Whose connection broke wants to know what became of it.
            again = {Ending.BROKE} if is_first else {Ending.BROKE, Ending.REFUSED}
            left = [attempt.call for attempt in attempts if attempt.ending in again]
            is_first = False
            if self.oracle.now() + PAUSE_S > over_at:
                return
            await asyncio.sleep(PAUSE_S)

    async def _request(self, attempts: Sequence[Attempt], way: Way, leave_after_s: float | None) -> None:
        deadline_s = max(attempt.call.deadline_s for attempt in attempts)
        patience_s = deadline_s + PROMISE_S + self.oracle.allowance_s + self._curiosity_s
        ending = Ending.SILENT if leave_after_s is None else Ending.LEFT
        try:
            async with asyncio.timeout(patience_s if leave_after_s is None else leave_after_s):
                await self._ways[way](attempts)
        except TimeoutError:
            pass
        except httpx.TransportError:
            if leave_after_s is None:  # else nobody was to hear of it anyway
                ending = Ending.BROKE
        for attempt in attempts:
            self.oracle.end(attempt, ending)

    async def _run(self, attempts: Sequence[Attempt]) -> None:
        [attempt] = attempts
        response = await self._http.post("/v1/run", json=attempt.call.body(), headers=attempt.call.headers())
        self.oracle.answer(attempt, _read(response.content))

    async def _job(self, attempts: Sequence[Attempt]) -> None:
        [attempt] = attempts
        response = await self._http.post("/v1/jobs", json=attempt.call.body(), headers=attempt.call.headers())
        if response.status_code != 202:
            self.oracle.answer(attempt, _read(response.content))
            return
        attempt.is_job = True
        while True:
            try:
                response = await self._http.get(f"/v1/jobs/{attempt.call.id}", params={"wait": ASK_S})
            except httpx.TransportError:
                await asyncio.sleep(PAUSE_S)
                continue
            if response.status_code == 404:
                has_excuse = self.oracle.has_forgotten(attempt.sent_at)
                self.oracle.end(attempt, Ending.BROKE if has_excuse else Ending.SILENT)
                return
            if response.status_code not in {202, 503}:
                self.oracle.answer(attempt, _read(response.content))
                return
            if response.status_code == 503:
                await asyncio.sleep(PAUSE_S)

    async def _batch(self, attempts: Sequence[Attempt]) -> None:
        body = {"calls": [attempt.call.body() for attempt in attempts]}
        headers = _LINES | attempts[0].call.headers()
        async with self._http.stream("POST", "/v1/batch", json=body, headers=headers) as response:
            if response.status_code != 200:
                error = _read(await response.aread())
                for attempt in attempts:
                    self.oracle.answer(attempt, error)
                return
            async for line in response.aiter_lines():
                item = json.loads(line)
                index = item.pop("index")
                if 0 <= index < len(attempts):
                    self.oracle.answer(attempts[index], item)
                else:
                    self.oracle.stray(f"a line of {len(attempts)} is numbered {index}: {line[:200]}")


def _read(body: bytes) -> dict[str, Any]:
    """An answer as it came; one that is no JSON is for the oracle to judge as well."""
    try:
        return dict(json.loads(body))
    except ValueError:
        return {"unreadable": body[:300].decode(errors="replace")}


class Load:
    """Calls in one batch request, sent by a thread while the test does something to the service."""

    def __init__(
        self,
        url: str,
        name: str,
        count: int,
        *,
        seconds: float = 0.05,
        patience_s: float = 0.0,
        **fields: Any,
    ) -> None:
        """Send `count` calls, each of which sleeps for `seconds`; `fields` are fields of every call."""
        name = f"{name}-{uuid4().hex[:8]}"  # an id that was used is answered from memory
        self.calls = [Call(f"{name}-{n}", CallStatus.OK, seconds, fields=fields) for n in range(count)]
        self.oracle = Oracle()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send(url, patience_s)))
        self._thread.start()

    async def _send(self, url: str, patience_s: float) -> None:
        callers = Callers(url, self.oracle)
        await callers.send(self.calls, way="batch", patience_s=patience_s)
        await callers.close()

    def wait_answers(self, count: int) -> None:
        """Wait until so many calls are answered and others are still under way."""
        with self.oracle.changed:
            assert self.oracle.changed.wait_for(lambda: self.oracle.answers() >= count or self._is_over(), 60)
            assert not self._is_over(), f"too early to tell anything: {self.oracle.count()}"

    def _is_over(self) -> bool:
        """Whether no attempt is open, which is also so between two of them."""
        attempts = self.oracle.attempts()
        return bool(attempts) and all(attempt.ending for attempt in attempts)

    def count(self) -> Counts:
        """What came of the calls, when all attempts have ended."""
        self._thread.join(120)
        assert not self._thread.is_alive(), f"still under way: {self.oracle.count()}"
        return self.oracle.count()

    def broke_off(self) -> bool:
        """Whether the connection broke before the last answer; waits for the end of either."""
        self.count()
        return any(attempt.ending is Ending.BROKE for attempt in self.oracle.attempts())


def all_right(load: Load) -> None:
    """Every call is answered once, in time, with its own value."""
    counts = load.count()
    assert counts.is_clean, counts.complaints[:3]
    assert (counts.executed, counts.faults) == (len(load.calls), {})


def right_or_fault(load: Load) -> int:
    """Every call is answered once, in time, with its own value or by a fault that says what failed; how many are right.

    A call that was refused, because nobody was there to take it, counts as neither.
    """
    counts = load.count()
    assert counts.is_clean, counts.complaints[:3]
    assert counts.answered + counts.refused == len(load.calls)
    return counts.executed
