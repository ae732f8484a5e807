"""Targets: what each adapter sends, and what it makes of answers, against services that speak their documented shapes."""

from __future__ import annotations

import gzip
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import unused_port

from loadtest.adapters import ADAPTERS
from loadtest.openloop import CONNECTION_ERROR, REFUSED, UNREADABLE, Reply
from loadtest.targets import check_calls, open_target
from sandbox import Base64File, ConfigError, Limits, ToolCall

#: What a service answers to the body of a request.
Answer = Callable[[dict[str, Any]], web.Response]

CALL = ToolCall(code="print(1)", stdin="x", limits=Limits(wall_s=2))


@asynccontextmanager
async def service(path: str, answer: Answer, requests: list[web.Request] | None = None) -> AsyncIterator[str]:
    """A service that has this one path, and notes who asked."""

    async def handle(request: web.Request) -> web.Response:
        if requests is not None:
            requests.append(request)
        return answer(await request.json())

    app = web.Application()
    app.router.add_post(path, handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(name: str, answer: Answer, call: ToolCall = CALL) -> Reply:
    """What the target makes of this answer."""
    async with service(ADAPTERS[name].path, answer) as url, open_target(url, name) as target:
        return await target.ask(call)


async def sent_by(name: str, call: ToolCall = CALL) -> dict[str, Any]:
    """The body of the request for this call."""
    bodies: list[dict[str, Any]] = []

    def answer(body: dict[str, Any]) -> web.Response:
        bodies.append(body)
        return web.json_response({})

    await ask(name, answer, call)
    [body] = bodies
    return body


def v1_result(call: dict[str, Any], **fields: Any) -> web.Response:
    return web.json_response({"id": call["id"], "status": "ok", **fields})


async def test_v1_sends_the_fields_of_the_call_and_no_others() -> None:
    """What a call leaves out is left to the server's defaults, and its id is sent."""
    body = {"id": CALL.id, "code": "print(1)", "stdin": "x", "limits": {"wall_s": 2.0}}
    assert await sent_by("v1") == body


async def test_v1_tells_the_usage() -> None:
    """A result brings its status, its stdout and what it used."""
    usage = {"cpu_s": 0.25, "wall_s": 0.5, "queue_s": 0.75}

    reply = await ask("v1", lambda call: v1_result(call, status="error", stdout="2\n", usage=usage))

    assert reply == Reply("error", "2\n", cpu_s=0.25, wall_s=0.5, queue_s=0.75)


@pytest.mark.parametrize(
    ("status", "name", "outcome"),
    [
        (429, "Overloaded", REFUSED),
        (503, "Unavailable", REFUSED),
        (504, "QueueTimeout", "queue_timeout"),
        (500, "InternalError", "internal_error"),
        (401, "Unauthorized", "http_401"),
        (422, "InvalidCall", "http_422"),
    ],
)
async def test_v1_errors_are_told_apart(status: int, name: str, outcome: str) -> None:
    """A refusal is one, a fault has its status's name, and anything else its number; the words are kept."""
    error = {"error": {"name": name, "message": "because"}}

    reply = await ask("v1", lambda _: web.json_response(error, status=status))

    assert reply.outcome == outcome
    assert "because" in reply.why


@pytest.mark.parametrize(
    "body", ["<h1>Bad gateway</h1>", "[]", '{"error": 1}', '{"error": {"name": ["x"]}}', ""]
)
async def test_an_answer_of_something_before_the_service_keeps_its_number(body: str) -> None:
    """A proxy's error is no fault of ours."""
    assert (await ask("v1", lambda _: web.Response(status=504, text=body))).outcome == "http_504"


@pytest.mark.parametrize("name", ADAPTERS)
@pytest.mark.parametrize(
    "body", ["", "null", "[1]", '{"status": "ok"}', '{"id": "1", "status": "fine"}', "\0"]
)
async def test_an_answer_without_the_shape_is_unreadable(name: str, body: str) -> None:
    """200 with anything else than what the API answers is an outcome of its own."""
    assert (await ask(name, lambda _: web.Response(text=body))).outcome == UNREADABLE


@pytest.mark.parametrize("name", ADAPTERS)
async def test_errors_of_http_are_outcomes(name: str) -> None:
    """Every target says that it was refused, and the number of any other error, with a part of the words."""
    refused = await ask(name, lambda _: web.Response(status=429, text="x" * 10_000))
    failed = await ask(name, lambda _: web.Response(status=502))

    assert (refused.outcome, len(refused.why)) == (REFUSED, 200)
    assert failed.outcome == "http_502"


async def test_an_answer_is_read_up_to_a_bound() -> None:
    """A service that answers without end costs a bounded memory, and is unreadable."""
    reply = await ask("v1", lambda _: web.Response(body=b" " * 2 * 1024 * 1024))

    assert reply.outcome == UNREADABLE
    assert "longer" in reply.why


async def test_a_compressed_answer_is_not_unpacked() -> None:
    """Nobody asked for it, and what it would become has no bound."""
    packed = gzip.compress(b'{"id": "1", "status": "ok"}')

    reply = await ask("v1", lambda _: web.Response(body=packed, headers={"content-encoding": "gzip"}))

    assert reply.outcome == UNREADABLE


@pytest.mark.parametrize("name", ["v1", "client"])
async def test_no_service_is_an_outcome(name: str) -> None:
    """Where nobody listens, each call is a connection error that says why."""
    async with open_target(f"http://127.0.0.1:{unused_port()}", name) as target:
        reply = await target.ask(CALL)

    assert reply.outcome == CONNECTION_ERROR
    assert "connect" in reply.why.lower()


async def test_the_key_is_shown() -> None:
    """Services with keys get ours."""
    requests: list[web.Request] = []
    async with service("/v1/run", v1_result, requests) as url, open_target(url, "v1", "a-key") as target:
        await target.ask(CALL)

    assert [request.headers["authorization"] for request in requests] == ["Bearer a-key"]


@pytest.mark.parametrize(
    ("status", "name", "outcome"),
    [
        (429, "Overloaded", REFUSED),
        (503, "Unavailable", REFUSED),
        (422, "InvalidCall", "http_422"),
    ],
)
async def test_the_client_asks_once(status: int, name: str, outcome: str) -> None:
    """Our client's errors have the same words, and it sends nothing again: that would hide what is measured."""
    requests: list[web.Request] = []
    error = web.json_response
    body = {"error": {"name": name, "message": "because"}}

    async with (
        service("/v1/batch", lambda _: error(body, status=status), requests) as url,
        open_target(url, "client") as target,
    ):
        reply = await target.ask(CALL)

    assert reply == Reply(outcome, why="because")
    assert len(requests) == 1


def judged(**fields: Any) -> Answer:
    """What code-judge answers to a batch of one."""

    def answer(body: dict[str, Any]) -> web.Response:
        [submission] = body["submissions"]
        result = {"sub_id": submission["sub_id"], "success": False, "run_success": False, "cost": 0.5}
        return web.json_response(
            {"sub_id": "b", "results": [result | {"stdout": "1\n", "stderr": "", "reason": ""} | fields]}
        )

    return answer


async def test_code_judge_gets_a_batch_of_one() -> None:
    """Each call is a submission in a request of its own."""
    submission = {"sub_id": CALL.id, "type": "python", "solution": "print(1)", "input": "x"}
    assert await sent_by("code-judge") == {"type": "batch", "submissions": [submission]}


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"run_success": True, "success": True}, "ok"),
        ({"run_success": False}, "error"),
        ({"reason": "worker_timeout"}, "timeout"),
        ({"reason": "queue_timeout"}, "queue_timeout"),
        ({"reason": "internal_error"}, "internal_error"),
        ({"reason": "invalid_input"}, "invalid_input"),
    ],
)
async def test_code_judges_reasons_are_put_into_our_words(fields: dict[str, Any], outcome: str) -> None:
    """Its reason goes before its exit code, and its cost is the program's time."""
    assert await ask("code-judge", judged(**fields)) == Reply(outcome, "1\n", wall_s=0.5)


async def test_code_judge_without_output_printed_nothing() -> None:
    """Its `null` is the empty text."""
    assert (await ask("code-judge", judged(run_success=True, stdout=None))).stdout == ""


def fused(status: str, /, **run: Any) -> Answer:
    """What SandboxFusion answers."""
    ran = {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stdout": "1\n", "stderr": ""} | run
    answer = {
        "status": status,
        "message": "words",
        "compile_result": None,
        "run_result": ran if run.get("status") != "none" else None,
        "executor_pod_name": None,
        "files": {},
    }
    return lambda _: web.json_response(answer)


async def test_sandbox_fusion_gets_files_and_the_limits_it_knows() -> None:
    """Text and binary files go as base64, wall time always, and memory where the call names it."""
    limits = Limits(wall_s=3, memory_bytes=64 * 1024 * 1024)
    files = {"a.txt": "é", "b.bin": Base64File.model_validate({"base64": "AAE="})}

    body = await sent_by("sandbox-fusion", ToolCall(code="pass", files=files, limits=limits))

    assert {name: b64decode(content) for name, content in body.pop("files").items()} == {
        "a.txt": "é".encode(),
        "b.bin": b"\0\1",
    }
    assert body == {
        "code": "pass",
        "language": "python",
        "stdin": "",
        "run_timeout": 3.0,
        "memory_limit_MB": 64,
    }


@pytest.mark.parametrize(
    ("answer", "reply"),
    [
        (fused("Success"), Reply("ok", "1\n", wall_s=0.5)),
        (fused("Failed", return_code=1), Reply("error", "1\n", wall_s=0.5)),
        (fused("Failed", return_code=-11), Reply("signaled", "1\n", wall_s=0.5)),
        (fused("Failed", status="TimeLimitExceeded", return_code=None), Reply("timeout", "1\n", wall_s=0.5)),
        (fused("Failed", status="Error"), Reply("internal_error", why="words")),
        (fused("SandboxError", status="none"), Reply("internal_error", why="words")),
        (fused("Success", stdout=None), Reply("ok", "", wall_s=0.5)),
    ],
)
async def test_sandbox_fusions_statuses_are_put_into_our_words(answer: Answer, reply: Reply) -> None:
    """A time limit, an exit code and a failure of its own are told apart, though `Failed` is all of them."""
    assert await ask("sandbox-fusion", answer) == reply


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("code-judge", ToolCall(code="", files={"a": ""})),
        ("code-judge", ToolCall(code="1", echo_last_value=True)),
        ("sandbox-fusion", ToolCall(code="", network="loopback")),
    ],
)
def test_a_call_that_an_api_has_no_words_for_is_refused_before_the_start(name: str, call: ToolCall) -> None:
    """It would be another program there, and its figure no comparison."""
    with pytest.raises(ConfigError, match="cannot be compared"):
        check_calls(name, [CALL, call])


def test_calls_of_our_own_services_can_be_anything() -> None:
    """What our own API describes needs no check."""
    for name in ("v1", "client"):
        check_calls(name, [ToolCall(code="", files={"a": ""}, network="loopback")])
