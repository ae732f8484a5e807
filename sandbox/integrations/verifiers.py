"""A toolset and a taskset of verifiers (its v1 API) whose models run Python in the sandbox, and are graded there.

verifiers serves a toolset over MCP from a process of its own, one for all rollouts of an environment worker; that
process has the client. A fault of the service cannot be raised through a model's tool call, which would make an
observation of it. So it goes into the rollout's `SandboxState`; the rollout is stopped, and its reward raises, which
verifiers records as an error of the rollout, to be retried or left out, and never as a score.
"""

# Annotations are not put off here: verifiers reads them of a tool where names of this file are not known.
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import verifiers.v1 as vf
from pydantic import Field

from sandbox.calls import Limits
from sandbox.client import DEFAULT_URL, ClientOptions
from sandbox.errors import BadToolCall, InternalError, SandboxError
from sandbox.grading.math import MathTask as Question
from sandbox.integrations.clients import client_of_loop, is_right_in_loop
from sandbox.tools import SHOWN_BYTES, render, to_call

#: What the model of a lost rollout is told, should it ask again.
_AWAY = "The tool is not available."

_Code = Annotated[
    str,
    Field(
        description="The Python program, as text. What it prints is what you see; "
        "so is the value of a last-line expression."
    ),
]


class ServiceConfig(vf.BaseConfig):
    """How the service is reached."""

    url: str = DEFAULT_URL
    api_key: str | None = None
    max_in_flight: int = 4096
    patience_s: float = 600.0
    """Of retries, so that a restart of the service loses nothing."""

    @property
    def options(self) -> ClientOptions:
        """Those of a client, but for the URL."""
        return ClientOptions(
            api_key=self.api_key, max_in_flight=self.max_in_flight, patience_s=self.patience_s
        )


class PythonToolsetConfig(vf.SharedToolsetConfig):
    """Of the toolset: the service, and what bounds a program."""

    service: ServiceConfig = ServiceConfig()
    limits: Limits = Limits()
    shown_bytes: int = SHOWN_BYTES


class SandboxState(vf.State):
    """What a rollout's tools tell its task."""

    fault: str | None = None
    """What the service said when it failed: the rollout is lost."""


class PythonToolset(vf.Toolset[PythonToolsetConfig, SandboxState]):
    """The tool `python`. Each call is a program of its own."""

    TOOL_PREFIX = None

    @vf.tool
    async def python(self, code: _Code) -> str:
        """Run a Python program and see what it prints and the value of an expression on its last line."""
        if self.state.fault is not None:
            return _AWAY
        service = self.config.service
        try:
            client = await client_of_loop(service.url, **service.options)
            result = await client.run(to_call("python", {"code": code}, limits=self.config.limits))
        except BadToolCall as exc:
            return str(exc)
        except SandboxError as exc:
            self.state.fault = f"{type(exc).__name__}: {exc}"
            return _AWAY
        return render(result, max_bytes=self.config.shown_bytes)


class MathData(vf.TaskData):
    """A problem, and its answer."""

    gold: str


class MathTaskConfig(vf.TaskConfig):
    """Of the grading."""

    service: ServiceConfig = ServiceConfig()


class MathTask(vf.Task[MathData, SandboxState, MathTaskConfig]):
    """Rewards the right answer with 1."""

    @vf.stop
    async def lost(self, trace: vf.Trace) -> bool:
        """Whether the rollout has to be stopped, since it cannot be scored."""
        return trace.state.fault is not None

    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        """Whether the last reply has the answer. Raises SandboxError where that cannot be known."""
        if trace.state.fault is not None:
            raise InternalError(f"the rollout is lost: {trace.state.fault}")
        service = self.config.service
        question = Question(answer=trace.last_reply, gold=self.data.gold)
        right = await is_right_in_loop(question, service.url, **service.options)
        if isinstance(right, str):
            raise InternalError(f"the answer cannot be graded: {right}")
        return float(right)


class MathTasksetConfig(vf.TasksetConfig):
    """Of the taskset."""

    dataset: Path
    """A file of JSON objects, one a line, with a `prompt` and a `gold` answer each."""
    tools: PythonToolsetConfig = PythonToolsetConfig()
    task: MathTaskConfig = MathTaskConfig()


class MathTaskset(vf.Taskset[MathTask, MathTasksetConfig]):
    """Problems from a file, to be solved with Python."""

    @classmethod
    def toolsets(cls, config: MathTasksetConfig) -> list[vf.Toolset]:
        """One server for all rollouts."""
        return [PythonToolset(config.tools)]

    def load(self) -> Iterator[MathTask]:
        """One task for each line."""
        with self.config.dataset.open(encoding="utf-8") as lines:
            for line in filter(str.strip, lines):
                row = json.loads(line)
                yield MathTask(MathData(prompt=row["prompt"], gold=row["gold"]), self.config.task)


if __name__ == "__main__":
    PythonToolset.run()
