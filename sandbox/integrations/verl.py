"""A verl tool that runs Python in the sandbox, and a reward function that grades answers there.

verl makes a tool once for each agent loop worker, and calls `create`, `execute` and `release` for every call of a
model, so what belongs to a rollout is kept by its `agent_data`, and ends with it. Of what `execute` returns verl uses
the text alone; an exception of it becomes text that the policy learns from. So what came of each call goes into
`agent_data.extra_fields`, where samplers and reward functions find it:

- `sandbox_calls`, a list: for each call its `tool`, its `status` (of the result, or `bad_call` for what was no call)
  and the seconds `wall_s` and `queue_s`.
- `sandbox_fault`, where the service failed after all retries: what it said. Such a rollout is lost. It must not be
  scored, as wrong least of all: `compute_score` raises `Unscored`, and verl's trainer goes on without the rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal, TypedDict
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

from sandbox.calls import CallStatus, Limits, ToolCall, Usage, first_error
from sandbox.client import DEFAULT_URL
from sandbox.errors import BadToolCall, ConfigError, SandboxError
from sandbox.grading.math import MathTask
from sandbox.integrations.clients import client_of_loop, is_right_in_loop
from sandbox.tools import SHOWN_BYTES, TOOLS, render, schemas, to_call

log = logging.getLogger(__name__)

CALLS = "sandbox_calls"
FAULT = "sandbox_fault"

#: What the model of a lost rollout is told, so that the rollout comes to its end.
_AWAY = "The tool is not available."


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ClientConfig(_Strict):
    """How the service is reached; all tools and rewards of a process share what has the same."""

    url: str = DEFAULT_URL
    api_key: str | None = None
    max_in_flight: int = 4096
    patience_s: float = Field(
        default=600.0, description="For retries, so that a restart of the service loses nothing."
    )


class ToolConfig(_Strict):
    """`config` of a tool in verl's YAML."""

    type: Literal["native"] = "native"  # verl asks for it
    tool: str = "python"
    client: ClientConfig = ClientConfig()
    limits: Limits = Limits()
    deadline_s: float = 120.0
    shown_bytes: int = SHOWN_BYTES


class CallRecord(TypedDict):
    """What `sandbox_calls` has of a call."""

    tool: str
    status: str
    wall_s: float
    queue_s: float


class SandboxTool(BaseTool):  # type: ignore[misc, unused-ignore]
    """One of the tools of `sandbox.tools`. `jupyter_code` remembers the cells of each rollout and runs them again."""

    def __init__(
        self, config: dict[str, JsonValue], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        self._config = _checked(config)
        self._cells: WeakKeyDictionary[object, list[str]] = WeakKeyDictionary()
        super().__init__(config, tool_schema)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """What a model is told of it, unless the YAML says something else."""
        [schema] = schemas(self._config.tool)
        return OpenAIFunctionToolSchema.model_validate(schema)

    @rollout_trace_op
    async def execute(
        self,
        instance_id: str,  # noqa: ARG002 - verl makes one for each call
        parameters: dict[str, Any],
        *,
        agent_data: Any,
        **_: object,
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a program of a rollout, and say what the model should see of it."""
        return ToolResponse(text=await self._answer(parameters, agent_data)), 0.0, {}

    async def _answer(self, parameters: dict[str, Any], rollout: Any) -> str:
        if FAULT in rollout.extra_fields:
            return _AWAY
        try:
            call = self._call(parameters, self._cells.get(rollout, []))
            client = await client_of_loop(**self._config.client.model_dump())
            result = await client.run(call)
        except BadToolCall as exc:
            _note(rollout, self._config.tool, "bad_call", Usage())
            return str(exc)
        except SandboxError as exc:
            log.warning("a rollout is lost", extra={"reason": str(exc)})
            rollout.extra_fields[FAULT] = f"{type(exc).__name__}: {exc}"
            return _AWAY
        _note(rollout, self._config.tool, result.status.value, result.usage)
        # A limit that ended this cell would end all that come after it.
        if result.status in {CallStatus.OK, CallStatus.ERROR}:
            self._cells.setdefault(rollout, []).append(parameters["code"])
        return render(result, max_bytes=self._config.shown_bytes)

    def _call(self, parameters: dict[str, Any], cells: list[str]) -> ToolCall:
        config = self._config
        return to_call(
            config.tool, parameters, earlier=cells, limits=config.limits, deadline_s=config.deadline_s
        )


def _note(rollout: Any, tool: str, status: str, usage: Usage) -> None:
    record = CallRecord(tool=tool, status=status, wall_s=usage.wall_s, queue_s=usage.queue_s)
    rollout.extra_fields.setdefault(CALLS, []).append(record)


class Unscored(Exception):
    """A rollout that has no score, through no fault of the model: verl's trainer drops it, and logs why."""


async def compute_score(
    data_source: str,  # noqa: ARG001 - the names are verl's
    solution_str: str,
    ground_truth: object,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_router_address: object = None,  # noqa: ARG001 - given where there is a reward model
    reward_model_tokenizer: object = None,  # noqa: ARG001
    **client: Any,
) -> dict[str, float]:
    """A `custom_reward_function`: 1 where the last answer of a rollout is the reference, as mathematics, else 0.

    `client` are the fields of `ClientConfig`, from `reward_kwargs`. Raises `Unscored` for a rollout that met a fault,
    and for an answer that cannot be graded; a SandboxError where the service failed at that.
    """
    extra = extra_info or {}
    if fault := extra.get(FAULT):
        raise Unscored(f"the rollout is lost: {fault}")
    task = MathTask(answer=solution_str, gold=str(ground_truth))
    right = await is_right_in_loop(task, **ClientConfig.model_validate(client).model_dump())
    if isinstance(right, str):
        raise Unscored(f"the answer cannot be graded: {right}")
    calls = extra.get(CALLS, [])
    failed = sum(call["status"] != CallStatus.OK for call in calls)
    score = float(right)
    return {"score": score, "acc": score, "tool_calls": len(calls), "tool_calls_failed": failed}


def _checked(config: dict[str, JsonValue]) -> ToolConfig:
    try:
        checked = ToolConfig.model_validate(config)
    except ValidationError as exc:
        raise ConfigError(f"config of SandboxTool: {first_error(exc)}") from exc
    if checked.tool not in TOOLS:
        raise ConfigError(f"config of SandboxTool: tool: {checked.tool!r} is none of {', '.join(TOOLS)}")
    return checked
