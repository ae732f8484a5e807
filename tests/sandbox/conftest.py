"""Queues for tests, each as another process would open it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from sandbox.queue import CallQueue


@pytest.fixture
async def open_queue(redis_server) -> AsyncIterator[Callable[[], Any]]:
    """Opens queues as other processes would, and closes them after the test."""
    queues: list[CallQueue] = []

    async def open_one() -> CallQueue:
        queue = CallQueue(redis_server.settings)
        queues.append(queue)
        await queue.open()
        return queue

    yield open_one
    for queue in queues:
        await queue.close()


@pytest.fixture
async def queue(open_queue) -> CallQueue:
    """An open queue on a fresh Redis."""
    return await open_queue()
