"""Messages of OpenEnv 0.10 and what they are answered, field by field; the requests too."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.dialects import openenv
from gateway.tenants import ANONYMOUS
from sandbox.api_keys import new_key, stanza
from sandbox.calls import ToolCall
from tests.gateway.conftest import Serve, Service, listening, until

FRESH = {"episode_id": None, "step_count": 0, "last_exit_code": 0}
EMPTY = {
    "observation": {"stdout": "", "stderr": "", "exit_code": 0, "metadata": {}},
    "reward": None,
    "done": False,
}


@asynccontextmanager
async def session(service: Service, path: str = "/ws", **headers: str) -> AsyncIterator[ClientConnection]:
    """A session, as OpenEnv's client opens it."""
    async with (
        listening(service) as (host, port),
        connect(f"ws://{host}:{port}/openenv{path}", additional_headers=headers, proxy=None) as websocket,
    ):
        yield websocket


async def ask(websocket: ClientConnection, message: object) -> dict[str, Any]:
    await websocket.send(message if isinstance(message, str | bytes) else json.dumps(message))
    answer: dict[str, Any] = json.loads(await websocket.recv())
    return answer


def step(code: str, **fields: Any) -> dict[str, Any]:
    return {"type": "step", "data": {"code": code, **fields}}


#: Messages, and what they are answered: the type, and of its data what is sure.
EXCHANGES: list[tuple[object, str, dict[str, Any]]] = [
    ({"type": "state"}, "state", FRESH),
    ({"type": "reset"}, "observation", EMPTY),
    ({"type": "reset", "data": {}}, "observation", EMPTY),
    ({"type": "reset", "data": {"seed": 0, "episode_id": "e"}}, "observation", EMPTY),
    ({"type": "reset", "data": {"seed": None, "unknown": [1]}}, "observation", EMPTY),
    ({"type": "state"}, "state", FRESH | {"episode_id": "UUID"}),
    (step("echo 1", metadata={"a": 1}), "observation", {"reward": None, "done": False}),
    (step("fail 1"), "observation", {"reward": None, "done": False}),
    ({"type": "state"}, "state", {"step_count": 2, "last_exit_code": 1}),
    ("{", "error", {"code": "INVALID_JSON"}),
    ("", "error", {"code": "INVALID_JSON"}),
    (b"", "error", {"code": "INVALID_JSON"}),
    (b"\xff", "error", {"code": "INVALID_JSON"}),
    ("[" * 100_000, "error", {"code": "VALIDATION_ERROR"}),
    ("[" * 40_000, "error", {"code": "INVALID_JSON"}),
    ("[]", "error", {"code": "VALIDATION_ERROR", "message": "Invalid message: it is no object"}),
    ({}, "error", {"code": "UNKNOWN_TYPE", "message": "Unknown message type: "}),
    ({"type": "mcp", "data": {}}, "error", {"code": "UNKNOWN_TYPE", "message": "Unknown message type: mcp"}),
    ({"type": ["step"]}, "error", {"code": "UNKNOWN_TYPE"}),
    ({"type": "state", "data": {}}, "error", {"code": "VALIDATION_ERROR"}),
    ({"type": "step"}, "error", {"message": "Invalid message: data: Field required"}),
    ({"type": "step", "data": {}}, "error", {"message": "Invalid message: data.code: Field required"}),
    (
        step("1", lint=True),
        "error",
        {"message": "Invalid message: data.lint: Extra inputs are not permitted"},
    ),
    ('{"type": "step", "data": {"code": "\\ud800"}}', "error", {"code": "VALIDATION_ERROR"}),
    (step("1", timeout_s=0), "error", {"code": "VALIDATION_ERROR"}),
    (step("1", timeout_s=61), "error", {"code": "VALIDATION_ERROR"}),
    ({"type": "reset", "data": {"seed": -1}}, "error", {"code": "VALIDATION_ERROR"}),
    ({"type": "reset", "data": {"episode_id": "e" * 256}}, "error", {"code": "VALIDATION_ERROR"}),
    (step("fault"), "error", {"code": "EXECUTION_ERROR", "name": "InternalError", "retryable": False}),
    (step("late"), "error", {"code": "EXECUTION_ERROR", "name": "QueueTimeout", "retryable": True}),
    ({"type": "state"}, "state", {"step_count": 2, "last_exit_code": 1}),
]


async def test_each_message_has_its_answer(serve: Serve) -> None:
    """In one session, whose errors end nothing and are no steps."""
    async with session(await serve()) as websocket:
        for message, kind, expected in EXCHANGES:
            answer = await ask(websocket, message)
            assert list(answer) == ["type", "data"], message
            assert answer["type"] == kind, (message, answer)
            data = answer["data"]
            if expected.get("episode_id") == "UUID":
                data["episode_id"] = "UUID" if UUID(data["episode_id"]) else ""
            assert expected.items() <= data.items(), (message, answer)


#: What a program came to, and its exit code and status.
ENDINGS = [
    ("echo 1", 0, "ok"),
    ("fail 1", 1, "error"),
    ("timeout 1", -9, "timeout"),
    ("memory_limit 1", -9, "memory_limit"),
    ("signaled 1", -11, "signaled"),
]


async def test_an_observation_has_the_fields_of_coding_env(serve: Serve) -> None:
    """Its client refuses others, so what we know beyond them is metadata."""
    async with session(await serve()) as websocket:
        for code, exit_code, status in ENDINGS:
            data = (await ask(websocket, step(code)))["data"]
            assert list(data) == ["observation", "reward", "done", "metadata"]
            metadata = data["metadata"]
            assert list(metadata) == ["status", "text", "wall_s", "cpu_s", "truncated"]
            assert metadata["status"] == status
            assert data["observation"] == {
                "stdout": "1",
                "stderr": "",
                "exit_code": exit_code,
                "metadata": metadata,
            }


async def test_a_step_asks_for_what_its_action_and_its_episode_say(serve: Serve) -> None:
    """Standard input, time and the seed reach the program; the last value is shown; an answer comes before clients give up."""
    service = await serve()
    async with session(service) as websocket:
        await ask(websocket, step("echo"))
        await ask(websocket, {"type": "reset", "data": {"seed": 7}})
        await ask(websocket, step("echo", stdin="in", timeout_s=2))
        await ask(websocket, step("echo", timeout_s=60))
        await ask(websocket, {"type": "reset"})
        await ask(websocket, step("echo"))
    plain, seeded, long, unseeded = (delivery.call for delivery in service.worker.seen)
    assert (plain.stdin, plain.limits, plain.random_seed) == ("", ToolCall(code="").limits, None)
    assert (seeded.stdin, seeded.limits.wall_s, seeded.limits.cpu_s, seeded.random_seed) == ("in", 2, 2, 7)
    assert unseeded.random_seed is None
    given_ms = [delivery.deadline_ms - delivery.accepted_ms for delivery in service.worker.seen]
    assert given_ms == [55_000, 55_000, 60_000, 55_000]
    assert all(call.echo_last_value for call in (plain, seeded, long))


async def test_the_end_of_a_session(serve: Serve) -> None:
    """`close` is answered by the end, and counted from first to last."""
    service = await serve()
    metrics = service.gateway.metrics
    async with session(service) as websocket:
        assert metrics.websockets._value.get() == 1
        await websocket.send('{"type": "close"}')
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1000
        await until(lambda: metrics.websockets._value.get() == 0)
    assert metrics.requests.labels("/openenv/", 101)._value.get() == 1


@pytest.mark.parametrize("ahead", [0, 1, openenv.MOST_AHEAD - 1])
async def test_who_goes_away_cancels_the_step(serve: Serve, ahead: int) -> None:
    """Its permit comes back, and the worker is told; also where further messages of it had come before."""
    service = await serve()
    async with session(service) as websocket:
        for message in (step("lose"), *[step("echo 1")] * ahead):
            await websocket.send(json.dumps(message))
        await service.worker.has_seen(1)
        assert service.gateway.admission.held == 1
        websocket.transport.abort()
        await until(lambda: service.gateway.admission.held == 0)
    assert service.gateway.metrics.cancelled._value.get() == 1


async def test_who_goes_away_with_much_unheard_is_no_failure_of_ours(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens behind so many messages, so the end shows when an answer is written; the log has no error."""
    service = await serve()
    async with session(service) as websocket:
        for message in (step("hold"), *[step("echo " + "x" * 1000)] * 4 * openenv.MOST_AHEAD):
            await websocket.send(json.dumps(message))
        await service.worker.has_seen(1)
        websocket.transport.abort()
        service.worker.released.set()
        await until(lambda: service.gateway.metrics.websockets._value.get() == 0)
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_messages_ahead_of_their_turn_are_answered_in_it(serve: Serve) -> None:
    """Who does not wait for answers gets them in order."""
    service = await serve()
    async with session(service) as websocket:
        for message in (step("hold 1"), step("echo 2"), *[{"type": "state"}] * 2 * openenv.MOST_AHEAD):
            await websocket.send(json.dumps(message))
        await service.worker.has_seen(1)
        service.worker.released.set()
        answers = [json.loads(await websocket.recv())["data"] for _ in range(2 + 2 * openenv.MOST_AHEAD)]
    assert [answer["observation"]["stdout"] for answer in answers[:2]] == ["1", "2"]
    assert {answer["step_count"] for answer in answers[2:]} == {2}


async def test_a_full_service_is_an_error_to_try_again(serve: Serve) -> None:
    """It says so in OpenEnv's own code, and when to come back."""
    service = await serve(gateway={"max_in_flight": 1})
    async with session(service) as websocket:
        with service.gateway.admission.enter(ANONYMOUS):
            answer = await ask(websocket, step("echo 1"))
        about = {"code": "CAPACITY_REACHED", "name": "Overloaded", "retryable": True, "retry_after_s": 1.0}
        assert answer["type"] == "error"
        assert about.items() <= answer["data"].items()
        assert (await ask(websocket, step("echo 1")))["type"] == "observation"


async def test_a_gateway_has_so_many_sessions(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is let in to be told, and closed; when one has ended there is room."""
    monkeypatch.setattr(openenv, "MOST_SESSIONS", 1)
    service = await serve()
    async with listening(service) as (host, port):
        url = f"ws://{host}:{port}/openenv/ws"
        async with connect(url, proxy=None) as first:
            assert (await ask(first, {"type": "state"}))["type"] == "state"
            async with connect(url, proxy=None) as second:
                refusal = json.loads(await second.recv())
                assert (refusal["type"], refusal["data"]["code"]) == ("error", "CAPACITY_REACHED")
                with pytest.raises(ConnectionClosed):
                    await second.recv()
        await until(lambda: service.gateway.metrics.websockets._value.get() == 0)
        async with connect(url, proxy=None) as third:
            assert (await ask(third, {"type": "state"}))["type"] == "state"


async def test_an_idle_session_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is free for another."""
    monkeypatch.setattr(openenv, "IDLE_S", 0.01)
    async with session(await serve()) as websocket:
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, closed.value.rcvd.reason) == (1001, "idle for 0.01 s")


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, str, str]:
    """A keys file; a key that may run programs and have one session, and one that may not."""
    run, admin = new_key(), new_key()
    path = tmp_path / "keys.toml"
    path.write_text(
        stanza(run, "team", ["run"]) + stanza(admin, "ops", ["admin"]) + "[tenants.team]\nmax_in_flight = 1\n"
    )
    return path, run, admin


async def test_a_session_needs_a_key(
    serve: Serve, keys: tuple[Path, str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """A handshake without one is answered as any request, and is no error of ours; a tenant has as many sessions as calls."""
    path, run, admin = keys
    service = await serve(gateway={"keys_file": str(path)})
    for headers, status in (({}, 401), ({"X-API-Key": "wrong"}, 401), ({"X-API-Key": admin}, 403)):
        with pytest.raises(InvalidStatus) as refused:
            async with session(service, **headers):
                pass
        response = refused.value.response
        assert response.status_code == status
        assert json.loads(response.body or b"")["error"]["name"] in {"Unauthorized", "Forbidden"}
        assert service.gateway.metrics.requests.labels("/openenv/", status)._value.get() >= 1
    async with session(service, Authorization=f"Bearer {run}") as websocket:
        assert (await ask(websocket, step("echo 1")))["type"] == "observation"
        async with session(service, **{"X-API-Key": run}) as second:
            assert json.loads(await second.recv())["data"]["code"] == "CAPACITY_REACHED"
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
    assert (await service.http.get("/openenv/health")).status_code == 200
    assert (await service.http.get("/openenv/state")).status_code == 401


async def test_a_page_of_another_site_opens_no_session(serve: Serve) -> None:
    """A browser lets any page open websockets to its own machine, and says whose page it is."""
    service = await serve()
    for elsewhere in ("https://elsewhere.example", "null", "http://[::1"):
        with pytest.raises(InvalidStatus) as refused:
            async with session(service, Origin=elsewhere):
                pass
        assert refused.value.response.status_code == 403
    async with listening(service) as (host, port):
        own = {"Origin": f"http://{host}:{port}"}
        async with connect(f"ws://{host}:{port}/openenv/ws", additional_headers=own, proxy=None) as websocket:
            assert (await ask(websocket, {"type": "state"}))["type"] == "state"


async def test_no_session_is_attached_to(serve: Serve) -> None:
    """There are none of MCP's here, and the answer is OpenEnv's own."""
    async with session(await serve(), "/ws?session_id=abc") as websocket:
        refusal = json.loads(await websocket.recv())
    assert refusal["data"] == {"message": "Unknown session_id: abc", "code": "SESSION_ERROR"}


#: Requests, and what they are answered: the status, and what is sure of the body.
REQUESTS: list[tuple[str, str, object, int, dict[str, Any]]] = [
    ("GET", "/health", None, 200, {"status": "healthy"}),
    ("GET", "/state", None, 200, FRESH),
    ("GET", "/metadata", None, 200, {"name": "RoC Sandbox", "readme_content": None, "author": None}),
    ("POST", "/reset", None, 200, EMPTY | {"metadata": None}),
    ("POST", "/reset", {"seed": 1, "episode_id": "e", "more": 1}, 200, EMPTY | {"metadata": None}),
    ("POST", "/reset", {"seed": -1}, 422, {}),
    (
        "POST",
        "/step",
        {"action": {"code": "echo 1"}, "request_id": "r"},
        200,
        {"reward": None, "done": False},
    ),
    ("POST", "/step", {"action": {"code": "echo 1"}, "timeout_s": 61}, 422, {}),
    ("POST", "/step", {"action": {}}, 422, {}),
    ("POST", "/step", {"action": {"code": "fault"}}, 500, {"detail": "the jail broke"}),
    ("POST", "/step", {"action": {"code": "late"}}, 504, {"detail": "no slot was free in time"}),
    ("GET", "/step", None, 405, {}),
    ("GET", "/ws", None, 404, {}),
    ("GET", "/mcp", None, 404, {}),
]


async def test_each_request_is_an_environment_of_its_own(serve: Serve) -> None:
    """As in the original, whose errors FastAPI words."""
    service = await serve()
    for method, path, body, status, expected in REQUESTS:
        content = b"" if body is None else json.dumps(body).encode()
        response = await service.http.request(method, f"/openenv{path}", content=content)
        assert response.status_code == status, (path, body, response.text)
        if expected:
            assert expected.items() <= response.json().items(), (path, body)
    wrong = await service.http.post("/openenv/step", json={"action": {}})
    assert wrong.json() == {
        "detail": [{"type": "value_error", "loc": ["body", "action", "code"], "msg": "Field required"}]
    }


async def test_a_full_service_is_429_by_http(serve: Serve) -> None:
    """With the time after which to come back."""
    service = await serve(gateway={"max_in_flight": 1})
    with service.gateway.admission.enter(ANONYMOUS):
        response = await service.http.post("/openenv/step", json={"action": {"code": "echo 1"}})
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")


async def test_a_draining_gateway_is_not_healthy(serve: Serve) -> None:
    """And opens no session."""
    service = await serve()
    service.gateway.draining = True
    response = await service.http.get("/openenv/health")
    assert (response.status_code, response.json()) == (503, {"status": "unhealthy"})
    with pytest.raises(InvalidStatus) as refused:
        async with session(service):
            pass
    assert refused.value.response.status_code == 503


async def test_the_schemas_are_those_of_the_messages(serve: Serve) -> None:
    """A client can learn from them what an action takes and what an observation has."""
    told = (await (await serve()).http.get("/openenv/schema")).json()
    assert list(told) == ["action", "observation", "state", "reset_observation"]
    assert told["action"]["required"] == ["code"]
    assert {"done", "reward", "metadata", "stdout", "stderr", "exit_code"} == set(
        told["observation"]["properties"]
    )
    assert set(told["state"]["properties"]) == set(FRESH)


async def test_a_bug_ends_its_session_only(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is no observation: the session is closed with an incident that the log tells of."""

    def broken(_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr(openenv, "_read", broken)
    async with session(await serve()) as websocket:
        await websocket.send("{}")
        with pytest.raises(ConnectionClosed) as closed:
            await websocket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1011
    assert closed.value.rcvd.reason.startswith("the service failed; its log tells more under ")
