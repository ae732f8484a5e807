"""The taskset and the toolset in verifiers' own environment: real rollouts, tool servers, traces and rewards.

The model is a script behind an HTTP server, and the harness a chat loop in this process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import verifiers.v1 as vf
from verifiers.v1.harnesses.utils.mcp import mcp_client

from sandbox.integrations.verifiers import MathTaskset

__all__ = ["ChatHarness", "MathTaskset"]

MODULE = "roc_test_math"  # what a person would make: a module that exports the taskset


class ChatConfig(vf.HarnessConfig):
    """None of its own."""


class ChatHarness(vf.Harness[ChatConfig]):
    """Asks the model, and calls the tools that it asks for, until it asks for none."""

    SUPPORTS_MCP = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> vf.ProgramResult:
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        [url] = mcp_urls.values()
        async with (
            mcp_client({"url": url, "connect_timeout": 60}) as tools,
            httpx.AsyncClient(timeout=60) as http,
        ):
            listed = (await tools.list_tools()).tools
            specs = [
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description,
                        "parameters": tool.input_schema,
                    },
                }
                for tool in listed
            ]
            while True:
                answer = await http.post(
                    f"{endpoint}/chat/completions",
                    headers={"Authorization": f"Bearer {secret}"},
                    json={"model": ctx.model, "messages": messages, "tools": specs},
                )
                if answer.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=answer.text)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    asked = call["function"]
                    result = await tools.call_tool(asked["name"], json.loads(asked["arguments"]))
                    messages.append(
                        {"role": "tool", "tool_call_id": call["id"], "content": result.content[0].text}
                    )


class _Model(BaseHTTPRequestHandler):
    """Says the turns that the prompt asks for, one after another: its text is their JSON."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        turns = json.loads(body["messages"][0]["content"])
        said = turns[sum(message["role"] == "assistant" for message in body["messages"])]
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if code := said.removeprefix("run: ") if said.startswith("run: ") else None:
            call = {
                "id": "c1",
                "type": "function",
                "function": {"name": "python", "arguments": json.dumps({"code": code})},
            }
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if code else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": "script",
                "choices": [choice],
                "usage": usage,
            }
        ).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        """In silence."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # all rollouts come at once


@pytest.fixture(scope="module")
def model() -> Iterator[vf.ModelContext]:
    """A model that follows its script."""
    server = _Server(("127.0.0.1", 0), _Model)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = vf.EvalClientConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1")
    yield vf.ModelContext(model="script", client=client, sampling=vf.SamplingConfig())
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """The module of these tests, under a name without dots, which verifiers asks of the id of a taskset or a harness."""
    monkeypatch.setitem(sys.modules, MODULE, sys.modules[__name__])
    return MODULE


async def roll_out(
    module: str,
    model: vf.ModelContext,
    folder: Path,
    service: dict[str, Any],
    *rows: tuple[list[str], str],
    tools: dict[str, Any] | None = None,
) -> list[vf.Trace]:
    """One rollout for each script and its gold answer, all at once."""
    dataset = folder / "rows.jsonl"
    dataset.write_text(
        "".join(json.dumps({"prompt": json.dumps(turns), "gold": gold}) + "\n" for turns, gold in rows)
    )
    taskset = {
        "id": module,
        "dataset": dataset,
        "tools": tools or {"service": service},
        "task": {"service": service},
    }
    agent = {"harness": {"id": module}, "runtime": {"type": "subprocess"}}
    env = vf.load_environment(vf.SingleAgentEnvConfig.model_validate({"taskset": taskset, "agent": agent}))
    async with env.serving():
        episodes = await asyncio.gather(*(env.run_slot(env.slots(task)[0], model) for task in env.taskset))
    return [episode.traces[0] for episode in episodes]


def replies(trace: vf.Trace) -> list[str]:
    """What the tool answered in a rollout."""
    return [message.content for message in trace.branches[-1].messages if message.role == "tool"]


async def test_rollouts_run_programs_and_are_graded(
    url: str, module: str, model: vf.ModelContext, tmp_path: Path
) -> None:
    """Each of twenty at once sees its own output; a right answer is 1, a wrong one 0, and what nobody can grade no score."""
    rows = [([f"run: print({n})", rf"It is \boxed{{{n}}}."], "7") for n in range(20)]
    rows += [(["run: 1 / 0", r"It is \boxed{7}."], "7"), ([r"It is \boxed{7}."], r"\frac{")]
    *traces, failing, hopeless = await roll_out(module, model, tmp_path, {"url": url}, *rows)
    for n, trace in enumerate(traces):
        assert trace.errors == []
        assert replies(trace)[0].startswith(f"Tool call success\nstdout: {n}\n")
        assert (trace.ok, trace.rewards["correct"].score) == (True, float(n == 7))
    assert "ZeroDivisionError" in replies(failing)[0]
    assert (failing.ok, failing.reward) == (True, 1.0)
    assert (hopeless.ok, hopeless.rewards["correct"]) == (False, None)
    assert "gold_unparsable" in hopeless.last_error.message


async def test_a_rollout_that_met_a_fault_is_no_score(
    nobody: str, module: str, model: vf.ModelContext, tmp_path: Path
) -> None:
    """It is stopped before its model speaks again, and recorded as an error."""
    service = {"url": nobody, "patience_s": 0.01}
    [trace] = await roll_out(module, model, tmp_path, service, (["run: 1", "run: 2", "Done."], "7"))
    assert (trace.ok, trace.rewards["correct"], trace.stop_condition) == (False, None, "lost")
    assert "Unavailable" in trace.last_error.message
    assert (trace.num_turns, replies(trace)) == (1, [])


async def test_the_tools_may_be_the_services_own(
    url: str, module: str, model: vf.ModelContext, tmp_path: Path
) -> None:
    """With the URL of its /mcp verifiers starts no server for the toolset, and rollouts are graded as before."""
    row = (["run: print(6 * 7)", r"It is \boxed{42}."], "42")
    [trace] = await roll_out(module, model, tmp_path, {"url": url}, row, tools={"url": f"{url}/mcp"})
    assert replies(trace)[0].startswith("Tool call success\nstdout: 42\n")
    assert (trace.ok, trace.reward) == (True, 1.0)
