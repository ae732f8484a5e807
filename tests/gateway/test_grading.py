"""The shape of the routes that grade mathematics. No call comes to a verdict here; tests/system has those."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from sandbox.api_keys import new_key, stanza
from sandbox.grading.math import Comparison, MathTask, prepare

from .conftest import Serve
from .test_openapi import validator

KEY, OTHER = new_key(), new_key()
PLAIN = {"answer": r"so it is \boxed{5}", "gold": "5.0"}
SYMBOLIC = {"answer": r"\boxed{\sqrt{12}}", "gold": r"2\sqrt{3}"}
NOTHING = {"wall_s": 0.0, "cpu_s": 0.0, "memory_peak_bytes": 0, "queue_s": 0.0}


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Two tenants, of which one may have three calls in flight."""
    file = tmp_path / "keys.toml"
    file.write_text(
        stanza(KEY, "a", ["run"]) + stanza(OTHER, "b", ["run"]) + "[tenants.a]\nmax_in_flight = 3\n"
    )
    return file


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
    """With 422 and the field, alone; in a batch it is an unknown grade in its place."""
    http = (await serve(ceilings={"cpu_s": 30})).http
    alone = await http.post("/v1/grade/math", json=wrong)
    assert (alone.status_code, alone.json()) == (
        422,
        {"error": {"name": "InvalidCall", "message": message}},
    )
    batch = await http.post("/v1/grade/math/batch", json={"items": [PLAIN, wrong, PLAIN]})
    assert batch.status_code == 200
    first, second, third = batch.json()["results"]
    assert (first["correct"], second["correct"], third["correct"]) == (True, None, True)
    assert (second["reason"], second["error"]["message"]) == ("invalid_task", message)
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


async def test_a_batch_may_be_larger_than_its_tenant(serve: Serve, keys_file: Path) -> None:
    """What a tenant may not have at once waits its turn."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    items = [{"answer": rf"\boxed{{x^{{{power}}}}}", "gold": "x"} for power in range(20)]
    key = {"authorization": f"Bearer {KEY}"}
    batch = await service.http.post("/v1/grade/math/batch", json={"items": items}, headers=key)
    assert batch.status_code == 200
    assert [grade["reason"] for grade in batch.json()["results"]] == ["grader_failed"] * 20


async def test_no_tenant_learns_what_another_grades(serve: Serve, keys_file: Path) -> None:
    """A call of one is not joined by another's, nor is what came of it told."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    for key in (KEY, OTHER):
        await service.http.post("/v1/grade/math", json=SYMBOLIC, headers={"authorization": f"Bearer {key}"})
    assert len(service.worker.seen) == 2


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
