"""OpenEnv's own client against our server, generic and typed as that of coding_env."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openenv.core import GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient
from openenv.core.env_server.types import Action, Observation, SchemaResponse, State


class CodeAction(Action):
    """coding_env's."""

    code: str


class CodeObservation(Observation):
    """coding_env's; it has no other fields, and refuses them."""

    stdout: str = ""
    stderr: str = ""
    exit_code: int = 0


class CodeState(State):
    """coding_env's."""

    last_exit_code: int = 0


class CodingEnv(EnvClient[CodeAction, CodeObservation, CodeState]):
    """A client as that of coding_env."""

    def _step_payload(self, action: CodeAction) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[CodeObservation]:
        observation = CodeObservation(**payload["observation"])
        return StepResult(observation, payload.get("reward"), bool(payload.get("done", False)))

    def _parse_state(self, payload: dict[str, Any]) -> CodeState:
        return CodeState(**payload)


def test_a_typed_client_works_as_it_is(url: str) -> None:
    """Each observation is one of coding_env, and the state one of its."""
    with CodingEnv(base_url=f"{url}/openenv").sync() as env:
        assert env.reset(episode_id="e").observation == CodeObservation()
        assert env.step(CodeAction(code="print(6 * 7)\n'a'")).observation.stdout == "42\n'a'\n"
        failed = env.step(CodeAction(code="1 / 0")).observation
        assert (failed.exit_code, failed.metadata["status"]) == (1, "error")
        assert "ZeroDivisionError" in failed.stderr
        assert env.state() == CodeState(episode_id="e", step_count=2, last_exit_code=1)


def test_a_seed_makes_episodes_the_same(url: str) -> None:
    """For `random` and for hashes of text: two episodes of one seed draw the same, one of another does not."""
    with GenericEnvClient(base_url=f"{url}/openenv").sync() as env:
        drawn = []
        for seed in (1, 1, 2):
            env.reset(seed=seed)
            drawn.append(env.step({"code": "import random\nrandom.random()"}).observation["stdout"])
    assert drawn[0] == drawn[1] != drawn[2]


def test_an_error_is_raised(url: str) -> None:
    """And the session goes on."""
    with GenericEnvClient(base_url=f"{url}/openenv").sync() as env:
        with pytest.raises(RuntimeError, match=r"limits.*: 80000 is above .* \(code: VALIDATION_ERROR\)"):
            env.step({"code": "1", "timeout_s": 80_000})
        assert env.step({"code": "1"}).observation["stdout"] == "1\n"


async def test_hundreds_of_sessions_are_served_at_a_time(url: str) -> None:
    """Each by its own answers; a container of OpenEnv has one session unless told otherwise."""
    envs = [GenericEnvClient(base_url=f"{url}/openenv") for _ in range(200)]
    await asyncio.gather(*(env.connect() for env in envs))
    steps = await asyncio.gather(*(env.step({"code": str(number)}) for number, env in enumerate(envs)))
    assert [step.observation["stdout"] for step in steps] == [f"{number}\n" for number in range(200)]
    await asyncio.gather(*(env.close() for env in envs))


def test_the_schemas_are_read(url: str) -> None:
    """By OpenEnv's own model of them."""
    import httpx

    told = SchemaResponse(**httpx.get(f"{url}/openenv/schema").json())
    assert told.action["required"] == ["code"]
