"""What the process does for speed: its collector, its idle connections, its log."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from gateway.__main__ import _Server, server_config
from gateway.app import create_app
from gateway.connection import Connection
from sandbox.queue import CallQueue
from sandbox.settings import RedisSettings, Settings

from .conftest import until
from .test_process import stack


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """The collector as it was, for whoever comes after us."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@asynccontextmanager
async def server(redis: RedisSettings) -> AsyncIterator[_Server]:
    """The server of a gateway process, in this one."""
    app = create_app(Settings(redis=redis), CallQueue(redis))
    running = _Server(server_config(app, app.state.gateway))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(running.serve(sockets=[listener]))
        await until(lambda: running.started)
        yield running
        running.should_exit = True
        await task


async def test_the_collector_leaves_what_is_there_alone(redis_of_test: RedisSettings) -> None:
    """What the start has made is frozen, and ten thousand open requests do not start a collection each few calls."""
    gc.unfreeze()
    async with server(redis_of_test):
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[0] > 10_000


async def test_an_idle_connection_outlives_those_of_balancers(redis_of_test: RedisSettings) -> None:
    """Between two requests it stays open for more than the minute after which clients and balancers close theirs."""
    async with server(redis_of_test) as running:
        address = running.servers[0].sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        (connection,) = running.server_state.connections
        assert isinstance(connection, Connection)
        await until(lambda: connection.timeout_keep_alive_task is not None)
        assert connection.timeout_keep_alive_task is not None
        assert connection.timeout_keep_alive_task.when() - asyncio.get_running_loop().time() > 60
        writer.close()


async def test_requests_log_nothing(redis_url: str) -> None:
    """At the usual level the log of a gateway that serves stays silent, whatever is asked."""
    async with stack(redis_url, SANDBOX_LOG__LEVEL="info") as (running, http, _):
        before = len(running.said)
        lines = {"accept": "application/x-ndjson"}
        for calls in ({"calls": [{"code": "echo"}, {"cod": ""}]}, {"call": []}):
            await http.post("/v1/batch", json=calls)
            await http.post("/v1/batch", json=calls, headers=lines)
        for path in ("/v1/run", "/v1/jobs", "/v1/nothing"):
            await http.post(path, json={"code": "echo"})
        await http.get("/v1/status")
        running.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(running.wait_for, "asked to stop")
        assert running.said[before] == "asked to stop"
