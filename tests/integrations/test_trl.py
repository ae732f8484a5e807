"""TRL's own trainer with our environments, tools and rewards: a real step each, on one thread."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # noqa: TID251 - before the packages below are imported
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # noqa: TID251

from openenv.core import GenericEnvClient

from sandbox import CallStatus, Unauthorized, Unavailable
from sandbox.integrations.trl import (
    NotebookEnvironment,
    PythonEnvironment,
    ServiceLost,
    math_reward,
    python_tool,
    unless_lost,
)

from .tiny import tool_call, train

ASK = (tool_call("python", code="print(6 * 7)"), "It is 42.")


class Seen:
    """A reward that notes what it is asked about: 1 for the first rollout, 0 for the second."""

    __name__ = "seen"

    def __init__(self) -> None:
        self.columns: dict[str, Any] = {}

    def __call__(self, **columns: Any) -> list[float]:
        self.columns = columns
        return [1.0, 0.0]

    def tool_answers(self) -> list[list[str]]:
        return [
            [message["content"] for message in completion if message["role"] == "tool"]
            for completion in self.columns["completions"]
        ]


def test_an_environment_runs_what_a_model_asks_for(url: str, tmp_path: Path) -> None:
    """The answer is in the conversation, and its status with the environment, for each rollout its own."""
    seen = Seen()
    trainer = train(ASK, tmp_path, [seen], environment_factory=partial(PythonEnvironment, url))
    assert [answer.splitlines()[1] for [answer] in seen.tool_answers()] == ["stdout: 42"] * 2
    environments = seen.columns["environments"]
    assert [environment.statuses for environment in environments] == [[CallStatus.OK]] * 2
    assert environments[0] is not environments[1]
    log = trainer.state.log_history[0]
    assert (log["tools/call_frequency"], log["tools/failure_frequency"]) == (1.0, 0.0)
    assert (log["reward"], log["rewards/seen/mean"]) == (0.5, 0.5)
    prompt = trainer.processing_class.apply_chat_template(
        seen.columns["prompts"][0], tools=trainer.tools, tokenize=False
    )
    assert '"name": "python"' in prompt
    assert '"description": "The Python program, as text."' in prompt


def test_a_notebook_keeps_what_cells_define(url: str, tmp_path: Path) -> None:
    """For the length of a rollout; a cell that fails leaves what it had defined."""
    seen = Seen()
    turns = (
        tool_call("jupyter_code", code="a = 6"),
        tool_call("jupyter_code", code="b = 7\n1 / 0"),
        tool_call("jupyter_code", code="a * b"),
        "42",
    )
    factory = partial(NotebookEnvironment, url)
    train(turns, tmp_path, [seen], environment_factory=factory)
    assert [answers[2].splitlines()[1] for answers in seen.tool_answers()] == ["stdout: 42"] * 2
    [first, _] = seen.columns["environments"]
    assert first.statuses == [CallStatus.OK, CallStatus.ERROR, CallStatus.OK]
    first.reset()
    assert "NameError" in first.jupyter_code("a")


def test_a_plain_tool_runs_what_a_model_asks_for(url: str, tmp_path: Path) -> None:
    """As any function does."""
    seen = Seen()
    train(ASK, tmp_path, [seen], tools=[python_tool(url)])
    assert [answer.splitlines()[1] for [answer] in seen.tool_answers()] == ["stdout: 42"] * 2


@pytest.mark.parametrize("wrong", [{"cod": "1"}, {"code": 1}])
def test_a_wrong_tool_call_is_the_models(url: str, tmp_path: Path, wrong: dict[str, object]) -> None:
    """TRL counts it as a failure of a tool, the model is told, and the rollout is scored."""
    seen = Seen()
    turns = (tool_call("python", **wrong), "I do not know.")
    trainer = train(turns, tmp_path, [unless_lost(seen)], environment_factory=partial(PythonEnvironment, url))
    assert all("error" in answer for [answer] in seen.tool_answers())
    log = trainer.state.log_history[0]
    assert (log["tools/failure_frequency"], log["reward"]) == (1.0, 0.5)


def test_a_fault_leaves_its_rollout_out(url: str, nobody: str, tmp_path: Path) -> None:
    """TRL neither scores it nor learns from it, and goes on."""
    urls: Iterator[str] = iter((url, nobody))
    seen = Seen()
    trainer = train(
        ASK,
        tmp_path,
        [unless_lost(seen), unless_lost(later)],
        environment_factory=lambda: PythonEnvironment(next(urls), attempts=1),
    )
    log = trainer.state.log_history[0]
    assert (log["rewards/seen/mean"], log["rewards/later/mean"], log["reward"]) == (1.0, 2.0, 3.0)
    kept, lost = seen.columns["environments"]
    assert kept.fault is None
    assert isinstance(lost.fault, Unavailable)
    assert list(trainer._logs["advantages"]) == [0.0, 0.0]
    lost.reset()
    assert lost.fault is None


async def later(completions: list[Any], **_: object) -> list[float]:
    """A reward of an event loop."""
    return [2.0] * len(completions)


def test_a_fault_of_a_plain_tool_ends_the_training(nobody: str, tmp_path: Path) -> None:
    """Nothing of it is shown to the model."""
    with pytest.raises(ServiceLost, match="Unavailable: "):
        train(ASK, tmp_path, [Seen()], tools=[python_tool(nobody, attempts=1)])


def test_what_would_end_any_rollout_ends_the_training(nobody: str) -> None:
    """A key that is missing, for one, is no loss of one rollout: the next does not begin."""
    environment = PythonEnvironment(nobody)
    environment.fault = Unauthorized("this needs an API key")
    with pytest.raises(Unauthorized):
        environment.reset(prompt=[], answer="42")


def test_after_a_fault_a_rollout_asks_for_nothing_more(url: str) -> None:
    """It counts no more in any case."""
    environment = PythonEnvironment(url)
    environment.reset()
    environment.fault = Unavailable("gone")
    with pytest.raises(Unavailable):
        environment.python("1")
    assert environment.statuses == []


def test_factories_can_be_sent_to_other_processes(url: str) -> None:
    """AsyncGRPOTrainer makes its environments in a process of its own."""
    environment = pickle.loads(pickle.dumps(partial(PythonEnvironment, url)))()
    environment.reset()
    assert "stdout: 3" in environment.python("1 + 2")


def test_answers_are_graded_as_mathematics(url: str, tmp_path: Path) -> None:
    """By what the model says last, not by what a tool has said."""
    turns = (tool_call("python", code="print(41)"), r"So it is \boxed{\frac{84}{2}}.")
    factory = partial(PythonEnvironment, url)
    trainer = train(turns, tmp_path, [math_reward(url)], environment_factory=factory)
    assert trainer.state.log_history[0]["rewards/math_reward/mean"] == 1.0


async def test_what_cannot_be_graded_has_no_reward(url: str, nobody: str) -> None:
    """Neither a reference that nobody can read nor a service that is away says that an answer is wrong."""
    replies = [
        [{"role": "assistant", "content": rf"\boxed{{{reply}}}"}] for reply in ("x+1", "x+2", "3", "4")
    ]
    answers = ["1+x", "1+x", r"\frac{", "4"]
    assert await math_reward(url)(completions=replies, answer=answers) == [1.0, 0.0, None, 1.0]
    away = math_reward(nobody, gold="gold", attempts=1)
    assert await away(completions=replies[:1], gold=answers[:1]) == [None]


async def test_the_last_words_are_the_models(url: str) -> None:
    """Also as text alone, in blocks, before a tool's answer, and where there are none."""
    words: list[Any] = [
        "42",
        [{"role": "assistant", "content": [{"type": "text", "text": "42"}]}],
        [{"role": "assistant", "content": "42"}, {"role": "tool", "content": "41"}],
        [{"role": "assistant", "content": None}],
        [],
    ]
    rewards = await math_reward(url)(completions=words, answer=["42"] * 5)
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0]


class OpenEnvPython:
    """An environment of TRL over a session of OpenEnv."""

    def __init__(self, url: str) -> None:
        self._session = GenericEnvClient(base_url=f"{url}/openenv").sync()

    def reset(self, **_row: object) -> None:
        """Begin an episode."""
        self._session.reset()

    def python(self, code: str) -> str:
        """Run a program.

        Args:
            code: The program.
        """
        step = self._session.step({"code": code})
        return str(step.metadata["text"])


def test_trl_trains_on_our_openenv_server(url: str, tmp_path: Path) -> None:
    """Two rollouts, each with a session of its own."""
    seen = Seen()
    train(ASK, tmp_path, [seen], environment_factory=partial(OpenEnvPython, url))
    assert [answer.splitlines()[1] for [answer] in seen.tool_answers()] == ["stdout: 42"] * 2
    states = [environment._session.state() for environment in seen.columns["environments"]]
    assert [state["step_count"] for state in states] == [1, 1]
