"""The Model Context Protocol's words for our tools, on its official SDK: what tools there are, and what came of a call.

Two programs speak it: the gateway (`gateway/dialects/mcp.py`, over HTTP) and `sandbox mcp` (over stdin and stdout, here
at the end). Each hands `make_server` its own way to run a call. The SDK takes a second to import, so both import this
file when it is needed and not before.

What is an error where, by the protocol's own rule that a model should see what it can mend:
- a program that failed, whatever ended it, is a result with `isError`;
- arguments that are none of the tool are a result with `isError` too;
- a fault of ours is a result with `isError` that says so, and that the call may be made again;
- a tool that there is not, and a call that was not taken, are JSON-RPC errors (`to_rpc_error`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any, TypeAlias, Unpack, cast
from uuid import uuid4

from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    ListToolsResult,
    PaginatedRequestParams,
    TextContent,
    Tool,
    ToolAnnotations,
)

from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.client import ClientOptions, SandboxClient
from sandbox.errors import BadToolCall, InternalError, QueueTimeout, SandboxError
from sandbox.jsonrpc import to_rpc_error
from sandbox.tools import render, schemas, to_call

log = logging.getLogger(__name__)

Context: TypeAlias = ServerRequestContext[Any, Any]
Run: TypeAlias = Callable[[Context, ToolCall], Awaitable[ToolResult]]

#: Those that need no memory of what ran before.
OFFERED = ("execute_python_code_with_standard_io", "python")

#: Names of the service's own, and what no tool asks for.
_NOT_TOLD = {"id", "worker", "files"}
_INSTRUCTIONS = (
    "Programs run in a sandbox of their own with Python's standard library, numpy, sympy, scipy, pandas and networkx. "
    "They have no network, a limited time, and nothing of one is left for the next."
)

# At `info` it writes two lines for each request.
logging.getLogger("mcp").setLevel(logging.WARNING)


def make_server(run: Run) -> Server[Any]:
    """A server of our tools. `run` may raise a SandboxError or MCPError; cancelled, it ends its call."""
    tools = list(map(_tool, OFFERED))

    async def list_tools(_: Context, __: PaginatedRequestParams | None) -> ListToolsResult:
        return ListToolsResult(tools=tools)

    async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult:
        if params.name not in OFFERED:
            raise MCPError(INVALID_PARAMS, f"Unknown tool: {params.name[:100]}")
        try:
            return answer(await run(context, to_call(params.name, params.arguments or {}, offered=OFFERED)))
        except BadToolCall as exc:
            return CallToolResult(content=[_text(exc.message)], is_error=True)
        except SandboxError as exc:
            raise _as_mcp(exc) from exc
        except MCPError:
            raise
        except Exception as exc:  # a bug, of which the SDK would tell the client all that it says
            incident = uuid4().hex
            log.exception("tool failed", extra={"incident": incident})
            error = InternalError(f"the service failed; its log tells more under {incident}")
            raise _as_mcp(error) from exc

    server: Server[Any] = Server(
        "roc-sandbox",
        version=version("roc-sandbox"),
        title="RoC Sandbox",
        instructions=_INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )
    server.middleware.clear()  # the SDK's own traces each message
    return server


def answer(result: ToolResult) -> CallToolResult:
    """What came of a call: the text that a model sees, and all of it as data."""
    try:
        text = render(result)
    except (QueueTimeout, InternalError) as exc:
        text = f"The sandbox failed, and not the program: {exc.message}. Call the tool again."
    return CallToolResult(
        content=[_text(text)],
        structured_content=result.model_dump(mode="json", exclude=_NOT_TOLD),
        is_error=result.status is not CallStatus.OK,
    )


def _as_mcp(exc: SandboxError) -> MCPError:
    return MCPError(*to_rpc_error(exc))


def _text(text: str) -> TextContent:
    return TextContent(type="text", text=text)


def _tool(name: str) -> Tool:
    [schema] = schemas(name)
    function = cast("dict[str, Any]", schema["function"])
    output = ToolResult.model_json_schema(mode="serialization")
    for field in _NOT_TOLD:
        del output["properties"][field]
    output["required"] = ["status"]
    output["$defs"].pop("Base64File", None)
    output["description"] = "What came of the program."
    return Tool(
        name=name,
        description=function["description"],
        input_schema=function["parameters"],
        output_schema=output,
        annotations=ToolAnnotations(
            title="Run Python", read_only_hint=False, destructive_hint=False, open_world_hint=False
        ),
    )


@asynccontextmanager
async def http_manager(run: Run, most_bytes: int) -> AsyncIterator[StreamableHTTPSessionManager]:
    """What answers requests over HTTP, each by itself and with JSON. It looks at no `Host`: a proxy has its own."""
    manager = StreamableHTTPSessionManager(
        make_server(run), json_response=True, stateless=True, max_request_body_size=most_bytes
    )
    async with manager.run():
        yield manager


async def serve_stdio(url: str, **options: Unpack[ClientOptions]) -> None:
    """Speak it over stdin and stdout until stdin ends, and have a gateway run the calls.

    Nothing but the protocol is written to stdout, also by who prints: the SDK leads that to stderr.
    """
    async with SandboxClient(url, **options) as client:

        async def run(_: Context, call: ToolCall) -> ToolResult:
            return await client.run(call)

        server = make_server(run)
        async with stdio_server() as (read, write):
            await server.run(read, write, server.create_initialization_options())
