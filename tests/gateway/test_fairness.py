"""Tenants of one gateway on a real Redis: who comes late is served by weight, not by arrival, and may go meanwhile."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.line import CALLS_PER_SLOT
from gateway.replies import Reply
from gateway.tenants import Tenant
from sandbox.api_keys import new_key, stanza
from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.queue import CallQueue, Outcome
from sandbox.settings import RedisSettings, Settings

from .conftest import Serve, Service, opened, serving, until, working
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


@pytest.fixture
async def full(serve: Serve, tmp_path: Path) -> Service:
    """A gateway with keys, whose window is full of calls that go on until they are released."""
    keys_file = tmp_path / "keys.toml"
    keys_file.write_text(FILE)
    service = await serve(gateway={"keys_file": str(keys_file)})
    window = CALLS_PER_SLOT * service.worker.info().slots
    for number in range(window):
        service.gateway.submit(ToolCall(id=f"held-{number}", code="hold"), Tenant("flood"))
    await service.worker.has_seen(window)
    return service


async def test_a_call_that_is_held_back_leaves_with_its_caller(full: Service) -> None:
    """Nothing is left of it, though no other may leave: a caller who sends and goes again and again fills no memory."""
    gateway = full.gateway
    for _ in range(10):
        gateway.leave(gateway.submit(ToolCall(code="echo"), Tenant("flood")))
    assert len(gateway.line) == 0


async def test_a_job_that_is_held_back_is_answered_by_its_deadline(full: Service) -> None:
    """504, safe to send again, and it is not queued afterwards."""
    job = {"id": "a", "code": "echo", "deadline_s": 0.1}
    refused = await full.http.post("/v1/jobs", json=job, headers={"authorization": f"Bearer {FLOOD}"})
    assert (refused.status_code, refused.json()["error"]["name"]) == (504, "QueueTimeout")
    assert len(full.gateway.line) == 0


async def test_a_call_that_is_held_back_is_ended(full: Service) -> None:
    """DELETE ends it where it waits, in a batch of which the rest goes on, and no worker gets it."""
    headers = {"authorization": f"Bearer {OTHER}"}
    calls = {"calls": [{"id": name, "code": "echo"} for name in "ab"]}
    batch = asyncio.create_task(full.http.post("/v1/batch", json=calls, headers=headers))
    await until(lambda: len(full.gateway.line) == 2)
    ended = await full.http.delete("/v1/jobs/a", headers=headers)
    assert ended.json() == {"id": "a", "cancelled": True}
    full.worker.released.set()
    cancelled, result = (await batch).json()["results"]
    assert (cancelled["error"]["name"], result["status"]) == ("Cancelled", "ok")
    assert "a" not in [delivery.call.id for delivery in full.worker.seen]


async def test_a_fault_before_a_call_leaves_is_not_its_own(full: Service) -> None:
    """A caller that goes and comes back to be held back meets the fault of its first run, and gets the second's result."""
    gateway, worker = full.gateway, full.worker
    call, tenant = ToolCall(id="held-0", code="hold"), Tenant("flood")
    first = gateway.submit(call, tenant)  # the fixture's, joined
    for _ in range(2):
        gateway.leave(first)
    gateway.submit(ToolCall(code="hold"), Tenant("other"))
    again = gateway.submit(call, tenant)
    [delivery] = [delivery for delivery in worker.seen if delivery.call.id == call.id]
    fault = ToolResult(id=call.id, status=CallStatus.INTERNAL_ERROR, reason="the worker broke")
    assert await worker.queue.settle([Outcome(delivery, fault)]) == [True]
    await until(lambda: again.early is not None)
    worker.released.set()
    answer = await again.future
    assert isinstance(answer, Reply)
    assert answer.status is CallStatus.OK
