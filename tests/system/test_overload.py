"""Ten times the calls that the service can run: it stays as large as it may become, answers everybody, and recovers.

The load is an open loop: calls come at their own pace, whatever becomes of those before them. Each carries input, so
that the whole flood would be far larger than the bounds that are tried.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from .leftovers import in_redis, settled
from .processes import until
from .stack import Stack, stack

KIB, MIB = 1024, 1024 * 1024

#: What the service can do: two slots, and calls that keep one busy for this long, whatever else the machine does.
SLOTS, CALL_S = 2, 0.5
PER_SECOND = 10 * SLOTS / CALL_S
CALLS = 300
INPUT_BYTES = 200 * KIB
#: What Redis may use in the flood that is to fill it; empty it uses one or two.
SMALL_REDIS = 12 * MIB
#: What it may use beyond its bound, for commands that it is reading.
READING = 4 * MIB


async def flood(url: str) -> list[httpx.Response]:
    """Send the calls, every tenth of them in a hurry, and wait for every answer."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits, trust_env=False) as http:

        async def send(number: int) -> httpx.Response:
            await asyncio.sleep(begun_at + number / PER_SECOND - loop.time())
            call = {
                "id": f"flood-{number}",
                "code": f"import time; time.sleep({CALL_S}); print({number})",
                "stdin": "x" * INPUT_BYTES,
                "deadline_s": 1 if number % 10 == 0 else 30,
            }
            return await http.post("/v1/run", json=call)

        return await asyncio.gather(*map(send, range(CALLS)))


def peak_bytes(pid: int) -> int:
    """The most memory that a process ever had."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * KIB
    raise AssertionError(f"{pid} has no memory")


def shed(service: Stack) -> dict[str, float]:
    """How many calls were refused, by reason."""
    lines = service.http.get("/metrics").text.splitlines()
    name = 'sandbox_gateway_shed_calls_total{reason="'
    found = (line.removeprefix(name).split('"} ') for line in lines if line.startswith(name))
    return {reason: float(number) for reason, number in found}


def counted(answers: list[httpx.Response]) -> Counter[int]:
    """How many of each status; each answer must say what its status promises."""
    for number, answer in enumerate(answers):
        body: dict[str, Any] = answer.json()
        match answer.status_code:
            case 200:
                assert (body["status"], body["stdout"]) == ("ok", f"{number}\n")
            case 429 | 503:
                assert 1 <= int(answer.headers["retry-after"]) <= 60
                assert body["error"]["message"]
            case 504:
                assert number % 10 == 0, "none but the hurried may be taken and then be late"
            case other:
                raise AssertionError(f"{other}: {body}")
    return Counter(answer.status_code for answer in answers)


@dataclass
class Bounds:
    """A service with small bounds, by which of them a flood is to be refused, and how large it may become."""

    service: Stack
    reason: str
    redis_bytes: int
    gateway_calls: int


@pytest.fixture(params=["calls", "memory"])
def bounds(request: pytest.FixtureRequest) -> Iterator[Bounds]:
    """Bounded in calls, here and in Redis; or by the memory of Redis alone."""
    options = ("--workers", "1", "--slots", str(SLOTS))
    if request.param == "calls":
        variables = {"SANDBOX_GATEWAY__MAX_IN_FLIGHT": "40", "SANDBOX_GATEWAY__MAX_BACKLOG": "20"}
        with stack(*options, **variables) as running:
            yield Bounds(running, "backlog", 20 * MIB, 40)
    else:
        with stack(*options) as running:
            with running.redis_client() as client:
                client.config_set("maxmemory", SMALL_REDIS)
            yield Bounds(running, "redis_full", SMALL_REDIS + READING, SMALL_REDIS // INPUT_BYTES)


def test_ten_times_too_many_calls(bounds: Bounds) -> None:
    """Gateway and Redis keep to their bounds, every call is answered, and then the next one is served as ever."""
    service = bounds.service
    until(service.is_ready, "the service")
    assert service.run("print(1)", stdin="x" * INPUT_BYTES).status_code == 200
    [gateway] = service.gateways
    before = peak_bytes(gateway)
    statuses = counted(asyncio.run(flood(service.url)))
    assert 0 < statuses[200] < CALLS / 2, f"it was no flood, or served nobody: {statuses}"
    assert {bounds.reason, "late"} <= shed(service).keys(), statuses
    # A call is held as the bytes that came, as the call that was read from them, and as what is sent to Redis.
    assert peak_bytes(gateway) - before < 4 * bounds.gateway_calls * INPUT_BYTES
    with service.redis_client() as client:
        peak: Any = client.info("memory")["used_memory_peak"]
        assert peak < bounds.redis_bytes
        until(service.is_ready, "room")
        assert service.run("print(2)").json()["stdout"] == "2\n"
        assert settled(lambda: in_redis(client)) == []
