"""The description of the hot routes against what they accept."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema_rs import Draft202012Validator

from gateway.app import create_app
from gateway.reader import CallReader
from sandbox.calls import Limits, ToolCall, ToolResult
from sandbox.errors import InvalidCall
from sandbox.queue import CallQueue
from sandbox.settings import CeilingSettings, RedisSettings, Settings

from .conftest import Serve

CEILINGS = CeilingSettings(wall_s=5, deadline_s=50, processes=16)
SETTINGS = Settings(ceilings=CEILINGS)
DESCRIPTION = create_app(SETTINGS, CallQueue(RedisSettings(url="unix:///nowhere"))).openapi()
SCHEMAS = DESCRIPTION["components"]["schemas"]
READER = CallReader(SETTINGS.gateway, CEILINGS)


def validator(model: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{model}", "components": {"schemas": SCHEMAS}})


CALL_IS_DOCUMENTED = validator("ToolCall")
NUMBERS = (
    st.integers(-5, 20) | st.floats(-100, 100) | st.sampled_from([16 << 20, 2 << 30, 1 << 41, 0.0, 3600.5])
)
VALUES = st.none() | NUMBERS | st.text(max_size=5) | st.lists(st.none(), max_size=1)
NAMES = st.text("ab/_", min_size=1, max_size=3).filter(
    lambda name: "//" not in name and name.strip("/") == name
)
LIMITS = st.sampled_from([*Limits.model_fields, "more"])
#: One field at a time, so that a call is refused for that field or for none.
FIELDS = st.one_of(
    st.tuples(st.just("id"), st.from_regex(r"\A[a-z. ]{0,3}\Z") | VALUES),
    st.tuples(st.just("code"), st.text() | VALUES),
    st.tuples(st.just("stdin"), st.text() | VALUES),
    st.tuples(
        st.just("files"),
        st.dictionaries(NAMES, st.text() | st.just({"base64": "YQ=="}) | VALUES, max_size=2) | VALUES,
    ),
    st.tuples(st.just("limits"), st.dictionaries(LIMITS, NUMBERS | VALUES, max_size=1) | VALUES),
    st.tuples(st.just("deadline_s"), NUMBERS | VALUES),
    st.tuples(st.just("priority"), st.sampled_from(["tool", "judge", "other"]) | VALUES),
    st.tuples(st.just("echo_last_value"), st.booleans() | st.lists(st.none())),
    st.tuples(st.just("network"), st.sampled_from(["none", "loopback", "host"]) | VALUES),
    st.tuples(st.just("more"), VALUES),
)
CALLS = FIELDS.map(lambda field: {"code": "", field[0]: field[1]}) | st.just({})


def is_number_in_text(call: dict[str, Any]) -> bool:
    """Pydantic reads '5' as 5, which the schema leaves out on purpose: it tells what to write."""
    limits = call.get("limits")
    numbers = [call.get("deadline_s"), *(limits.values() if isinstance(limits, dict) else ())]
    return any(isinstance(value, str) for value in numbers)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(CALLS)
def test_the_documented_calls_are_the_accepted_ones(call: dict[str, Any]) -> None:
    """What the schema of ToolCall allows is taken, and what it forbids is refused, ceilings included."""
    try:
        READER.one(json.dumps(call).encode())
        accepted = True
    except InvalidCall:
        accepted = False
    documented = CALL_IS_DOCUMENTED.is_valid(call)
    assert accepted == documented or (accepted and is_number_in_text(call))


def test_the_schemas_are_those_of_the_models() -> None:
    """Every field of the models stands in the description, with the text that explains it."""
    for model, mode in ((ToolCall, "validation"), (ToolResult, "serialization")):
        own = model.model_json_schema(mode=mode)
        documented = SCHEMAS[model.__name__]
        assert documented["properties"].keys() == own["properties"].keys()
        assert documented.get("required") == own.get("required")
        for name, field in own["properties"].items():
            assert documented["properties"][name].get("description") == field.get("description")


def test_bounds_and_defaults_are_this_service_s() -> None:
    """Ceilings stand in the description as maxima, and defaults as they will be."""
    limits = SCHEMAS["Limits"]["properties"]
    assert (limits["wall_s"]["maximum"], limits["wall_s"]["default"]) == (5, 5)
    assert (limits["cpu_s"]["maximum"], limits["cpu_s"]["default"]) == (60, 10)
    deadline = SCHEMAS["ToolCall"]["properties"]["deadline_s"]
    assert (deadline["maximum"], deadline["default"]) == (50, 50)
    assert SCHEMAS["BatchRequest"]["properties"]["calls"]["maxItems"] == 1024


def test_every_reference_leads_somewhere() -> None:
    """No schema of the description is missing."""
    text = json.dumps(DESCRIPTION)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.partition('"')[0] in SCHEMAS


@pytest.mark.parametrize(
    ("accept", "model"), [("application/json", "BatchAnswer"), ("application/x-ndjson", None)]
)
async def test_answers_are_as_documented(serve: Serve, accept: str, model: str | None) -> None:
    """Results, faults and errors of a batch fit the schemas of both forms."""
    service = await serve()
    calls = [{"code": "echo"}, {"code": "fault"}, {"cod": ""}]
    response = await service.http.post("/v1/batch", json={"calls": calls}, headers={"accept": accept})
    if model is not None:
        validator(model).validate(response.json())
        return
    for line in map(json.loads, response.text.splitlines()):
        validator("ErrorLine" if "error" in line else "ResultLine").validate(line)


async def test_the_docs_are_served(serve: Serve) -> None:
    """The description and its page stand where the README says."""
    service = await serve()
    assert (await service.http.get("/openapi.json")).json()["paths"].keys() >= {
        "/v1/run",
        "/v1/batch",
        "/v1/status",
    }
    assert (await service.http.get("/docs")).status_code == 200


async def test_the_docs_need_no_internet(serve: Serve) -> None:
    """The page names no host, all that it loads is served beside it, and its script reads our OpenAPI version."""
    http = (await serve()).http
    page = (await http.get("/docs")).text
    assert re.findall(r"//[\w.-]+", page) == []
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page)
    parts = [await http.get(f"/{part}") for part in loaded]
    assert [part.status_code for part in parts] == [200] * 3
    [script] = [part.text for part in parts if "javascript" in part.headers["content-type"]]
    assert "SwaggerUIBundle" in script
    assert "openapi 3.1" in script.lower() or "OpenAPI31" in script
    assert "url: 'openapi.json'" in page
