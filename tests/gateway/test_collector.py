"""What the garbage collector does while very many requests stay open."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from sandbox.queue import QueuedCall

from .conftest import until
from .test_gone import WAYS, Bench, bench

__all__ = ["bench"]

# A process of its own, since what is frozen stays so. An object as a request holds them, two million times.
PROGRAM = """
import gc
from gateway.__main__ import spare_the_collector

spare_the_collector()
looked_at = []

def count(phase, info):
    if phase == "start":
        looked_at.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

gc.callbacks.append(count)
held = [[] for _ in range(2_000_000)]
print(len(looked_at), max(looked_at))
"""


def test_no_collection_looks_at_all_that_is_open() -> None:
    """However many objects stay, one collection looks at an eighth of what 25,000 requests hold, and there are few."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    collections, most = map(int, done.stdout.split())
    assert 0 < collections <= 40
    assert most <= 250_000


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The collector comes so seldom that memory must not wait for it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def held() -> bool:
    """Whether calls of a gateway are in memory."""
    return any(isinstance(each, QueuedCall) for each in gc.get_objects())


@WAYS
@pytest.mark.parametrize("code", ["echo", "fail", "late", "fault"])
async def test_nothing_of_a_request_is_left_after_its_answer(
    bench: Bench, no_collector: None, path: str, accept: str, code: str
) -> None:
    """Whatever came of it, its memory is free with the answer: of an error too, which knows where it was raised."""
    caller = await bench.call(path, accept, {"code": code})
    assert await caller.answer()
    await caller.hang_up()
    await until(lambda: not held())


@WAYS
async def test_nothing_of_a_request_is_left_when_its_caller_has_gone(
    bench: Bench, no_collector: None, path: str, accept: str
) -> None:
    """A call that nobody waits for any more never gets an answer, and is not held by what would tell of it."""
    caller = await bench.call(path, accept, {"id": "a", "code": "hold"})
    await bench.service.worker.has_seen(1)
    await caller.hang_up()
    assert await bench.queue.orders("echo")
    await until(lambda: not held())


async def test_nothing_is_left_of_callers_who_joined_for_less_time_and_have_gone(
    bench: Bench, no_collector: None
) -> None:
    """Who joins with an earlier deadline has an answer of its own, which does not hold what it waits for."""
    first = await bench.call("/v1/run", "application/json", {"id": "a", "code": "hold"})
    await bench.service.worker.has_seen(1)
    second = await bench.call("/v1/run", "application/json", {"id": "a", "code": "hold", "deadline_s": 5})
    await until(lambda: bench.held == 2)
    await first.hang_up()
    await second.hang_up()
    assert await bench.queue.orders("echo")
    await until(lambda: not held())
