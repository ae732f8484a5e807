"""The shape of the routes that grade mathematics. No call comes to a verdict here; tests/system has those."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from sandbox.grading.math import Comparison, MathTask, prepare

from .conftest import Serve
from .test_openapi import validator

PLAIN = {"answer": r"so it is \boxed{5}", "gold": "5.0"}
SYMBOLIC = {"answer": r"\boxed{\sqrt{12}}", "gold": r"2\sqrt{3}"}
NOTHING = {"wall_s": 0.0, "cpu_s": 0.0, "memory_peak_bytes": 0, "queue_s": 0.0}


async def test_a_grade_has_these_fields(serve: Serve) -> None:
    """All of them, always, as documented."""
    service = await serve()
    response = await service.http.post("/v1/grade/math", json=PLAIN)
    assert (response.status_code, response.json()) == (
        200,
        {
            "correct": True,
            "reason": "equal_number",
            "extracted": "5",
            "method": "last_boxed",
            "cached": False,
            "usage": NOTHING,
            "error": None,
        },
    )
    validator("MathGrade").validate(response.json())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"answer": "5"}, "gold: Field required"),
        (PLAIN | {"timeout_s": 61}, "timeout_s: Input should be less than or equal to 60"),
        (PLAIN | {"timeout_s": 31}, "timeout_s: 31 is above this service's ceiling of 30"),
        (PLAIN | {"more": 1}, "more: Extra inputs are not permitted"),
    ],
)
async def test_a_wrong_task_is_refused(serve: Serve, wrong: dict[str, Any], message: str) -> None:
    """With 422 and the field, alone; in a batch in its place."""
    http = (await serve(ceilings={"cpu_s": 30})).http
    error = {"error": {"name": "InvalidCall", "message": message}}
    alone = await http.post("/v1/grade/math", json=wrong)
    assert (alone.status_code, alone.json()) == (422, error)
    batch = await http.post("/v1/grade/math/batch", json={"items": [PLAIN, wrong, PLAIN]})
    assert batch.status_code == 200
    first, second, third = batch.json()["results"]
    assert (first["correct"], second, third["correct"]) == (True, error, True)
    validator("MathBatchAnswer").validate(batch.json())


@pytest.mark.parametrize("body", ["{}", "[]", '{"calls":[]}', '{"items":{}}', '{"items":[],"more":1}', "{"])
async def test_a_wrong_envelope_is_refused(serve: Serve, body: str) -> None:
    """With 422 for the whole."""
    response = await (await serve()).http.post("/v1/grade/math/batch", content=body)
    assert response.status_code == 422
    assert "items" in response.json()["error"]["message"]


async def test_a_batch_is_bounded(serve: Serve) -> None:
    """An empty one is answered; one of more items than `max_batch` is refused."""
    http = (await serve(gateway={"max_batch": 2})).http
    assert (await http.post("/v1/grade/math/batch", json={"items": []})).json() == {"results": []}
    assert (await http.post("/v1/grade/math/batch", json={"items": [PLAIN] * 3})).status_code == 413


async def test_plain_answers_take_no_permit_each(serve: Serve) -> None:
    """Only what has to be run counts as a call in flight."""
    http = (await serve(gateway={"max_in_flight": 4, "max_batch": 4})).http
    batch = await http.post("/v1/grade/math/batch", json={"items": [PLAIN] * 4})
    assert batch.status_code == 200


async def test_a_low_ceiling_lowers_the_default(serve: Serve) -> None:
    """A task that names no time gets what the service has; its clock does not go beyond the ceiling either."""
    service = await serve(ceilings={"cpu_s": 2, "wall_s": 3})
    await service.http.post("/v1/grade/math", json=SYMBOLIC)
    limits = service.worker.seen[0].call.limits
    assert (limits.cpu_s, limits.wall_s) == (2.0, 3.0)


async def test_equal_comparisons_are_run_once(serve: Serve) -> None:
    """However many of a batch are the same."""
    service = await serve()
    batch = await service.http.post("/v1/grade/math/batch", json={"items": [SYMBOLIC] * 5})
    assert [grade["reason"] for grade in batch.json()["results"]] == ["grader_failed"] * 5
    assert len(service.worker.seen) == 1


async def ended_by_somebody(serve: Serve, path: str, body: object) -> httpx.Response:
    """What a request is answered when somebody ends its one comparison."""
    service = await serve()
    await service.worker.rest()
    step = prepare(MathTask.model_validate(SYMBOLIC))
    assert isinstance(step, Comparison)
    asking = asyncio.create_task(service.http.post(path, json=body))
    while not (await service.http.delete(f"/v1/jobs/{step.call().id}")).json().get("cancelled"):
        assert not asking.done()
    return await asking


async def test_what_we_could_not_do_is_an_error_alone(serve: Serve) -> None:
    """With the status that a client knows from `/v1/run`."""
    response = await ended_by_somebody(serve, "/v1/grade/math", SYMBOLIC)
    assert (response.status_code, response.json()["error"]["name"]) == (409, "Cancelled")


async def test_what_we_could_not_do_is_unknown_in_a_batch(serve: Serve) -> None:
    """A grade of its own that says what went wrong; the others are as ever."""
    response = await ended_by_somebody(serve, "/v1/grade/math/batch", {"items": [PLAIN, SYMBOLIC]})
    first, second = response.json()["results"]
    assert (first["correct"], second["correct"], second["reason"]) == (True, None, "fault")
    assert second["error"]["name"] == "Cancelled"
    validator("MathBatchAnswer").validate(response.json())
