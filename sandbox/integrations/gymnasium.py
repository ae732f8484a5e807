"""A Gymnasium environment whose actions are Python programs and whose observations are what came of them."""

from __future__ import annotations

from typing import Any, Unpack

import gymnasium
from gymnasium.envs.registration import EnvSpec

from sandbox.client import DEFAULT_URL, ClientOptions
from sandbox.integrations.clients import blocking_client
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

    `info["status"]` is the status of the call. A fault of the service raises its `SandboxError`; bound an episode by
    `max_episode_steps`. `options` are those of `SandboxClient`; all environments of a process share one.
    """

    def __init__(self, url: str = DEFAULT_URL, *, task: str = "", **options: Unpack[ClientOptions]) -> None:
        self.action_space = AnyText()
        self.observation_space = AnyText()
        self._url = url
        self._task = task
        self._options = options

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin an episode: its observation is the task, that of `options` if it has one."""
        super().reset(seed=seed)
        self._task = (options or {}).get("task", self._task)
        return self._task, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Run a program."""
        result = blocking_client(self._url, **self._options).run(to_call("python", {"code": action}))
        return render(result), 0.0, False, False, {"status": result.status.value}
