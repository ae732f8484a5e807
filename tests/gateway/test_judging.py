"""`/v1/judge` and `/v1/judge/batch`: a task goes in, a judgement comes out. The code says what comes of a run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sandbox.grading.task import Judgement

from .conftest import Serve, listening, until


def task(*words: str, **fields: Any) -> dict[str, Any]:
    """A case for each word; all runs do what the code says."""
    code = fields.pop("code", "echo 1")
    return {"code": code, "cases": [{"expected": word} for word in words], **fields}


async def test_a_judgement(serve: Serve) -> None:
    """A task of cases comes back judged, each by its own call."""
    service = await serve()
    answer = await service.http.post("/v1/judge", json=task("1", "1", "2"))
    judgement = Judgement.model_validate_json(answer.content)
    assert answer.status_code == 200
    assert [test.verdict for test in judgement.tests] == ["accepted", "accepted", "wrong_answer"]


REFUSED = [
    ({}, "cases.code"),
    ({"code": ""}, "cases.cases"),
    ({"code": "", "cases": []}, "cases.cases"),
    ({"code": "", "tests": []}, "tests.tests"),
    ({"code": "", "cases": [{}]}, "cases.cases.0.expected"),
    ({"code": "", "cases": [{"expected": "", "output": ""}]}, "cases.cases.0.output"),
    ({"code": "", "tests": ["x"], "cases": [{"expected": ""}]}, "tests.cases"),
    ({"code": "", "tests": ["x"], "files": {"submission.py": ""}}, "tests.files"),
    (task("1", limits={"wall_s": 61}), "limits.wall_s: 61 is above this service's ceiling"),
    (task("1", deadline_s=3601), "deadline_s: 3601 is above this service's ceiling"),
    (task("x" * (1 << 20)), "limits.output_bytes"),
    (task("1", files={"a": "", "a/b": ""}), "files"),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
async def test_a_wrong_task_is_refused(serve: Serve, body: dict[str, Any], message: str) -> None:
    """422, with the field in the message."""
    answer = await (await serve()).http.post("/v1/judge", json=body)
    assert (answer.status_code, answer.json()["error"]["name"]) == (422, "InvalidCall")
    assert answer.json()["error"]["message"].startswith(message)


@pytest.mark.parametrize(
    ("code", "status", "name"), [("fault", 500, "InternalError"), ("late", 504, "QueueTimeout")]
)
async def test_a_fault_is_an_error(serve: Serve, code: str, status: int, name: str) -> None:
    """A judgement that we failed at, twice, is answered as the error that it is, and in a batch without a score."""
    service = await serve()
    answer = await service.http.post("/v1/judge", json=task("1", code=code))
    assert (answer.status_code, answer.json()["error"]["name"]) == (status, name)
    assert len(service.worker.seen) == 2
    batch = await service.http.post("/v1/judge/batch", json={"items": [task("1", code=code), task("1")]})
    assert [(each["verdict"], each["score"]) for each in batch.json()["results"]] == [
        ("fault", None),
        ("accepted", 1.0),
    ]


async def test_a_bad_item_is_answered_in_its_place(serve: Serve) -> None:
    """It is an error where the others are judgements, whatever is wrong with it."""
    service = await serve()
    items = [task("1"), {"cod": ""}, task("2"), 7, task("1", limits={"wall_s": 61})]
    answer = await service.http.post("/v1/judge/batch", json={"items": items})
    words = [each.get("verdict") or each["error"]["name"] for each in answer.json()["results"]]
    assert words == ["accepted", "InvalidCall", "wrong_answer", "InvalidCall", "InvalidCall"]


@pytest.mark.parametrize("body", [{"calls": []}, {"items": {}}, {"items": [], "more": 1}, []])
async def test_what_is_no_batch_is_refused(serve: Serve, body: Any) -> None:
    """422 that shows what a batch is."""
    answer = await (await serve()).http.post("/v1/judge/batch", json=body)
    assert answer.status_code == 422
    assert '{"items": [...]}' in answer.json()["error"]["message"]


async def test_an_empty_batch(serve: Serve) -> None:
    """Nothing asked, nothing answered."""
    answer = await (await serve()).http.post("/v1/judge/batch", json={"items": []})
    assert answer.json() == {"results": []}


async def test_many_cases_fit_into_a_small_gateway(serve: Serve) -> None:
    """One request holds no more permits than there are, however many calls it takes."""
    service = await serve(gateway={"max_in_flight": 2})
    answer = await service.http.post("/v1/judge", json=task(*"1" * 20))
    assert answer.json()["passed"] == 20
    items = {"items": [task(*"1" * 5)] * 2}
    assert [
        each["passed"] for each in (await service.http.post("/v1/judge/batch", json=items)).json()["results"]
    ] == [5, 5]
    many = await service.http.post("/v1/judge/batch", json={"items": [task("1")] * 3})
    assert many.status_code == 413


async def test_a_batch_of_too_many_cases_or_tests_is_too_large(serve: Serve) -> None:
    """Its answer would be."""
    service = await serve()
    for item, number in ((task(*"1" * 1000), 21), ({"code": "", "tests": [""] * 1000}, 101)):
        answer = await service.http.post("/v1/judge/batch", json={"items": [item] * number})
        assert answer.status_code == 413


async def test_a_full_gateway_says_when_to_come_again(serve: Serve) -> None:
    """429 with Retry-After, while others hold what a judgement needs."""
    service = await serve(gateway={"max_in_flight": 3})
    held = asyncio.create_task(service.http.post("/v1/run", json={"code": "hold"}))
    await service.worker.has_seen(1)
    full = await service.http.post("/v1/judge", json=task(*"1111"))
    assert (full.status_code, full.headers["retry-after"]) == (429, "1")
    assert (await service.http.post("/v1/judge", json=task("1"))).status_code == 200
    service.worker.released.set()
    await held


async def test_a_caller_that_hangs_up_ends_its_judgement(serve: Serve) -> None:
    """Its calls are cancelled, its permits given back, and no further case begins."""
    service = await serve()
    async with listening(service) as (host, port):
        body = b'{"code":"hold","cases":[%b]}' % b",".join([b'{"expected":""}'] * 50)
        _, writer = await asyncio.open_connection(host, port)
        writer.write(
            b"POST /v1/judge HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()
        await service.worker.has_seen(4)
        writer.close()
        await writer.wait_closed()
        await until(lambda: service.gateway.admission.held == 0)
    assert len(service.worker.seen) == 4
