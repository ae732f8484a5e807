"""Two tenants of one gateway on a real Redis: who comes late is served by weight, not by arrival."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gateway.line import CALLS_PER_SLOT
from sandbox.api_keys import new_key, stanza
from sandbox.queue import CallQueue
from sandbox.settings import RedisSettings, Settings

from .conftest import opened, serving, until, working
from .echo_worker import EchoWorker

FLOOD, OTHER = new_key(), new_key()
FILE = f"""
{stanza(FLOOD, "flood", ["run"])}
{stanza(OTHER, "other", ["run"])}
[tenants.flood]
weight = 3
"""
CALLS = 1000


async def test_a_flood_leaves_others_their_share(tmp_path: Path, redis_of_test: RedisSettings) -> None:
    """A thousand calls of one tenant lie ahead; another one's hundred are served one for each three of them."""
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(FILE)
    settings = Settings.model_validate({"gateway": {"keys_file": str(keys_file)}})
    async with (
        opened(redis_of_test) as looking,
        serving(settings, CallQueue(redis_of_test)) as (gateway, http),
    ):
        worker = EchoWorker(looking)
        await looking.announce(worker.info(), ttl_s=60)  # it lives, and takes nothing yet
        await until(lambda: gateway.readiness.obstacle() is None)

        async def batch(name: str, key: str, calls: int) -> Any:
            body = {"calls": [{"id": f"{name}-{number}", "code": "echo"} for number in range(calls)]}
            headers = {"authorization": f"Bearer {key}"}
            return (await http.post("/v1/batch", json=body, headers=headers)).json()["results"]

        window = CALLS_PER_SLOT * worker.info().slots
        flood = asyncio.create_task(batch("flood", FLOOD, CALLS))
        await until(lambda: len(gateway.line) == CALLS - window)
        other = asyncio.create_task(batch("other", OTHER, 100))
        await until(lambda: len(gateway.line) == CALLS - window + 100)
        async with working(CallQueue(redis_of_test)) as echo:
            assert {answer["status"] for answer in await flood + await other} == {"ok"}
        served = [delivery.call.id.partition("-")[0] for delivery in echo.seen]
    assert served[:window] == ["flood"] * window
    shared = served[window : window + 400]
    assert all(shared[first : first + 4].count("other") == 1 for first in range(len(shared) - 3))
