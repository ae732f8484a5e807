"""A LangChain tool that runs Python in the sandbox."""

from __future__ import annotations

from typing import Unpack

from langchain_core.tools import StructuredTool, ToolException

from sandbox.calls import ToolCall, ToolResult
from sandbox.client import DEFAULT_URL, ClientOptions
from sandbox.errors import BadToolCall
from sandbox.integrations.clients import blocking_client, client_of_loop
from sandbox.tools import render, schemas, to_call


def python_tool(
    url: str = DEFAULT_URL, *, name: str = "python", **options: Unpack[ClientOptions]
) -> StructuredTool:
    """One of the tools of `sandbox.tools`, for `invoke` and `ainvoke`; `options` are those of `SandboxClient`.

    The content of its message is what a model should see, the artifact is the `ToolResult`. What the model asked for
    wrongly is a message with the status "error". A fault of the service raises its `SandboxError`.
    """

    def run(**arguments: object) -> tuple[str, ToolResult]:
        call = _asked(name, arguments)
        result = blocking_client(url, **options).run(call)
        return render(result), result

    async def run_in_loop(**arguments: object) -> tuple[str, ToolResult]:
        call = _asked(name, arguments)
        result = await (await client_of_loop(url, **options)).run(call)
        return render(result), result

    [schema] = schemas(name)
    function = schema["function"]
    assert isinstance(function, dict)
    return StructuredTool.from_function(
        run,
        run_in_loop,
        name=name,
        description=str(function["description"]),
        args_schema=function["parameters"],
        response_format="content_and_artifact",
        handle_tool_error=True,
    )


def _asked(name: str, arguments: dict[str, object]) -> ToolCall:
    try:
        return to_call(name, arguments)
    except BadToolCall as exc:
        raise ToolException(str(exc)) from exc
