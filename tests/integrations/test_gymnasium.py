"""The Gymnasium environment, by Gymnasium's own checker, wrappers and vectors."""

from __future__ import annotations

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from sandbox import Unavailable
from sandbox.integrations.gymnasium import SPEC, PythonEnv


def test_gymnasium_finds_nothing_wrong(url: str) -> None:
    """Its checker resets, samples and steps as any library may."""
    check_env(gymnasium.make(SPEC, url=url, task="Print a number.").unwrapped, skip_render_check=True)


def test_an_episode_is_a_task_and_what_programs_print(url: str) -> None:
    """The task is the first observation; a step shows a program's output, and its status is in the info."""
    env = gymnasium.make(SPEC, max_episode_steps=2, url=url)
    assert env.reset(options={"task": "What is 6 * 7?"}) == ("What is 6 * 7?", {})
    shown, reward, terminated, truncated, info = env.step("6 * 7")
    assert shown.startswith("Tool call success\nstdout: 42\n")
    assert (reward, terminated, truncated, info) == (0.0, False, False, {"status": "ok"})
    shown, _, _, truncated, info = env.step("1 / 0")
    assert "ZeroDivisionError" in shown
    assert (truncated, info) == (True, {"status": "error"})


def test_a_program_that_prints_the_answer_is_rewarded(url: str) -> None:
    """It ends the episode; another one does not, and what nobody can grade cuts it off."""
    env = gymnasium.make(SPEC, url=url, task="Simplify x + x.", gold="2x")
    env.reset()
    assert env.step("print('3*x')")[1:4] == (0.0, False, False)
    assert env.step("raise SystemExit('2*x')")[1:4] == (0.0, False, False)
    assert env.step("print('2*x')")[1:4] == (1.0, True, False)
    env.reset(options={"task": "Unknown.", "gold": r"\frac{"})
    _, reward, terminated, truncated, info = env.step("print(1)")
    assert (reward, terminated, truncated, info["unscored"]) == (0.0, False, True, "gold_unparsable")


@pytest.mark.parametrize("kind", [gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv])
def test_environments_form_vectors(url: str, kind: type[gymnasium.vector.VectorEnv]) -> None:
    """In one process, and in forks of one that has a client open: each answers its own action."""
    PythonEnv(url).step("1")
    kwargs = {} if kind is gymnasium.vector.SyncVectorEnv else {"shared_memory": False}
    envs = kind([lambda n=n: PythonEnv(url, task=f"task {n}") for n in range(3)], **kwargs)
    try:
        tasks, _ = envs.reset(seed=1)
        assert tuple(tasks) == ("task 0", "task 1", "task 2")
        shown, *_, info = envs.step(("print(0)", "print(1)", "1 / 0"))
        assert ["stdout: 0" in shown[0], "stdout: 1" in shown[1], "ZeroDivisionError" in shown[2]] == [
            True
        ] * 3
        assert list(info["status"]) == ["ok", "ok", "error"]
    finally:
        envs.close()


def test_a_fault_is_no_observation(nobody: str) -> None:
    """Where no service is the step raises."""
    env = PythonEnv(nobody, attempts=1)
    env.reset()
    with pytest.raises(Unavailable):
        env.step("1")
