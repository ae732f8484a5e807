"""Our Python tools for TRL's `GRPOTrainer`: an environment, a plain tool, and a reward.

TRL takes plain Python, so that nothing of it is imported here: the public methods of an environment, and functions, are
tools, described by their signatures and docstrings.

What TRL does with errors decides how ours are told. An `Exception` of a tool becomes the text of the tool's answer, for
the model to read, and a rollout is left out of the loss only where all its rewards are None. So what the model did
wrong is an exception, as TRL expects. A fault of the service is one as well, but its environment remembers it, and
rewards behind `unless_lost` are None for its rollout. A plain tool knows of no rollout: a fault ends the training.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, Unpack

from sandbox.calls import CallStatus
from sandbox.client import DEFAULT_URL, ClientOptions
from sandbox.errors import InternalError, Overloaded, QueueTimeout, SandboxError, Unavailable
from sandbox.grading.math import MathTask, grade_math
from sandbox.integrations.clients import blocking_client, client_of_loop
from sandbox.tools import render, to_call

Rewards: TypeAlias = Sequence[float | None]
Completion: TypeAlias = str | Sequence[Mapping[str, Any]]

#: What says nothing about how we are used, and may be over by the next rollout.
_PASSING = (InternalError, Overloaded, QueueTimeout, Unavailable)


class ServiceLost(BaseException):
    """The service could not run a plain tool's program, after the client's patience.

    It is no `Exception`, because TRL would show one to the model. It leaves `GRPOTrainer.train`.
    """


def python_tool(url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> Callable[[str], str]:
    """A tool for `GRPOTrainer(tools=[...])`; `options` are those of `SandboxClient`. Raises ServiceLost.

    There is none for an event loop: TRL would show its faults to the model, and it runs the tools of one rollout after
    those of the other in any case.
    """

    def python(code: str) -> str:
        """Run a Python program and see what it prints and the value of an expression on its last line.

        Args:
            code: The Python program, as text.

        Returns:
            What the program printed, or how it failed.
        """
        call = to_call("python", {"code": code})
        try:
            return render(blocking_client(url, **options).run(call))
        except SandboxError as exc:
            raise ServiceLost(f"{type(exc).__name__}: {exc}") from exc

    return python


class _Environment:
    """A rollout's programs. All environments of a process share one client."""

    def __init__(self, url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> None:
        self._url = url
        self._options = options
        #: What came of each program of the rollout: the service's word, and none of the program's.
        self.statuses: list[CallStatus] = []
        #: Why the rollout says nothing about the model; None where nothing went wrong.
        self.fault: SandboxError | None = None

    def reset(self, **_row: object) -> None:
        """Begin a rollout. Raises what ended the last one, if it would end any other, too, such as a missing key."""
        if self.fault is not None and not isinstance(self.fault, _PASSING):
            raise self.fault
        self.statuses = []
        self.fault = None

    def _answer(self, tool: str, code: str, earlier: Sequence[str] = ()) -> str:
        if self.fault is not None:
            raise self.fault  # nothing of this rollout counts any more
        call = to_call(tool, {"code": code}, earlier=earlier)
        try:
            result = blocking_client(self._url, **self._options).run(call)
        except SandboxError as exc:
            self.fault = exc
            raise
        self.statuses.append(result.status)
        return render(result)


class PythonEnvironment(_Environment):
    """For `GRPOTrainer(environment_factory=...)`: a tool `python`, each program of which starts afresh.

    `functools.partial(PythonEnvironment, URL)` makes them; the options are those of `SandboxClient`.
    """

    def python(self, code: str) -> str:
        """Run a Python program and see what it prints and the value of an expression on its last line.

        Args:
            code: The Python program, as text.

        Returns:
            What the program printed, or how it failed.
        """
        return self._answer("python", code)


class NotebookEnvironment(_Environment):
    """The same with a tool `jupyter_code`: what the cells before defined is still there, because they run again."""

    def reset(self, **row: object) -> None:
        """Begin a rollout, with an empty notebook."""
        super().reset(**row)
        self._cells: list[str] = []

    def jupyter_code(self, code: str) -> str:
        """Run a cell of Python in a notebook and see what it prints. What the cells before it defined is still there.

        Args:
            code: The cell, as text.

        Returns:
            What the cell printed, or how it failed.
        """
        answer = self._answer("jupyter_code", code, self._cells)
        if self.statuses[-1] in {CallStatus.OK, CallStatus.ERROR}:
            self._cells.append(code)  # else it would meet its limit in each cell to come
        return answer


def unless_lost(reward: Callable[..., Any]) -> Callable[..., Any]:
    """The same reward function, asynchronous or not, with None for rollouts whose environment met a fault.

    TRL leaves a rollout out only if every reward of it is None, so that all reward functions need this.
    """

    def kept(rewards: Rewards, environments: Sequence[object] | None) -> Rewards:
        lost = [getattr(environment, "fault", None) is not None for environment in environments or ()]
        return (
            [None if is_lost else reward for is_lost, reward in zip(lost, rewards, strict=True)]
            if lost
            else rewards
        )

    @functools.wraps(reward)
    def score(**columns: Any) -> Rewards:
        return kept(reward(**columns), columns.get("environments"))

    @functools.wraps(reward)
    async def score_later(**columns: Any) -> Rewards:
        return kept(await reward(**columns), columns.get("environments"))

    return score_later if inspect.iscoroutinefunction(reward) else score


def math_reward(
    url: str = DEFAULT_URL, *, gold: str = "answer", **options: Unpack[ClientOptions]
) -> Callable[..., Any]:
    """A reward function: 1 where the answer in a rollout's last words is that of the dataset's column `gold`, else 0.

    None where that cannot be told, and for rollouts whose environment met a fault. What would be wrong with every
    answer, such as a missing key, raises its SandboxError, and so leaves `GRPOTrainer.train`.
    """

    async def math_reward(completions: Sequence[Completion], **columns: Any) -> Rewards:
        client = await client_of_loop(url, **options)

        async def score(completion: Completion, reference: object) -> float | None:
            task = MathTask(answer=_last_words(completion), gold=str(reference))
            try:
                grade = await grade_math(task, client.run)
            except _PASSING:
                return None
            return None if grade.correct is None else float(grade.correct)

        return await asyncio.gather(*map(score, completions, columns[gold]))

    return unless_lost(math_reward)


def _last_words(completion: Completion) -> str:
    """The text of a rollout's last turn; a model's own, never a tool's."""
    if isinstance(completion, str):
        return completion
    turns = [message for message in completion if message["role"] == "assistant"]
    content = turns[-1].get("content") if turns else None
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())
