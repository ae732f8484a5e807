"""The LangChain tool, by LangChain's own calls."""

from __future__ import annotations

import asyncio

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.utils.function_calling import convert_to_openai_tool

from sandbox import CallStatus, Unavailable
from sandbox.integrations import clients
from sandbox.integrations.langchain import python_tool
from sandbox.tools import TOOLS, schemas


def asked(code: object, name: str = "python") -> dict[str, object]:
    """A model's tool call, as LangChain has it."""
    return {"type": "tool_call", "id": "1", "name": name, "args": {"code": code}}


@pytest.mark.parametrize("name", TOOLS)
def test_a_model_is_told_of_the_tool_as_of_any_other(name: str) -> None:
    """LangChain makes the same schema of it that `sandbox.tools` has, but for what OpenAI's form leaves out."""
    made = convert_to_openai_tool(python_tool(name=name))
    assert [made] == schemas(name)


def test_a_blocking_call_is_answered_with_text_and_result(url: str) -> None:
    """The message has what the model should see, and the whole result as its artifact."""
    message = python_tool(url).invoke(asked("print(6 * 7)"))
    assert isinstance(message, ToolMessage)
    assert message.content.startswith("Tool call success\nstdout: 42\n")
    assert (message.status, message.artifact.status, message.artifact.stdout) == (
        "success",
        CallStatus.OK,
        "42\n",
    )


async def test_many_calls_of_a_loop_share_one_client(url: str) -> None:
    """A hundred calls of two tools at once are each answered with their own output, over one client."""
    tools = [python_tool(url), python_tool(url, name="jupyter_code")]
    codes = [(tools[n % 2], asked(f"print({n})", tools[n % 2].name)) for n in range(100)]
    messages = await asyncio.gather(*(tool.ainvoke(call) for tool, call in codes))
    assert [message.artifact.stdout for message in messages] == [f"{n}\n" for n in range(100)]
    assert len(clients._of_loops) == 1


def test_a_loop_that_ends_closes_its_client(url: str) -> None:
    """`asyncio.run` leaves no client behind."""

    async def one() -> object:
        await python_tool(url).ainvoke(asked("1"))
        [(client, _)] = clients._of_loops.values()
        return client

    client = asyncio.run(one())
    assert clients._of_loops == {}
    with pytest.raises(RuntimeError, match="async with"):
        asyncio.run(client.run("1"))


def test_a_failing_program_is_an_answer(url: str) -> None:
    """The model sees its traceback."""
    message = python_tool(url).invoke(asked("1 / 0"))
    assert message.artifact.status is CallStatus.ERROR
    assert message.content.startswith("Tool call failure\n")
    assert "ZeroDivisionError" in message.content


@pytest.mark.parametrize("arguments", [{}, {"code": 1}, {"code": "1", "speed": 2}])
async def test_a_wrong_call_is_told_to_the_model(url: str, arguments: dict[str, object]) -> None:
    """It is a message with the status "error", both ways, and no exception."""
    call = {"type": "tool_call", "id": "1", "name": "python", "args": arguments}
    for message in (python_tool(url).invoke(call), await python_tool(url).ainvoke(call)):
        assert message.status == "error"
        assert message.content.startswith("Tool call failure\nreason: ")


async def test_a_fault_is_no_answer(nobody: str) -> None:
    """Where no service is the calls raise: a model is never told of it."""
    tool = python_tool(nobody, attempts=1)
    with pytest.raises(Unavailable):
        tool.invoke(asked("1"))
    with pytest.raises(Unavailable):
        await tool.ainvoke(asked("1"))
