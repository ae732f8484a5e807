"""The queue as a gateway and other workers have it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandbox.queue import CallQueue


@pytest.fixture
async def queue(any_redis) -> AsyncIterator[CallQueue]:
    """An open queue on a fresh Redis."""
    queue = CallQueue(any_redis.settings)
    await queue.open()
    yield queue
    await queue.close()
