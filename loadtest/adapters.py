"""What is particular to the API of each service: how it is asked for a call, and what its answers say in our words."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Literal, Protocol

from pydantic import BaseModel, Field
from pydantic_core import from_json

from loadtest.openloop import REFUSED, Reply
from sandbox import CallStatus, ConfigError, InternalError, QueueTimeout, SandboxError, ToolCall, ToolResult
from sandbox.calls import MIB

_MAX_WHY = 200  # characters of a service's own words that are kept

#: Faults that this service answers with an error.
FAULTS: Mapping[type[SandboxError], str] = {
    QueueTimeout: CallStatus.QUEUE_TIMEOUT.value,
    InternalError: CallStatus.INTERNAL_ERROR.value,
}


class Adapter(Protocol):
    """What is particular to one API."""

    path: str

    def encode(self, call: ToolCall) -> bytes:
        """The body that asks for this call. Raises ConfigError for what the API has no words for."""
        ...

    def read(self, status: int, body: bytes) -> Reply:
        """What the answer says. Raises ValueError for one that has not the shape of the API."""
        ...


class V1:
    """One call, one request; `/docs` of any gateway describes it."""

    path = "/v1/run"

    def encode(self, call: ToolCall) -> bytes:
        """What the kind leaves out stays out, so that the server's defaults hold."""
        return call.model_copy(update={"id": call.id}).model_dump_json(exclude_unset=True).encode()

    def read(self, status: int, body: bytes) -> Reply:
        """A verdict is a result; a fault is an error with a name."""
        if status == 200:
            return of_result(ToolResult.model_validate_json(body))
        refusal = _http_error(status, body)
        for fault, outcome in FAULTS.items():
            if status == fault.http_status and _error_name(body) == fault.__name__:
                return Reply(outcome, why=refusal.why)
        return refusal


def some_words(text: str) -> str:
    """The beginning of what a service says, in one line, without what would move a terminal's cursor."""
    return "".join(char if char.isprintable() else " " for char in text[:_MAX_WHY])


def of_result(result: ToolResult) -> Reply:
    """A result of this service in our words."""
    return Reply(
        result.status.value,
        result.stdout,
        cpu_s=result.usage.cpu_s,
        wall_s=result.usage.wall_s,
        queue_s=result.usage.queue_s,
        why=some_words(result.reason or ""),
    )


def _error_name(body: bytes) -> object:
    try:
        return from_json(body)["error"]["name"]
    except (ValueError, TypeError, KeyError):
        return None  # it is not the gateway that answered


class _Judged(BaseModel):
    reason: Literal["", "internal_error", "worker_timeout", "queue_timeout", "invalid_input"]
    run_success: bool
    stdout: str | None
    cost: float = Field(ge=0)


class _JudgedBatch(BaseModel):
    results: list[_Judged] = Field(min_length=1, max_length=1)


class CodeJudge:
    """A batch of one submission: several calls in a request would answer the first of them with the last."""

    path = "/run/long-batch"

    _OUTCOMES: Mapping[str, str] = {
        "internal_error": CallStatus.INTERNAL_ERROR.value,
        "worker_timeout": CallStatus.TIMEOUT.value,
        "queue_timeout": CallStatus.QUEUE_TIMEOUT.value,
        "invalid_input": "invalid_input",
    }

    def encode(self, call: ToolCall) -> bytes:
        """It knows no limits of a call; its own hold."""
        _refuse(call, "code-judge", "files", "network", "echo_last_value")
        submission = {"sub_id": call.id, "type": "python", "solution": call.code, "input": call.stdin}
        return json.dumps({"type": "batch", "submissions": [submission]}).encode()

    def read(self, status: int, body: bytes) -> Reply:
        """It says why a run failed, and else whether its exit code was 0."""
        if status != 200:
            return _http_error(status, body)
        [judged] = _JudgedBatch.model_validate_json(body).results
        ended = CallStatus.OK if judged.run_success else CallStatus.ERROR
        outcome = self._OUTCOMES.get(judged.reason, ended.value)
        return Reply(outcome, judged.stdout or "", wall_s=judged.cost)


class _Ran(BaseModel):
    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = Field(default=None, ge=0)
    return_code: int | None = None
    stdout: str | None = None


class _Fused(BaseModel):
    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    run_result: _Ran | None = None


class SandboxFusion:
    """One program in a request."""

    path = "/run_code"

    def encode(self, call: ToolCall) -> bytes:
        """Wall time, and memory where the call names it, are limits that it knows; the others are its own."""
        _refuse(call, "SandboxFusion", "network", "echo_last_value")
        contents = {
            name: content.encode() if isinstance(content, str) else content.base64
            for name, content in call.files.items()
        }
        request: dict[str, object] = {
            "code": call.code,
            "language": "python",
            "stdin": call.stdin,
            "run_timeout": call.limits.wall_s,
            "files": {name: b64encode(content).decode() for name, content in contents.items()},
        }
        if "memory_bytes" in call.limits.model_fields_set:
            request["memory_limit_MB"] = max(1, call.limits.memory_bytes // MIB)
        return json.dumps(request).encode()

    def read(self, status: int, body: bytes) -> Reply:
        """The inner status tells a time limit from an exit code, and its own failure from both."""
        if status != 200:
            return _http_error(status, body)
        answer = _Fused.model_validate_json(body)
        ran = answer.run_result
        if answer.status == "SandboxError" or ran is None or ran.status == "Error":
            return Reply(CallStatus.INTERNAL_ERROR.value, why=some_words(answer.message))
        if ran.status == "TimeLimitExceeded":
            ended = CallStatus.TIMEOUT
        elif ran.return_code is None:
            raise ValueError("the program has finished without an exit code")
        else:
            ended = CallStatus.OK if ran.return_code == 0 else CallStatus.ERROR
            ended = CallStatus.SIGNALED if ran.return_code < 0 else ended
        return Reply(ended.value, ran.stdout or "", wall_s=ran.execution_time)


def _refuse(call: ToolCall, name: str, *fields: str) -> None:
    """Raise ConfigError where a call uses one of these fields, which `name` has not."""
    without = ToolCall(code="")
    if used := [field for field in fields if getattr(call, field) != getattr(without, field)]:
        raise ConfigError(f"{name} has no {', '.join(used)}, so such calls cannot be compared there")


def _http_error(status: int, body: bytes) -> Reply:
    outcome = REFUSED if status in {429, 503} else f"http_{status}"
    return Reply(outcome, why=some_words(body[: 4 * _MAX_WHY].decode(errors="replace")))


#: By the name of the target.
ADAPTERS: Mapping[str, type[Adapter]] = {"v1": V1, "code-judge": CodeJudge, "sandbox-fusion": SandboxFusion}
