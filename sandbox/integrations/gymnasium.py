"""A Gymnasium environment whose actions are Python programs and whose observations are what came of them."""

from __future__ import annotations

from typing import Any, Unpack

import gymnasium
from gymnasium.envs.registration import EnvSpec

from sandbox.calls import CallStatus, ToolResult
from sandbox.client import DEFAULT_URL, ClientOptions
from sandbox.grading.math import MathTask
from sandbox.integrations.clients import blocking_client, is_right
from sandbox.tools import render, to_call

#: For `gymnasium.make` and `make_vec`. What a model sees has the time in it that a program took.
SPEC = EnvSpec(
    "RoCSandbox/Python-v0", entry_point="sandbox.integrations.gymnasium:PythonEnv", nondeterministic=True
)


class AnyText(gymnasium.Space[str]):
    """Every text. A sample is a program that prints a number."""

    def contains(self, x: object) -> bool:
        """Whether this is one."""
        return isinstance(x, str)

    def sample(self, mask: None = None, probability: None = None) -> str:  # noqa: ARG002 - no text is masked
        """A program for who tries out an environment."""
        return f"print({self.np_random.integers(100)})"

    def __eq__(self, other: object) -> bool:
        """All are the same, which vectors of environments ask for."""
        return isinstance(other, AnyText)

    def __hash__(self) -> int:
        """The same for all."""
        return hash(AnyText)


class PythonEnv(gymnasium.Env[str, str]):
    """Runs each action, a program of its own, and shows what a model should see of it.

    `info["status"]` is the status of the call. With a `gold` answer the reward is 1 for a program that prints it, which
    ends the episode. Where nobody can tell, the episode is truncated, and `info["unscored"]` says why. A fault of the
    service raises its `SandboxError`. Bound an episode by `max_episode_steps`. `options` are those of `SandboxClient`;
    all environments of a process share one.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        task: str = "",
        gold: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None:
        self.action_space = AnyText()
        self.observation_space = AnyText()
        self._url = url
        self._task = task
        self._gold = gold
        self._options = options

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode: its observation is the task. `options` may bring another `task` and its `gold`."""
        super().reset(seed=seed)
        if options is not None and "task" in options:
            self._task, self._gold = options["task"], options.get("gold")
        return self._task, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run a program."""
        result = blocking_client(self._url, **self._options).run(to_call("python", {"code": action}))
        info: dict[str, Any] = {"status": result.status.value}
        right = self._printed_gold(result)
        if isinstance(right, str):
            return render(result), 0.0, False, True, info | {"unscored": right}
        return render(result), float(right), right, False, info

    def _printed_gold(self, result: ToolResult) -> bool | str:
        """Whether a program has printed the answer, or why nobody knows."""
        if self._gold is None or result.status is not CallStatus.OK:
            return False
        task = MathTask(answer=result.stdout, gold=self._gold, extract="whole")
        return is_right(task, self._url, **self._options)
