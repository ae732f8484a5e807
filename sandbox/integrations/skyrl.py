"""A SkyRL environment in which a model solves a task with Python in the sandbox.

A turn of the model may hold tool calls as Qwen and Hermes models write them, JSON between <tool_call> tags; each is
answered between <tool_response> tags. A turn without one ends the episode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from pydantic import BaseModel, JsonValue, ValidationError
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from sandbox.calls import CallStatus, first_error
from sandbox.client import DEFAULT_URL, ClientOptions
from sandbox.errors import BadToolCall
from sandbox.grading.math import MathTask
from sandbox.integrations.clients import blocking_client, is_right
from sandbox.tools import render, to_call

# One that was cut, or whose end was the stop text, has no end.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class _Asked(BaseModel):
    name: str
    arguments: JsonValue


class PythonEnv(BaseTextEnv):
    """One episode. `options` are those of `SandboxClient`; all episodes of a process share one.

    SkyRL has no place for a rollout that was lost. So a fault of the service raises its `SandboxError`, after the
    client's patience, and is never shown to the model; raise `patience_s` to sit out a restart. A reply that cannot be
    graded is 0, as there is no other number for it; the metric `unscored` counts those.
    """

    def __init__(
        self,
        env_config: object = None,  # noqa: ARG002 - SkyRL gives it; ours comes by `skyrl_gym.register(kwargs=…)`
        extras: Mapping[str, Any] | None = None,
        *,
        url: str = DEFAULT_URL,
        tools: Sequence[str] = ("python",),
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__()
        self.max_turns = (extras or {}).get("max_turns", 5)
        self._gold = (extras or {}).get("reward_spec", {}).get("ground_truth")
        self._unscored = ""
        self._tools = tools
        self._url = url
        self._options = options
        self._calls = self._failed = 0

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Answer a turn of the model."""
        self.turns += 1
        asked = _CALL.findall(action)
        done = not asked or self.turns >= self.max_turns
        answers = [] if done else [self._answer(text) for text in asked]
        content = "\n".join(f"<tool_response>\n{answer}\n</tool_response>" for answer in answers)
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": content}],
            reward=self._reward(action) if done else 0.0,
            done=done,
            metadata={"unscored": self._unscored} if self._unscored else {},
        )

    def get_metrics(self) -> dict[str, Any]:
        """How many tool calls there were, how many failed by the model's doing, and whether nobody could grade it."""
        return {
            "tool_calls": self._calls,
            "tool_calls_failed": self._failed,
            "unscored": int(bool(self._unscored)),
        }

    def _reward(self, action: str) -> float:
        if self._gold is None:
            return 0.0
        right = is_right(MathTask(answer=action, gold=str(self._gold)), self._url, **self._options)
        if isinstance(right, str):
            self._unscored = right
            return 0.0
        return float(right)

    def _answer(self, text: str) -> str:
        self._calls += 1
        try:
            asked = _Asked.model_validate_json(text)
            call = to_call(asked.name, asked.arguments, offered=self._tools)
        except ValidationError as exc:
            self._failed += 1
            return f"Tool call failure\nreason: the tool call cannot be read: {first_error(exc)}"
        except BadToolCall as exc:
            self._failed += 1
            return str(exc)
        result = blocking_client(self._url, **self._options).run(call)
        self._failed += result.status is not CallStatus.OK
        return render(result)
