"""The Model Context Protocol at /mcp, held against its public description by a client of our own.

The SDK's own client is in tests/system/test_mcp.py.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client, MCPError

from gateway.readiness import Obstacle
from sandbox.api_keys import new_key, stanza
from sandbox.calls import ToolCall, ToolResult
from sandbox.mcp_server import make_server

from ..conftest import Serve, Service, listening, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEADERS = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
OLDEST, NEWEST = "2024-11-05", "2026-07-28"
CLIENT = {"capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
USAGE = {"wall_s": 0.0, "cpu_s": 0.0, "memory_peak_bytes": 0, "queue_s": 0.0}


def request(method: str, params: object = None, call_id: int | str = 1) -> dict[str, Any]:
    body = {"jsonrpc": "2.0", "id": call_id, "method": method}
    return body if params is None else body | {"params": params}


def tool(name: str, call_id: int | str = 1, **arguments: object) -> dict[str, Any]:
    return request("tools/call", {"name": name, "arguments": arguments}, call_id)


async def post(service: Service, body: object, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await service.http.post("/mcp", content=content, headers={**HEADERS, **named})


async def answer(service: Service, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The result, or the error, of one request."""
    response = await post(service, body, **headers)
    assert response.status_code == 200, response.text
    said: dict[str, Any] = response.json()
    assert (said.pop("jsonrpc"), said.pop("id")) == ("2.0", body["id"])
    [(_, came)] = said.items()
    return came  # type: ignore[no-any-return]


def last_call(service: Service) -> ToolCall:
    return service.worker.seen[-1].call


@pytest.mark.parametrize(
    ("asked", "agreed"), [("2025-06-18", "2025-06-18"), (OLDEST, OLDEST), ("1", "2025-11-25")]
)
async def test_a_client_introduces_itself(service: Service, asked: str, agreed: str) -> None:
    """`initialize` agrees on a version and says what there is: tools. The session is a name, and nothing is kept."""
    response = await post(service, request("initialize", CLIENT | {"protocolVersion": asked}))
    result = response.json()["result"]
    assert result.keys() == {"protocolVersion", "capabilities", "serverInfo", "instructions"}
    assert (result["protocolVersion"], result["capabilities"]) == (agreed, {"tools": {"listChanged": False}})
    assert result["serverInfo"]["name"] == "roc-sandbox"
    session = response.headers["mcp-session-id"]
    done = await post(
        service, {"jsonrpc": "2.0", "method": "notifications/initialized"}, mcp_session_id=session
    )
    assert (done.status_code, done.content) == (202, b"")
    assert await answer(service, request("ping"), mcp_session_id=session) == {}


async def test_the_tools(service: Service) -> None:
    """`tools/list` has both tools with schemas of what goes in and what comes out."""
    tools = (await answer(service, request("tools/list")))["tools"]
    inputs = {tool["name"]: tool["inputSchema"] for tool in tools}
    assert inputs.keys() == {"execute_python_code_with_standard_io", "python"}
    assert inputs["execute_python_code_with_standard_io"]["required"] == ["code", "input"]
    assert inputs["python"]["required"] == ["code"]
    for each in tools:
        assert each["description"]
        assert each["outputSchema"]["type"] == "object"
        assert {"status", "stdout", "stderr", "usage"} <= each["outputSchema"]["properties"].keys()


@pytest.mark.parametrize(
    ("called", "stdin"),
    [
        (tool("python", code="echo 1"), ""),
        (tool("execute_python_code_with_standard_io", code="echo 1", input="a\n"), "a\n"),
        (tool("execute_python_code_with_standard_io", "two", code="echo 1"), ""),
    ],
)
async def test_a_call(service: Service, called: dict[str, Any], stdin: str) -> None:
    """A program that ends well: a text for the model, and every field as data."""
    result = await answer(service, called)
    assert result.pop("structuredContent") == {
        "status": "ok",
        "exit_code": 0,
        "signal": None,
        "stdout": "1",
        "stderr": "",
        "stdout_truncated": False,
        "stderr_truncated": False,
        "stdout_tail": "",
        "stderr_tail": "",
        "stdout_bytes": 1,
        "stderr_bytes": 0,
        "exception": None,
        "usage": USAGE,
        "reason": None,
    }
    text = "Tool call success\nstdout: 1\nexecution time: 0.00s"
    assert result == {"content": [{"type": "text", "text": text}], "isError": False}
    call = last_call(service)
    assert (call.code, call.stdin, call.echo_last_value) == ("echo 1", stdin, True)
    assert call.priority == "tool"


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("fail no", "error", "Tool call failure\nreason: the program failed with exit code 1\nstdout: no"),
        ("timeout", "timeout", "Tool call failure\nreason: timeout: "),
        ("memory_limit", "memory_limit", "Tool call failure\nreason: memory limit: "),
        ("output_limit", "output_limit", "Tool call failure\nreason: output limit: "),
        ("signaled", "signaled", "Tool call failure\nreason: the program was ended by signal 11 (SIGSEGV)"),
        ("late", "queue_timeout", "The sandbox failed, and not the program: no slot was free in time. Call the tool again."),
        ("fault", "internal_error", "The sandbox failed, and not the program: the jail broke. Call the tool again."),
    ],
)  # fmt: skip
async def test_a_call_that_fails_is_seen_by_the_model(
    service: Service, code: str, status: str, text: str
) -> None:
    """What ended the program, or that it was none of its doing, is a result with `isError`."""
    result = await answer(service, tool("python", code=code))
    assert result["isError"] is True
    assert result["structuredContent"]["status"] == status
    assert result["content"][0]["text"].startswith(text)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "python needs the argument 'code', the program as text"),
        ({"cod": "1"}, "python has no argument 'cod'; it has code"),
        ({"code": 1}, "the argument 'code' of python must be a text, and is a number"),
        ({"code": "1", "input": ""}, "python has no argument 'input'; it has code"),
    ],
)
async def test_bad_arguments_are_seen_by_the_model(
    service: Service, arguments: dict[str, Any], reason: str
) -> None:
    """A model can mend its arguments, so they are no error of the protocol."""
    result = await answer(service, tool("python", **arguments))
    text = f"Tool call failure\nreason: {reason}"
    assert result == {"content": [{"type": "text", "text": text}], "isError": True}


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (tool("pyhton", code="1"), -32602, "Unknown tool: pyhton"),
        (tool("jupyter_code", code="1"), -32602, "Unknown tool: jupyter_code"),
        (request("tools/call", {"arguments": {}}), -32602, "Invalid request parameters"),
        (request("tools/call", {"name": "python", "arguments": "x"}), -32602, "Invalid request parameters"),
        (request("resources/list"), -32601, "Method not found"),
        (request("nothing/like/it"), -32601, "Method not found"),
    ],
)
async def test_what_a_model_cannot_mend_is_an_error(
    service: Service, body: dict[str, Any], code: int, message: str
) -> None:
    """Unknown tools and methods, and parameters that are none, are errors of the protocol."""
    error = await answer(service, body)
    assert (error["code"], error["message"]) == (code, message)


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, -32700),
        (b"", {}, 400, -32700),
        (b"\xff", {}, 400, -32700),
        (b"[]", {}, 400, -32602),
        (json.dumps([request("ping")]).encode(), {}, 400, -32602),
        (b"[" * 20_000, {}, 422, -32602),
        (b"{}", {"content_type": "text/plain"}, 400, -32602),
        (b"{}", {"accept": "text/html"}, 406, -32600),
        (b"{}", {"mcp_protocol_version": "1999-01-01"}, 400, -32600),
        (json.dumps(request("ping")).encode(), {"origin": "http://evil.example:8000"}, 403, -32603),
        (json.dumps(request("ping")).encode(), {"origin": "null"}, 403, -32603),
        (b"x" * (17 * 1024 * 1024), {}, 413, -32602),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_what_is_no_request(
    service: Service, body: bytes, headers: dict[str, str], status: int, code: int
) -> None:
    """Each is refused as JSON-RPC, without an id, whatever is wrong with it."""
    response = await post(service, body, **headers)
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json")
    said = response.json()
    assert (said["jsonrpc"], said["id"], said["error"]["code"]) == ("2.0", None, code)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 9_000,
        b'{"jsonrpc": "2.0", "id": 1, "method": "ping", "params": ' + b"[" * 4_000 + b"]" * 4_000 + b"}",
        b'{"jsonrpc": "2.0", "id": ' + b"1" * 5_000 + b', "method": "ping"}',
        b'{"jsonrpc": "2.0", "id": "' + b"i" * 50_000 + b'", "method": "ping"}',
        json.dumps(tool("python", code="\ud800")).encode(),
        *(json.dumps(request("ping", call_id=odd)).encode() for odd in (None, True, 1.5, [], {})),  # type: ignore[arg-type]
        *(json.dumps(request("ping", odd)).encode() for odd in ([], "x", 1, {"_meta": 1}, {"_meta": {"progressToken": []}})),
        *(json.dumps({"jsonrpc": "2.0", "id": 1, "method": odd}).encode() for odd in ("", None, 1, "notifications/cancelled")),
        b'{"jsonrpc": "2.0", "id": 1, "result": {}}',
        b'{"jsonrpc": "2.0", "id": 1, "error": {"code": 1, "message": "no"}}',
        b'{"jsonrpc": "1.0", "id": 1, "method": "ping"}',
        b'{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1e400}}',
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
async def test_an_odd_request_is_no_failure_of_ours(service: Service, body: bytes) -> None:
    """Whatever a client sends is answered as its mistake, or taken, and the next request is served."""
    response = await post(service, body, mcp_session_id="odd")
    assert response.status_code in {200, 202, 400, 422}
    if response.status_code != 202:
        assert response.json().get("error", {}).get("code") not in {-32603, 0}
    assert await answer(service, request("ping")) == {}


@pytest.mark.parametrize("origin", ["http://localhost:6274", "http://127.0.0.1:8000", "https://[::1]"])
async def test_pages_of_this_machine_may_call(service: Service, origin: str) -> None:
    """An inspector in a browser on this machine shows where it is from, and is let in, whatever the Host is."""
    assert await answer(service, request("ping"), origin=origin, host="sandbox.example") == {}


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT"])
async def test_there_is_no_stream_and_no_session_to_end(service: Service, method: str) -> None:
    """Anything but POST is 405, which tells a client to do without."""
    response = await service.http.request(method, "/mcp", headers=HEADERS)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


async def test_a_request_of_the_newest_version_stands_alone(service: Service) -> None:
    """Since 2026-07-28 nothing goes before a call, and what is there can be asked for."""
    envelope = {
        "io.modelcontextprotocol/protocolVersion": NEWEST,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    headers = {"mcp_protocol_version": NEWEST, "mcp_method": "tools/call", "mcp_name": "python"}
    call = {"name": "python", "arguments": {"code": "echo 1"}, "_meta": envelope}
    result = await answer(service, request("tools/call", call), **headers)
    assert result["structuredContent"]["stdout"] == "1"
    headers = {"mcp_protocol_version": NEWEST, "mcp_method": "server/discover"}
    found = await answer(service, request("server/discover", {"_meta": envelope}), **headers)
    assert found["supportedVersions"] == [NEWEST]


async def test_a_call_can_be_cancelled_by_the_one_who_made_it(service: Service) -> None:
    """`notifications/cancelled` ends the call of that id in that session, and no other."""
    started = len(service.worker.seen)
    mine, other = {"mcp_session_id": "mine"}, {"mcp_session_id": "other"}
    held = [
        asyncio.create_task(answer(service, tool("python", 7, code="hold"), **headers))
        for headers in (mine, other)
    ]
    await service.worker.has_seen(started + 2)
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    for odd in ({}, {"requestId": "7"}, {"requestId": 8}, {"requestId": None}):
        assert (await post(service, cancel | {"params": odd}, **mine)).status_code == 202
    assert (await post(service, cancel, **mine)).status_code == 202
    ended = await held[0]
    assert (ended["code"], ended["data"]["name"]) == (-32800, "Cancelled")
    await answer(service, tool("python", code="release"))
    assert (await held[1])["structuredContent"]["status"] == "ok"
    assert service.gateway.admission.held == 0


async def test_a_caller_that_goes_away_cancels_its_call(service: Service) -> None:
    """Its place is free when its call has left the gateway, in both kinds of the protocol."""
    async with listening(service) as address:
        for headers in (
            "",
            f"mcp-protocol-version: {NEWEST}\r\nmcp-method: tools/call\r\nmcp-name: python\r\n",
        ):
            seen = len(service.worker.seen)
            _, writer = await asyncio.open_connection(*address)
            envelope = {
                "io.modelcontextprotocol/protocolVersion": NEWEST,
                "io.modelcontextprotocol/clientCapabilities": {},
            }
            called = tool("python", code="lose")
            called["params"]["_meta"] = envelope if headers else {}
            body = json.dumps(called).encode()
            head = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())
            writer.write(
                f"POST /mcp HTTP/1.1\r\nhost: x\r\n{head}{headers}content-length: {len(body)}\r\n\r\n".encode()
            )
            writer.write(body)
            await service.worker.has_seen(seen + 1)
            assert service.gateway.admission.held == 1
            writer.close()
            await until(lambda: service.gateway.admission.held == 0)
            assert len(service.gateway.replies) == 0


async def test_a_bug_is_told_by_its_number_alone(caplog: pytest.LogCaptureFixture) -> None:
    """What goes wrong in us is in the log, under an incident that the client is told."""

    async def break_down(*_: object) -> ToolResult:
        raise RuntimeError("secret")

    async with Client(make_server(break_down), mode="legacy") as client:
        with pytest.raises(MCPError) as caught:
            await client.call_tool("python", {"code": "1"})
    assert caught.value.code == -32603
    [record] = [record for record in caplog.records if record.message == "tool failed"]
    assert record.incident in caught.value.message  # type: ignore[attr-defined]
    assert "secret" not in str(caught.value.error)


async def test_a_full_gateway_says_when_to_come_back(start: Serve) -> None:
    """A call that is not taken is an error that can be sent again, in HTTP as in JSON-RPC."""
    service = await start(gateway={"max_in_flight": 1})
    seen = len(service.worker.seen)
    held = asyncio.create_task(answer(service, tool("python", code="hold")))
    await service.worker.has_seen(seen + 1)
    response = await post(service, tool("python", code="echo"))
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    error = response.json()["error"]
    assert (error["code"], error["data"]["name"], error["data"]["is_retryable"]) == (
        -32090,
        "Overloaded",
        True,
    )
    assert error["data"]["retry_after_s"] == 1.0
    service.worker.released.set()
    await held


async def test_a_gateway_that_cannot_serve_says_so(start: Serve) -> None:
    """No worker, no Redis or a drain is 503, and can be sent again too."""
    service = await start()
    service.gateway.readiness.refusing = Obstacle("draining", "this gateway is shutting down")
    response = await post(service, tool("python", code="echo"))
    assert response.status_code == 503
    assert response.json()["error"]["data"]["is_retryable"] is True


async def test_keys_are_asked_for(start: Serve, tmp_path: Path) -> None:
    """Where there are keys, a request without one is 401, and one with a key is let in from any page."""
    key, file = new_key(), tmp_path / "keys.toml"
    file.write_text(stanza(key, "team-a", ["run"]))
    service = await start(gateway={"keys_file": str(file)})
    refused = await post(service, request("ping"))
    assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
    let_in = {"authorization": f"Bearer {key}", "origin": "https://page.example"}
    assert (await answer(service, tool("python", code="echo 1"), **let_in))["isError"] is False
    assert service.worker.seen[-1].call.code == "echo 1"


async def test_it_can_be_left_out(start: Serve) -> None:
    """A service that does not speak it has no such path."""
    service = await start(gateway={"dialects": "code_judge"})
    assert (await post(service, request("ping"))).status_code == 404


async def test_nobody_pays_for_what_is_not_spoken() -> None:
    """Neither the command line nor a gateway loads the SDK before it is needed."""
    code = "import sys, gateway.app, sandbox.cli, sandbox.tools; print({'mcp', 'mcp_types'} & {*sys.modules})"
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await program.communicate()
    assert out == b"set()\n"
