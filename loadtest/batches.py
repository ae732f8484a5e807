"""Batches for the graders, a few at a time, and what they cost the service: shared by `grading.py` and `judging.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from loadtest.processes import used_by
from loadtest.stack import Stack

_BATCHES_AT_ONCE = 4


async def send_all(
    stack: Stack, path: str, batches: Iterator[Sequence[Any]], look: Callable[[list[dict[str, Any]]], None]
) -> tuple[float, dict[str, float]]:
    """Post each batch, and look at its results; the seconds that all took, and the CPU seconds of each part.

    Raises httpx.HTTPError, and what `look` raises.
    """
    before = used_by(stack.pid)
    start = time.perf_counter()
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=600, trust_env=False) as http,
        asyncio.TaskGroup() as group,
    ):

        async def send() -> None:
            for items in batches:
                answer = await http.post(path, json={"items": [*items]})
                look(answer.raise_for_status().json()["results"])

        for _ in range(_BATCHES_AT_ONCE):
            group.create_task(send())
    seconds = time.perf_counter() - start
    return seconds, {part: use.cpu_s - before[part].cpu_s for part, use in used_by(stack.pid).items()}
