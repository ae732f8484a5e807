"""The Model Context Protocol on a whole service, by its SDK's own client: over HTTP, and over stdin and stdout."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp_types import CallToolResult

from sandbox.jsonrpc import SEND_AGAIN

from .stack import Stack

ROOT = Path(__file__).parents[2]
IN_FLIGHT = 256
MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])


def over_http(stack: Stack, mode: Any = "auto") -> Client:
    return Client(f"{stack.url}/mcp", mode=mode)


def over_stdio(url: str, log: Any, mode: Any = "auto") -> Client:
    command = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "sandbox", "mcp", "--url", url],
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # noqa: TID251 - as a program that starts it would
    )
    return Client(stdio_client(command, errlog=log), mode=mode)


def text_of(result: CallToolResult) -> str:
    [block] = result.content
    text: str = block.text  # type: ignore[union-attr]
    return text


async def use(client: Client) -> None:
    """What a program does with tools, good and bad."""
    names = {tool.name for tool in (await client.list_tools()).tools}
    assert names == {"execute_python_code_with_standard_io", "python"}
    squared = await client.call_tool(
        "execute_python_code_with_standard_io", {"code": "print(int(input()) ** 2)", "input": "12"}
    )
    assert (squared.is_error, squared.structured_content["stdout"]) == (False, "144\n")
    assert (await client.call_tool("python", {"code": "6 * 7"})).structured_content["stdout"] == "42\n"
    failed = await client.call_tool("python", {"code": "x = 1\n1 / 0"})
    assert (failed.is_error, failed.structured_content["exit_code"]) == (True, 1)
    assert text_of(failed).startswith("Tool call failure\nreason: the program failed with exit code 1\n")
    assert 'File "/tmp/main.py", line 2, in <module>' in text_of(failed)
    misspelt = await client.call_tool("python", {"cod": "1"})
    assert (misspelt.is_error, "no argument 'cod'" in text_of(misspelt)) == (True, True)
    with pytest.raises(MCPError, match="Unknown tool: perl"):
        await client.call_tool("perl", {"code": "1"})


@MODES
async def test_the_sdks_client_over_http(the_stack: Stack, mode: str) -> None:
    """Its client finds the tools, has programs run, and holds what comes against the tools' own schemas."""
    async with over_http(the_stack, mode) as client:
        await use(client)


@MODES
async def test_the_sdks_client_over_stdio(the_stack: Stack, tmp_path: Path, mode: str) -> None:
    """`sandbox mcp` is the same as a program that a client starts, and says nothing on stderr."""
    with (tmp_path / "log").open("w+") as log:
        async with over_stdio(the_stack.url, log, mode) as client:
            await use(client)
        log.seek(0)
        assert log.read() == ""


async def test_a_gateway_that_is_not_there(tmp_path: Path) -> None:
    """`sandbox mcp` serves without one, and a call is an error that can be sent again."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (tmp_path / "log").open("w") as log:
        async with over_stdio(f"http://127.0.0.1:{port}", log) as client:
            assert len((await client.list_tools()).tools) == 2
            with pytest.raises(MCPError) as caught:
                await client.call_tool("python", {"code": "1"})
    assert caught.value.code == SEND_AGAIN
    assert caught.value.data["is_retryable"] is True


async def test_many_calls_at_once(the_stack: Stack) -> None:
    """No call of 256 in flight is lost, or gets the answer of another."""
    async with over_http(the_stack) as client:
        codes = [f"print({number})" for number in range(IN_FLIGHT)]
        results = await asyncio.gather(*(client.call_tool("python", {"code": code}) for code in codes))
    assert [result.structured_content["stdout"] for result in results] == [f"{n}\n" for n in range(IN_FLIGHT)]


@MODES
async def test_a_call_that_is_given_up_ends(the_stack: Stack, mode: str) -> None:
    """A client that cancels a call leaves no program behind, and its connection goes on."""
    async with over_http(the_stack, mode) as client:
        cancelled = _cancelled(the_stack)
        call = asyncio.create_task(client.call_tool("python", {"code": "while True: pass"}))
        await _until(lambda: _running(the_stack) == 1)
        call.cancel()
        await _until(lambda: _running(the_stack) == 0)
        assert _cancelled(the_stack) == cancelled + 1, "it ended by itself"
        assert (await client.call_tool("python", {"code": "1"})).is_error is False


def _running(stack: Stack) -> int:
    return sum(worker["busy"] for worker in stack.http.get("/v1/status").json()["workers"])


def _cancelled(stack: Stack) -> float:
    [line] = re.findall(
        r"^sandbox_gateway_cancelled_calls_total (\S+)$", stack.http.get("/metrics").text, re.MULTILINE
    )
    return float(line)


async def _until(true: Callable[[], bool]) -> None:
    """Wait for what nothing announces, beside what goes on here."""
    while not await asyncio.to_thread(true):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
