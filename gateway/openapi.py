"""What `/openapi.json` says of the hot routes, which FastAPI cannot see into.

The schemas are those of the models that the routes parse with, with this service's own bounds and defaults
in them. FastAPI adds the rest of the routes.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema

from gateway.reader import CallReader
from gateway.tenants import scope_of
from sandbox.calls import ToolCall, ToolResult

_REF = "#/components/schemas/{model}"
_RUN_ERRORS = (413, 422, 429, 500, 503, 504)
_BATCH_ERRORS = (413, 422, 429, 500, 503)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
}
_MEANING = {
    401: "No API key, or one that is not known.",
    403: "The API key lacks the scope {scope!r}, which this takes.",
    413: "The request is too large.",
    422: "The call is wrong; the message names the field.",
    429: "Full, or the call would wait past its deadline; try again after `retry_after_s`.",
    500: "We failed. The program may have run, and the answer says nothing about it.",
    503: "No Redis, no worker, or shutting down; try again after `retry_after_s`.",
    504: "The deadline passed before the program started; it is safe to send the call again.",
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


def add_hot_routes(openapi: dict[str, Any], reader: CallReader) -> None:
    """Put both routes and their schemas into the description of an app."""
    openapi.setdefault("components", {}).setdefault("schemas", {}).update(_schemas(reader))
    openapi["paths"] |= {
        "/v1/run": {
            "post": _operation("Run a program", "ToolCall", _RUN_ERRORS, {"application/json": "ToolResult"})
        },
        "/v1/batch": {
            "post": _operation(
                "Run many programs",
                "BatchRequest",
                _BATCH_ERRORS,
                {"application/json": "BatchAnswer", "application/x-ndjson": "ResultLine"},
            )
        },
    }


def add_keys(openapi: dict[str, Any]) -> None:
    """Say which routes need an API key, how it is shown, and what it is good for."""
    openapi["components"]["securitySchemes"] = _KEYS
    openapi["security"] = [{name: []} for name in _KEYS]
    for path, operations in openapi["paths"].items():
        scope = scope_of(path)
        for operation in operations.values():
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
    ]
    _, definitions = models_json_schema(models, ref_template=_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    for name, default in reader.defaults:
        bounded = schemas["Limits"]["properties"][name]
        bounded |= {"maximum": getattr(reader.ceilings, name), "default": default}
    if reader.ceilings.network == "none":
        schemas["ToolCall"]["properties"]["network"]["enum"] = ["none"]
    deadline = schemas["ToolCall"]["properties"]["deadline_s"]
    ceiling = reader.ceilings.deadline_s
    deadline |= {"maximum": ceiling, "default": min(deadline["default"], ceiling)}
    return schemas


def _operation(
    summary: str, request: str, errors: tuple[int, ...], answers: dict[str, str]
) -> dict[str, Any]:
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": _schema(request)}},
        "responses": {
            "200": {
                "description": "Every verdict on the program, also that it failed.",
                "content": {media: _schema(model) for media, model in answers.items()},
            },
            **{str(code): _error(code) for code in errors},
        },
    }


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
