"""Gateways that the tests of one file share, since a start takes as long as fifty requests.

A test that uses these belongs to the loop of its file: `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest_asyncio

from sandbox.settings import RedisSettings

from ..conftest import Serve, Service, bench


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def start(redis_url: str) -> AsyncIterator[Serve]:
    """Starts gateways on the echo worker of this file."""
    async with bench(RedisSettings(url=redis_url, namespace=uuid4().hex)) as start:
        yield start


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(start: Serve) -> Service:
    """A gateway with the settings that it has by default."""
    return await start()
