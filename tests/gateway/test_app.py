"""The whole way of a call through a gateway."""

from __future__ import annotations

import asyncio
import json
import logging
from asyncio import Queue
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from gateway.app import Answers
from gateway.gateway import Gateway
from sandbox.calls import CallStatus, ToolResult
from sandbox.queue import CallQueue
from sandbox.settings import RedisSettings, Settings

from .conftest import Serve, Service, until


def error(response: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = response.json()
    assert set(body) == {"error"}
    return body["error"]


async def run(service: Service, **call: Any) -> httpx.Response:
    return await service.http.post("/v1/run", json=call)


async def batch(service: Service, *calls: Any) -> list[dict[str, Any]]:
    response = await service.http.post("/v1/batch", content=json.dumps({"calls": calls}))
    assert response.status_code == 200, response.text
    results: list[dict[str, Any]] = response.json()["results"]
    return results


async def lines(service: Service, *calls: Any) -> list[dict[str, Any]]:
    headers = {"accept": "application/x-ndjson"}
    response = await service.http.post("/v1/batch", content=json.dumps({"calls": calls}), headers=headers)
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.split("\n")[:-1]]


async def test_run_answers_the_worker_s_bytes(serve: Serve) -> None:
    """The result goes to the caller byte for byte as the worker wrote it."""
    service = await serve()
    response = await run(service, id="a", code="echo hé\n\u2028")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    result = ToolResult.model_validate_json(response.content)
    assert (result.id, result.status, result.stdout) == ("a", CallStatus.OK, "hé\n\u2028")
    assert response.content == result.model_dump_json().encode()


async def test_a_failing_program_is_a_result(serve: Serve) -> None:
    """A verdict against the program is answered 200."""
    response = await run(await serve(), code="fail")
    assert response.status_code == 200
    assert response.json()["status"] == "error"


@pytest.mark.parametrize(
    ("code", "status", "name", "message"),
    [
        ("late", 504, "QueueTimeout", "no slot was free in time"),
        ("fault", 500, "InternalError", "the jail broke"),
    ],
)
async def test_a_fault_is_an_error_of_ours(
    serve: Serve, code: str, status: int, name: str, message: str
) -> None:
    """A fault of one call is answered with its error's status, and its reason is the message."""
    response = await run(await serve(), code=code)
    assert response.status_code == status
    assert error(response) == {"name": name, "message": message}


async def test_batch_keeps_the_order(serve: Serve) -> None:
    """Results stand in the order of the calls, whatever order they finish in."""
    service = await serve()
    results = await batch(
        service, {"id": "a", "code": "hold"}, {"id": "b", "code": "release"}, {"id": "c", "code": "fail"}
    )
    assert [(result["id"], result["status"]) for result in results] == [
        ("a", "ok"),
        ("b", "ok"),
        ("c", "error"),
    ]


async def test_lines_come_as_calls_finish(serve: Serve) -> None:
    """With NDJSON a call that is done is not held back by one before it."""
    results = await lines(await serve(), {"id": "a", "code": "hold"}, {"id": "b", "code": "release"})
    assert [(result["index"], result["id"]) for result in results] == [(1, "b"), (0, "a")]


async def test_a_bad_item_fails_alone(serve: Serve) -> None:
    """A bad item is answered in its place, in both forms, and its neighbours run."""
    service = await serve()
    bad = [
        {"cod": "echo"},
        3,
        None,
        {"code": "\ud83d"},
        '{"code": "echo"}',
        {"code": "", "deadline_s": float("nan")},
    ]
    calls = [{"code": "echo 1"}, *bad, {"code": "echo 2"}]
    results = await batch(service, *calls)
    assert (results[0]["stdout"], results[-1]["stdout"]) == ("1", "2")
    assert [result["error"]["name"] for result in results[1:-1]] == ["InvalidCall"] * len(bad)
    assert results[1]["error"]["message"].startswith("cod: ")
    by_index = {result.pop("index"): result for result in await lines(service, *calls)}
    assert [by_index[index].get("error") for index in range(len(calls))] == [
        result.get("error") for result in results
    ]


async def test_a_fault_stays_in_its_item(serve: Serve) -> None:
    """Inside of a batch a fault is a result, since the others succeeded."""
    results = await batch(await serve(), {"code": "fault"}, {"code": "late"}, {"code": "echo 1"})
    assert [result["status"] for result in results] == ["internal_error", "queue_timeout", "ok"]


async def test_an_empty_batch_has_no_results(serve: Serve) -> None:
    """No calls, no results, in both forms."""
    service = await serve()
    assert await batch(service) == []
    assert await lines(service) == []


BAD_BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "an array": b"[]",
    "a string": b'"code"',
    "null": b"null",
    "not UTF-8": b'{"code": "\xff", "calls": [{"code": "\xff"}]}',
    "UTF-16": '{"code": "1", "calls": []}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"code": "1", "calls": []}',
    "a nesting bomb": b'{"calls": ' + b"[" * 1_000_000,
    "a closed nesting bomb": b'{"code":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "a huge number": b'{"code": "1", "deadline_s": ' + b"9" * 100_000 + b"}",
    "an unknown field": b'{"code": "1", "calls": [], "extra": 1}',
    "a wrong type": b'{"code": 1, "calls": {}}',
    "NaN": b'{"code": NaN, "calls": NaN}',
    "a long unknown field": b'{"code": "1", "calls": [], "%b": 1}' % (b"x" * 1_000_000),
    "a million unknown fields": b'{"code": "1",' + b",".join(b'"%d":1' % i for i in range(1_000_000)) + b"}",
}


@pytest.mark.parametrize("path", ["/v1/run", "/v1/batch"])
async def test_a_bad_body_is_422(serve: Serve, path: str) -> None:
    """Whatever is not a call, or not a batch, is the caller's mistake and never ours."""
    service = await serve()
    for what, body in BAD_BODIES.items():
        response = await service.http.post(path, content=body)
        assert (response.status_code, error(response)["name"]) == (422, "InvalidCall"), what
        assert len(response.content) < 500, f"{what}: an error does not quote the input at length"
    assert service.gateway.admission.held == 0


async def test_a_body_over_the_bound_is_413(serve: Serve) -> None:
    """The bound holds with and without a declared length, and the rest of the body is not read."""
    service = await serve(gateway={"max_body_bytes": 1024})
    sent = 0

    async def chunks() -> Any:
        nonlocal sent
        while True:
            sent += 512
            yield b"x" * 512

    for path in ("/v1/run", "/v1/batch"):
        declared = await service.http.post(path, content=b"x" * 1025)
        chunked = await service.http.post(path, content=chunks())
        for response in (declared, chunked):
            assert response.status_code == 413
            assert error(response)["name"] == "CallTooLarge"
    assert sent <= 2 * 2048


async def test_too_many_calls_are_413(serve: Serve) -> None:
    """A batch over the bound on calls, or over all the gateway ever holds, is refused as a whole."""
    for gateway in ({"max_batch": 2}, {"max_in_flight": 2}):
        service = await serve(gateway=gateway)
        response = await service.http.post("/v1/batch", json={"calls": [{"code": ""}] * 3})
        assert response.status_code == 413
        assert error(response)["message"] == "calls: more than 2 in one batch"


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("limits.wall_s", {"limits": {"wall_s": 61}}),
        ("limits.cpu_s", {"limits": {"cpu_s": 61}}),
        ("limits.memory_bytes", {"limits": {"memory_bytes": (2 << 30) + 1}}),
        ("limits.output_bytes", {"limits": {"output_bytes": (1 << 20) + 1}}),
        ("limits.processes", {"limits": {"processes": 257}}),
        ("deadline_s", {"deadline_s": 3601}),
        ("network", {"network": "loopback"}),
    ],
)
async def test_more_than_the_ceiling_is_refused(serve: Serve, field: str, call: dict[str, Any]) -> None:
    """A limit above the ceiling is refused by name, never clamped; the ceiling itself is fine."""
    service = await serve()
    response = await run(service, code="echo", **call)
    assert response.status_code == 422
    assert error(response)["message"].startswith(f"{field}: ")
    (result,) = await batch(service, {"code": "echo", **call})
    assert result["error"]["message"].startswith(f"{field}: ")
    assert not service.worker.seen


async def test_a_limit_just_above_its_ceiling(serve: Serve) -> None:
    """Both numbers are told to the last digit."""
    response = await run(await serve(), code="echo", limits={"memory_bytes": (2 << 30) + 1})
    assert error(response)["message"] == (
        "limits.memory_bytes: 2147483649 is above this service's ceiling of 2147483648"
    )


async def test_a_network_that_is_not_allowed(serve: Serve) -> None:
    """The caller is told who can allow it, and how."""
    response = await run(await serve(), code="echo", network="loopback")
    assert error(response)["message"] == (
        "network: this service allows no loopback; whoever runs it can, by SANDBOX_CEILINGS__NETWORK=loopback"
    )


async def test_a_low_ceiling_lowers_the_defaults(serve: Serve) -> None:
    """A call that names no limits gets the ceiling where it is below the default, and is not refused."""
    service = await serve(ceilings={"wall_s": 2, "memory_bytes": 32 << 20, "deadline_s": 5})
    assert (await run(service, code="echo", limits={"cpu_s": 3})).status_code == 200
    (seen,) = service.worker.seen
    assert (seen.call.limits.wall_s, seen.call.limits.memory_bytes) == (2, 32 << 20)
    assert (seen.call.limits.cpu_s, seen.call.limits.processes) == (3, 64)
    assert seen.deadline_ms == seen.accepted_ms + 5000


async def test_full_is_429(serve: Serve) -> None:
    """At the bound one more call is refused at once with a time to wait, and a place that is free is taken."""
    service = await serve(gateway={"max_in_flight": 2})
    held = [asyncio.create_task(run(service, code="hold")) for _ in range(2)]
    await service.worker.has_seen(2)
    for path, body in (("/v1/run", {"code": "echo"}), ("/v1/batch", {"calls": [{"code": "echo"}]})):
        response = await service.http.post(path, json=body)
        assert response.status_code == 429
        assert error(response)["name"] == "Overloaded"
        assert int(response.headers["retry-after"]) >= error(response)["retry_after_s"] > 0
    service.worker.released.set()
    assert [(await task).status_code for task in held] == [200, 200]
    assert (await run(service, code="echo")).status_code == 200
    assert service.gateway.admission.held == 0


async def test_a_batch_takes_a_permit_for_each_call(serve: Serve) -> None:
    """A batch for which there are too few places is refused as a whole, and none of it runs."""
    service = await serve(gateway={"max_in_flight": 3})
    held = asyncio.create_task(run(service, code="hold"))
    await service.worker.has_seen(1)
    response = await service.http.post("/v1/batch", json={"calls": [{"code": "echo"}] * 3})
    assert response.status_code == 429
    assert len(await batch(service, {"code": "echo"}, {"code": "echo"})) == 2
    service.worker.released.set()
    await held
    assert len(service.worker.seen) == 3


async def test_no_worker_is_503(serve: Serve) -> None:
    """Without a worker nothing is queued: the answer is 503 with the reason, and readiness says the same."""
    service = await serve()
    service.worker.draining = True
    await until(lambda: service.gateway.readiness.obstacle() is not None)
    response = await run(service, code="echo")
    assert response.status_code == 503
    assert error(response) == {"name": "Unavailable", "message": "no worker is alive", "retry_after_s": 1.0}
    assert response.headers["retry-after"] == "1"
    ready = await service.http.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"ok": False, "reason": "no worker is alive"})


async def test_another_call_under_an_id_in_flight_is_refused(serve: Serve) -> None:
    """An id names one call: a different one would get the first one's result, so it is refused."""
    service = await serve()
    calls = [{"id": "a", "code": "hold"}, {"id": "a", "code": "echo"}, {"id": "b", "code": "release"}]
    held, refused, _ = await batch(service, *calls)
    assert held["status"] == "ok"
    assert (
        refused["error"]["message"]
        == "id: a names a different call, which is in flight or ended a short time ago"
    )


async def test_a_gateway_that_drains_still_takes_calls(serve: Serve) -> None:
    """Balancers are told first: not ready, every answer closes its connection, and calls are served as ever."""
    service = await serve()
    held = asyncio.create_task(run(service, code="hold"))
    await service.worker.has_seen(1)
    assert "connection" not in (await run(service, code="echo")).headers
    service.gateway.draining = True
    served = await run(service, code="echo 1")
    assert (served.json()["stdout"], served.headers["connection"]) == ("1", "close")
    unready = await service.http.get("/readyz")
    assert (unready.status_code, unready.json()["reason"]) == (503, "this gateway is shutting down")
    assert (await service.http.get("/v1/status")).json()["ready"] is False
    service.worker.released.set()
    assert (await held).headers["connection"] == "close"


async def test_drain_finishes_what_is_open(serve: Serve) -> None:
    """While draining, new calls get 503 and open ones their results."""
    service = await serve()
    held = asyncio.create_task(run(service, code="hold"))
    await service.worker.has_seen(1)
    drained = asyncio.create_task(service.gateway.drain(30))
    await until(lambda: service.gateway.readiness.refusing)
    refused = await run(service, code="echo")
    assert (refused.status_code, refused.headers["connection"]) == (503, "close")
    assert error(refused)["message"] == "this gateway is shutting down"
    assert not drained.done()
    service.worker.released.set()
    assert (await held).status_code == 200
    await drained


async def test_drain_leaves_nobody_waiting(serve: Serve) -> None:
    """What is not done within the grace is answered 503."""
    service = await serve()
    held = asyncio.create_task(run(service, code="hold"))
    await service.worker.has_seen(1)
    await service.gateway.drain(0.01)
    response = await held
    assert response.status_code == 503
    assert error(response)["name"] == "Unavailable"


async def test_status_tells_what_the_service_is(serve: Serve) -> None:
    """The status page has version, workers, backlog, limits and the calls of this process."""
    service = await serve(ceilings={"wall_s": 5})
    held = asyncio.create_task(run(service, code="hold"))
    await service.worker.has_seen(1)
    status = (await service.http.get("/v1/status")).json()
    service.worker.released.set()
    await held
    assert status["ready"] is True
    assert status["in_flight"] == 1
    assert status["backlog"] == {"waiting": 0, "running": 1, "oldest_wait_s": 0.0}
    assert [(worker["id"], worker["slots"], worker["level"]) for worker in status["workers"]] == [
        ("echo", 64, "none")
    ]
    assert status["limits"]["ceilings"]["wall_s"] == status["limits"]["defaults"]["wall_s"] == 5
    assert status["limits"]["max_batch"] == 1024


async def test_probes(serve: Serve) -> None:
    """Alive and ready are two pages, and both say yes when calls are served."""
    service = await serve()
    for path in ("/healthz", "/readyz"):
        response = await service.http.get(path)
        assert (response.status_code, response.json()["ok"]) == (200, True)


async def test_metrics_count_what_happened(serve: Serve) -> None:
    """Requests by route and code, calls by status, and times stand on the metrics page."""
    service = await serve()
    await run(service, code="echo")
    await run(service, code="fault")
    await batch(service, {"code": "echo"}, {"code": "fail"})
    await service.http.get("/nowhere")
    text = (await service.http.get("/metrics")).text
    for line in (
        'sandbox_gateway_requests_total{code="200",route="/v1/run"} 1.0',
        'sandbox_gateway_requests_total{code="500",route="/v1/run"} 1.0',
        'sandbox_gateway_requests_total{code="404",route="other"} 1.0',
        'sandbox_gateway_calls_total{status="ok"} 2.0',
        'sandbox_gateway_calls_total{status="internal_error"} 1.0',
        "sandbox_gateway_in_flight_calls 0.0",
        "sandbox_gateway_call_seconds_count 4.0",
        'sandbox_gateway_batch_calls_bucket{le="2.0"} 1.0',
    ):
        assert line in text


@pytest.mark.parametrize(("method", "path", "code"), [("GET", "/v1/run", 405), ("POST", "/v1/runs", 404)])
async def test_other_routes_are_errors_of_the_same_shape(
    serve: Serve, method: str, path: str, code: int
) -> None:
    """A wrong path or method is answered in the one shape of errors."""
    service = await serve()
    response = await service.http.request(method, path)
    assert response.status_code == code
    assert set(error(response)) == {"name", "message"}


async def test_half_an_answer_is_cut() -> None:
    """A bug after the answer has begun adds no second answer to it: the server cuts the connection."""

    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    sent = []

    async def send(message: Message) -> None:
        sent.append(message["type"])

    gateway = Gateway(Settings(), CallQueue(RedisSettings(url="unix:///nowhere")))
    with pytest.raises(ZeroDivisionError):
        await Answers(broken, gateway)({"type": "http", "path": "/"}, Queue().get, send)
    assert sent == ["http.response.start"]


async def test_a_bug_is_500_and_tells_the_caller_nothing(
    serve: Serve, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody foresaw is a 500 with an incident id, and the traceback is in the log under that id."""
    service = await serve()
    monkeypatch.setattr(service.gateway.queue, "backlog", lambda: 1 / 0)
    with caplog.at_level(logging.ERROR):
        response = await service.http.get("/v1/status")
    assert response.status_code == 500
    message = error(response)["message"]
    (record,) = caplog.records
    assert record.__dict__["incident"] in message
    assert record.exc_info
    assert "division" not in response.text


@pytest.mark.parametrize("entry", ["0-20000000000000000000", "20000000000000000000-0", "1", "x-1"])
async def test_what_can_be_no_entry_is_422(serve: Serve, entry: str) -> None:
    """Redis is not asked for a dead letter by a number that is beyond its own."""
    response = await (await serve()).http.get(f"/v1/dead/{entry}")
    assert (response.status_code, error(response)["name"]) == (422, "InvalidCall")
