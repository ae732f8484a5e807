"""Judging in a real jail, past the service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from sandbox.calls import ToolCall, ToolResult
from sandbox.grading.judge import judge
from sandbox.grading.task import Judgement, JudgeRequest
from sandbox.settings import load_settings
from tests.sandbox.jail.box import Box

Judge = Callable[..., Judgement]


@pytest.fixture(scope="session")
def jail(_jail_runtime: None) -> Iterator[Box]:
    """One for all tests of graders."""
    with closing(Box(settings=load_settings().jail)) as box:
        yield box


@pytest.fixture
def judged(jail: Box) -> Judge:
    """Judges a task of these fields."""
    free = list(jail.slots.free)

    async def run(call: ToolCall) -> ToolResult:
        slot = free.pop()
        try:
            return await jail.jail.run(call, slot)
        finally:
            free.append(slot)

    def judge_task(**fields: Any) -> Judgement:
        return jail.do(judge(JudgeRequest.model_validate(fields).root, run))

    return judge_task
