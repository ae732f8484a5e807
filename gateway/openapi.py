"""What `/openapi.json` says of the hot routes, which FastAPI cannot see into.

The schemas are those of the models that the routes parse with, with this service's own bounds and defaults
in them. FastAPI adds the rest of the routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from gateway.reader import CallReader
from gateway.tenants import scope_of
from sandbox.calls import ToolCall, ToolResult
from sandbox.grading.math import MathGrade, MathTask
from sandbox.grading.task import Judgement, JudgeRequest

_REF = "#/components/schemas/{model}"
_RUN_ERRORS = (409, 413, 422, 429, 500, 503, 504)
_JOBS_ERRORS = (413, 422, 429, 500, 503, 504)
_JOB_ERRORS = (404, 409, 422, 429, 500, 503)
_END_ERRORS = (404, 500, 503)
_BATCH_ERRORS = (413, 422, 429, 500, 503)
_JUDGE_ERRORS = (413, 422, 429, 500, 503, 504)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_METHODS = {"get", "post", "delete"}
_MEANING = {
    200: "Every verdict on the program, also that it failed.",
    202: "Not done yet.",
    401: "No API key, or one that is not known.",
    403: "The API key lacks the scope {scope!r}, which this takes.",
    404: "Nobody knows this call, or not any more.",
    409: "Somebody has asked for the end of this call.",
    413: "The request is too large.",
    422: "The call is wrong; the message names the field.",
    429: "Full, or the call would wait past its deadline; try again after `retry_after_s`.",
    500: "We failed. The program may have run, and the answer says nothing about it.",
    503: "No Redis, no worker, or shutting down; try again after `retry_after_s`.",
    504: "The deadline passed before the program started; it is safe to send the call again.",
}


_DEADLINE = {
    "name": "x-deadline-ms",
    "in": "header",
    "description": "How long the caller waits: the deadline of calls that name none, a bound on the others.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}
_WAIT = {
    "name": "wait",
    "in": "query",
    "description": "Seconds to wait for the result, of which the service does not wait all when they are many.",
    "schema": {"type": "number", "minimum": 0, "default": 0},
}


class ErrorBody(BaseModel):
    """What went wrong on our side of the program, or with the request."""

    name: str = Field(description="The class of the error, as the Python client raises it.")
    message: str
    retry_after_s: float | None = Field(
        default=None, description="Present when a retry can help, after this long."
    )


class ErrorAnswer(BaseModel):
    """In place of a result."""

    error: ErrorBody


class BatchAnswer(BaseModel):
    """Results in the order of the calls."""

    results: list[ToolResult | ErrorAnswer]


class ResultLine(ToolResult):
    """A result with the position of its call."""

    index: int = Field(ge=0)


class ErrorLine(ErrorAnswer):
    """An error with the position of its call."""

    index: int = Field(ge=0)


class MathBatchRequest(BaseModel):
    """Tasks for a grader of mathematics."""

    items: list[MathTask]


class MathBatchAnswer(BaseModel):
    """Grades in the order of the tasks."""

    results: list[MathGrade | ErrorAnswer]


class JudgeBatchRequest(BaseModel):
    """Tasks that are judged together."""

    items: list[JudgeRequest]


class JudgeBatchAnswer(BaseModel):
    """Judgements in the order of the items."""

    results: list[Judgement | ErrorAnswer]


class Job(BaseModel):
    """A call whose result is not there yet."""

    id: str
    status: Literal["pending"]


class JobEnd(BaseModel):
    """What came of asking for the end of a call."""

    id: str
    cancelled: bool = Field(description="False when it had ended before, or nobody knows it.")


def add_hot_routes(openapi: dict[str, Any], reader: CallReader) -> None:
    """Put the routes and their schemas into the description of an app."""
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(_schemas(reader))
    result, pending = {"application/json": "ToolResult"}, {"application/json": "Job"}
    lines = {"application/json": "BatchAnswer", "application/x-ndjson": "ResultLine"}
    grade, grades = {"application/json": "MathGrade"}, {"application/json": "MathBatchAnswer"}
    judgement, judgements = {"application/json": "Judgement"}, {"application/json": "JudgeBatchAnswer"}
    job_id = {"name": "call_id", "in": "path", "required": True, "schema": {"type": "string"}}
    openapi["paths"] |= {
        "/v1/run": {"post": _operation("Run a program", _RUN_ERRORS, {200: result}, "ToolCall")},
        "/v1/batch": {"post": _operation("Run many programs", _BATCH_ERRORS, {200: lines}, "BatchRequest")},
        "/v1/judge": {
            "post": _operation("Judge a submission", _JUDGE_ERRORS, {200: judgement}, "JudgeRequest", ()),
        },
        "/v1/judge/batch": {
            "post": _operation(
                "Judge many submissions", _BATCH_ERRORS, {200: judgements}, "JudgeBatchRequest"
            ),
        },
        "/v1/jobs": {
            "post": _operation("Run a program and ask later", _JOBS_ERRORS, {202: pending}, "ToolCall"),
        },
        "/v1/jobs/{call_id}": {
            "parameters": [job_id],
            "get": _operation("What came of a call", _JOB_ERRORS, {200: result, 202: pending})
            | {"parameters": [_WAIT]},
            "delete": _operation("End a call", _END_ERRORS, {200: {"application/json": "JobEnd"}}),
        },
        "/v1/grade/math": {"post": _operation("Grade an answer", _RUN_ERRORS, {200: grade}, "MathTask", [])},
        "/v1/grade/math/batch": {
            "post": _operation("Grade many answers", _BATCH_ERRORS, {200: grades}, "MathBatchRequest", []),
        },
    }


def add_keys(openapi: dict[str, Any]) -> None:
    """Say which routes need an API key, how it is shown, and what it is good for."""
    openapi["components"]["securitySchemes"] = _KEYS
    openapi["security"] = [{name: []} for name in _KEYS]
    for path, operations in openapi["paths"].items():
        scope = scope_of(path)
        for operation in (operations[method] for method in _METHODS & operations.keys()):
            if scope is None:
                operation["security"] = []
            else:
                operation["responses"] |= {"401": _error(401), "403": _error(403, scope=scope)}


def _schemas(reader: CallReader) -> dict[str, Any]:
    models: list[tuple[type[BaseModel], Any]] = [
        (ToolCall, "validation"),
        (reader.BatchRequest, "validation"),
        (BatchAnswer, "serialization"),
        (ResultLine, "serialization"),
        (ErrorLine, "serialization"),
        (MathBatchRequest, "validation"),
        (MathBatchAnswer, "serialization"),
        (JudgeRequest, "validation"),
        (JudgeBatchRequest, "validation"),
        (Judgement, "serialization"),
        (JudgeBatchAnswer, "serialization"),
        (Job, "serialization"),
        (JobEnd, "serialization"),
    ]
    _, definitions = models_json_schema(models, ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    for name, default in reader.defaults:
        bounded = schemas["Limits"]["properties"][name]
        bounded |= {"maximum": getattr(reader.ceilings, name), "default": default}
    if reader.ceilings.network == "none":
        schemas["ToolCall"]["properties"]["network"]["enum"] = ["none"]
    ceiling = reader.ceilings.deadline_s
    for model in ("ToolCall", "CaseTask", "FunctionTask"):
        deadline = schemas[model]["properties"]["deadline_s"]
        deadline |= {"maximum": ceiling, "default": min(deadline["default"], ceiling)}
    for model in ("MathBatchRequest", "JudgeBatchRequest"):
        schemas[model]["properties"]["items"]["maxItems"] = reader.max_batch
    longest = schemas["MathTask"]["properties"]["timeout_s"]
    ceiling = reader.ceilings.cpu_s
    longest |= {"maximum": min(longest["maximum"], ceiling), "default": min(longest["default"], ceiling)}
    return schemas


def _operation(
    summary: str,
    errors: tuple[int, ...],
    answers: dict[int, dict[str, str]],
    request: str | None = None,
    parameters: Sequence[Any] = (_DEADLINE,),
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            **{str(code): _answer(code, media) for code, media in answers.items()},
            **{str(code): _error(code) for code in errors},
        },
    }
    if request is not None:
        operation["parameters"] = [*parameters]
        operation["requestBody"] = {"required": True, "content": {"application/json": _schema(request)}}
    return operation


def _answer(code: int, answer: dict[str, str]) -> dict[str, Any]:
    content = {media: _schema(model) for media, model in answer.items()}
    return {"description": _MEANING[code], "content": content}


def _error(code: int, **words: str) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "description": _MEANING[code].format(**words),
        "content": {"application/json": _schema("ErrorAnswer")},
    }
    if code in {429, 503}:
        answer["headers"] = {"Retry-After": {"description": "Whole seconds.", "schema": {"type": "integer"}}}
    if code == 401:
        answer["headers"] = {"WWW-Authenticate": {"schema": {"const": "Bearer"}}}
    return answer


def _schema(model: str) -> dict[str, Any]:
    return {"schema": {"$ref": _REF.format(model=model)}}
