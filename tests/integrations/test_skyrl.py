"""The SkyRL environment, made and stepped as SkyRL's generator does it: by name, and in threads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import skyrl_gym
from skyrl_gym.envs.registration import deregister

from sandbox import Unavailable

PROMPT = [{"role": "user", "content": "What is 6 * 7?"}]


def asked(code: str, name: str = "python") -> str:
    """A turn with a tool call, as Qwen models write it."""
    return (
        f"Let me see.\n<tool_call>\n{json.dumps({'name': name, 'arguments': {'code': code}})}\n</tool_call>"
    )


@contextmanager
def registered_at(url: str, **options: object) -> Iterator[str]:
    """The environment under a name of ours."""
    entry = "sandbox.integrations.skyrl:PythonEnv"
    skyrl_gym.register(id="python", entry_point=entry, kwargs={"url": url, **options})
    yield "python"
    deregister("python")


@pytest.fixture
def registered(url: str) -> Iterator[str]:
    """It, for the service."""
    with registered_at(url) as name:
        yield name


def make(name: str, **extras: Any) -> skyrl_gym.Env:
    """What the generator does, with the extras that it gives."""
    return skyrl_gym.make(name, env_config={}, extras={"max_turns": 3, **extras})


def test_an_episode_goes_from_calls_to_an_answer(registered: str) -> None:
    """A turn with a call is answered in the user's place; a turn without one ends the episode."""
    env = make(registered)
    assert env.init(PROMPT) == (PROMPT, {})
    step = env.step(asked("print(6 * 7)"))
    [message] = step["observations"]
    assert message["role"] == "user"
    assert message["content"].startswith("<tool_response>\nTool call success\nstdout: 42\n")
    assert message["content"].endswith("s\n</tool_response>")
    assert not step["done"]
    step = env.step("It is 42.")
    assert (step["observations"], step["done"]) == ([], True)
    assert env.get_metrics() == {"tool_calls": 1, "tool_calls_failed": 0, "unscored": 0}


def test_each_call_of_a_turn_has_its_answer(registered: str) -> None:
    """Several calls are answered in their order; one whose end was the stop text counts too."""
    env = make(registered)
    turn = asked("print('one')") + asked("print('two')").removesuffix("</tool_call>")
    [message] = env.step(turn)["observations"]
    first, second = message["content"].split("</tool_response>\n<tool_response>")
    assert "stdout: one" in first
    assert "stdout: two" in second


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ("<tool_call>{not json}</tool_call>", "reason: the tool call cannot be read"),
        ('<tool_call>{"name": "python"}</tool_call>', "reason: the tool call cannot be read: arguments"),
        (asked("1", "shell"), "no tool named 'shell'"),
        (asked("1 / 0"), "ZeroDivisionError"),
    ],
)
def test_a_model_is_told_of_its_mistakes(registered: str, turn: str, told: str) -> None:
    """What it called wrongly, and a program that fails, are observations, and are counted."""
    env = make(registered)
    [message] = env.step(turn)["observations"]
    assert told in message["content"]
    assert env.get_metrics() == {"tool_calls": 1, "tool_calls_failed": 1, "unscored": 0}


def test_the_last_turn_ends_whatever_it_asks(registered: str) -> None:
    """Its calls are not run: nobody would see what comes of them."""
    env = make(registered, max_turns=1)
    step = env.step(asked("print(1)"))
    assert (step["observations"], step["done"]) == ([], True)
    assert env.get_metrics()["tool_calls"] == 0


@pytest.mark.parametrize(
    ("gold", "reward", "unscored"), [("0.5", 1.0, 0), ("2", 0.0, 0), (r"\frac{", 0.0, 1), (None, 0.0, 0)]
)
def test_the_last_turn_is_graded(registered: str, gold: str | None, reward: float, unscored: int) -> None:
    """A right answer is 1; what nobody can grade is counted apart; without a reference there is no reward."""
    env = make(registered, **({} if gold is None else {"reward_spec": {"ground_truth": gold}}))
    step = env.step(r"It is \boxed{\frac{1}{2}}.")
    assert (step["reward"], step["done"]) == (reward, True)
    assert env.get_metrics()["unscored"] == unscored


def test_threads_step_at_once(registered: str) -> None:
    """The generator's 32 threads: each episode sees its own output."""
    envs = [make(registered) for _ in range(64)]
    with ThreadPoolExecutor(32) as threads:
        steps = list(threads.map(lambda n: envs[n].step(asked(f"print({n})")), range(64)))
    shown = [step["observations"][0]["content"] for step in steps]
    assert all(f"stdout: {n}\n" in content for n, content in enumerate(shown))


def test_a_fault_is_no_observation(nobody: str) -> None:
    """Where no service is the step raises; a model is never told of it."""
    with registered_at(nobody, attempts=1) as name, pytest.raises(Unavailable):
        make(name).step(asked("1"))
