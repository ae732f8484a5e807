"""Scenarios for locust: `Single`, `Batch` and `Rollout`. Each answer is checked against what its program must print.

    locust -f loadtest/locustfiles/scenarios.py --headless -u 50 -r 10 -t 20s --host http://127.0.0.1:8000 Single
    locust -f loadtest/locustfiles --class-picker --host http://127.0.0.1:8000         a web page, to choose on

The names at the end of a command choose scenarios; without one all of them run. A shape, which moves the number of
users, is chosen by its file: `-f loadtest/locustfiles/scenarios.py,loadtest/locustfiles/steps.py` (see `steps.py` and
`training.py`). For a service elsewhere, `--host` has its URL and SANDBOX_API_KEY its key. With
`python -m loadtest.locustfiles` in the place of `locust`, a service is started for the run and stopped after it.

What counts as what. A request is a success when its answer is right; a fault, an error or a wrong answer is a failure
that says which, and for which kind of program. 429 is neither: it has a row of its own, `… refused (429)`, and the same
call goes again after the `Retry-After` of its answer. A batch is one request; an item that went wrong in it is a
failure of the row `batch item`, and the others of its batch stand.

This is a closed loop: a user sends its next call when the last one is answered. So a service that slows down is asked
for less, and one that stalls delays as many calls as there are users, where real arrivals would have met it with many
more. Latencies look better than they are. `sandbox bench` fixes the times of sending in advance and is the honest one;
this is for what locust is good at: many machines, and a page to watch.
"""

from __future__ import annotations

import random
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import gevent
from locust import FastHttpUser, constant, events, task
from locust.contrib.fasthttp import ResponseContextManager
from locust.env import Environment
from pydantic import BaseModel, ValidationError

from loadtest.workloads import WORKLOADS, Kind, load_workload
from sandbox import Overloaded, ToolCall, ToolResult
from sandbox.api_keys import key_of_caller
from sandbox.calls import first_error

_TURNS = 4  # of a rollout
_OK, _REFUSED = 200, 429
_PAUSE_S = 1.0  # after a failure, so that nobody hammers a service that is down

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class Wrong(Exception):
    """An answer that must not be; its text is the name of locust's failure."""


class _Error(BaseModel):
    name: str
    retry_after_s: float | None = None


class _ErrorAnswer(BaseModel):
    error: _Error


class _BatchAnswer(BaseModel):
    results: list[ToolResult | _ErrorAnswer]


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """Options of the scenarios, which locust shows on its page as well."""
    parser.add_argument("--workload", default="mixed", choices=list(WORKLOADS), help="Programs that are sent")
    parser.add_argument("--batch-size", type=int, default=64, help="Batch: calls in a request")
    parser.add_argument(
        "--think", type=float, default=2.0, help="Rollout: mean seconds that a model generates"
    )


class Caller(FastHttpUser):
    """One caller with one connection, and one request open at a time."""

    abstract = True
    insecure = False  # it may carry a key
    network_timeout = 90.0  # a call's deadline is 60 s
    wait_time = constant(0)

    def __init__(self, environment: Environment) -> None:
        key = key_of_caller()
        self.default_headers = {"content-type": "application/json"}
        if key is not None:
            self.default_headers["authorization"] = f"Bearer {key}"
        super().__init__(environment)
        assert environment.parsed_options is not None
        self.options: Any = environment.parsed_options
        self.kinds = load_workload(self.options.workload).draw(random.Random())

    def run_one(self, scenario: str, kind: Kind, call: ToolCall) -> None:
        """Send one call and check its answer."""

        def read(content: bytes) -> None:
            _check(kind, _parse(ToolResult, content))

        self.post("/v1/run", f"{scenario} {kind.name}", _body(call), read)

    def post(self, path: str, row: str, body: str, read: Callable[[bytes], T]) -> T | None:
        """Send a request until it is taken. What `read` makes of its answer; None where that counts as a failure."""
        while True:
            with self.client.post(path, data=body, name=row, catch_response=True) as response:
                wait_s = _retry_after_s(response)
                if response.status_code == _OK:
                    try:
                        return read(response.content)
                    except Wrong as exc:
                        response.failure(exc)
                        return None
                if response.status_code == _REFUSED and wait_s is not None:
                    response.request_meta["name"] = f"{row} refused (429)"
                    response.success()
                elif response.status_code:  # or locust says why there was no answer
                    response.failure(f"{response.status_code} {_error_name(response)}")
            gevent.sleep(_PAUSE_S if wait_s is None else wait_s)
            if response.status_code != _REFUSED or wait_s is None:
                return None

    def count(self, row: str, failure: Exception | None = None) -> None:
        """Count what is no request, and has no time, of its own."""
        self.environment.events.request.fire(
            request_type="ITEM",
            name=row,
            response_time=None,
            response_length=0,
            exception=failure,
            context={},
        )


class Single(Caller):
    """One call after the other, each a request."""

    @task
    def call(self) -> None:
        """One of them."""
        kind = next(self.kinds)
        self.run_one("single", kind, kind.call())


class Batch(Caller):
    """One batch after the other."""

    @task
    def batch(self) -> None:
        """One of them. What was refused of it goes again in a further one."""
        left = [(kind := next(self.kinds), kind.call()) for _ in range(self.options.batch_size)]
        row = f"batch of {self.options.batch_size}"
        while left:
            body = f'{{"calls":[{",".join(_body(call) for _, call in left)}]}}'
            results = self.post("/v1/batch", row, body, partial(_read_batch, len(left)))
            if results is None:
                return
            refused, wait_s = [], 0.0
            for item, result in zip(left, results, strict=True):
                if isinstance(result, ToolResult):
                    self.check_item(item[0], result)
                elif result.error.name == Overloaded.__name__ and result.error.retry_after_s is not None:
                    self.count("batch item refused (429)")
                    refused.append(item)
                    wait_s = max(wait_s, result.error.retry_after_s)
                else:
                    self.count("batch item", Wrong(f"{item[0].name}: {result.error.name}"))
            left = refused
            gevent.sleep(wait_s)

    def check_item(self, kind: Kind, result: ToolResult) -> None:
        """Count an answer that is wrong, and only such."""
        try:
            _check(kind, result)
        except Wrong as exc:
            self.count("batch item", exc)


class Rollout(Caller):
    """One rollout after the other: a model generates, calls a tool, reads what it printed, and generates again."""

    @task
    def rollout(self) -> None:
        """One of them. Its calls have ids that say which, and which turn."""
        name = f"rollout-{uuid4().hex}"
        for turn in range(_TURNS):
            gevent.sleep(random.expovariate(1 / self.options.think) if self.options.think else 0)
            kind = next(self.kinds)
            self.run_one("rollout", kind, kind.call().model_copy(update={"id": f"{name}/{turn}"}))


def _body(call: ToolCall) -> str:
    """What the kind leaves out stays out, so that the service's defaults hold. An id it must have, to go again."""
    return call.model_copy(update={"id": call.id}).model_dump_json(exclude_unset=True)


def _parse(model: type[M], content: bytes) -> M:
    try:
        return model.model_validate_json(content)
    except ValidationError as exc:
        raise Wrong(f"unreadable: {first_error(exc)}") from exc


def _read_batch(calls: int, content: bytes) -> list[ToolResult | _ErrorAnswer]:
    results = _parse(_BatchAnswer, content).results
    if len(results) != calls:
        raise Wrong(f"{len(results)} answers to {calls} calls")
    return results


def _check(kind: Kind, result: ToolResult) -> None:
    if result.status != kind.status:
        raise Wrong(f"{kind.name}: {result.status} where {kind.status} must come")
    if result.stdout != kind.stdout:
        raise Wrong(f"{kind.name}: printed {result.stdout[:40]!r} where {kind.stdout!r} must come")


def _retry_after_s(response: Any) -> float | None:
    """What a service says that is too busy, or not there just now."""
    header = (response.headers or {}).get("retry-after") or ""
    return float(header) if header.isdecimal() else None


def _error_name(response: ResponseContextManager) -> str:
    try:
        return _ErrorAnswer.model_validate_json(response.content).error.name
    except ValidationError:
        return "without an error of ours"  # a proxy's
