"""How a process of ours reaches Redis: from a URL to clients, each with a bounded pool of connections.

    redis://[[user]:password@]host[:port][/database]
    rediss://  the same with TLS
    unix://[[user]:password@]/path/of/socket[?db=database]
    sentinel://[[user]:password@]host[:port],host[:port],.../service[/database]
    sentinels://  the same with TLS, to the sentinels and to Redis

User and password are Redis's; those of the sentinels are `sentinel_username` and `sentinel_password` in the query.
The other names of a query are redis-py's: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` and so on.

Nobody tells us of a failover. With sentinels every new connection asks them for the master first; so what must be
learned is that a connection leads to the wrong one. It breaks, or Redis refuses to write (`is_no_master`), or another
connection was told of another master. Then all connections end, and their successors ask. The two pools must not
part: a read from a master that was cut off would wait for ever for what is written elsewhere.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import hiredis
from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, ReadOnlyError, RedisError, ResponseError

from sandbox.errors import ConfigError, SandboxError

#: Redis runs one command after the other, so more than a few connections only move the queue.
_MAX_CONNECTIONS = 8

#: What the queue relies on. A URL's query may name these too, and is not heard.
_OURS: dict[str, Any] = {
    "max_connections": _MAX_CONNECTIONS,
    "protocol": 2,
    "decode_responses": False,
    "retry": Retry(NoBackoff(), 0),
    "retry_on_timeout": False,
}

#: What a query may hold. redis-py knows more, which are Python objects or would be ignored.
_OPTIONS = {
    *("username", "password", "db", "client_name", "socket_keepalive", "health_check_interval"),
    *("socket_timeout", "socket_connect_timeout", *_OURS),
}
_TLS_OPTIONS = {
    *("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_password"),
    *("ssl_cert_reqs", "ssl_check_hostname", "ssl_ciphers"),
}
_SENTINEL_OPTIONS = {"sentinel_username", "sentinel_password"}
_SCHEMES = {
    "redis": _OPTIONS,
    "rediss": _OPTIONS | _TLS_OPTIONS,
    "unix": _OPTIONS,
    "sentinel": _OPTIONS | _SENTINEL_OPTIONS,
    "sentinels": _OPTIONS | _SENTINEL_OPTIONS | _TLS_OPTIONS,
}


@dataclass(frozen=True, slots=True)
class Connections:
    """What one process has to Redis. Nothing is connected before it is used."""

    commands: Redis  # a command waits for a free connection
    reads: Redis  # a blocking read, of which a process has one or two, is refused
    sentinels: Sequence[Redis]

    async def close(self) -> None:
        """End all connections, also those in use. What is sent later makes new ones."""
        for client in (self.commands, self.reads, *self.sentinels):
            await client.aclose()


def connect(url: str, command_timeout_s: float) -> Connections:
    """What a URL describes. Raises ConfigError, with the remedy, for one that leads nowhere.

    How long an exchange may take is for who makes it to bound: redis-py's own bounds, one around each step, take a
    quarter of a round trip's CPU time, for before Python 3.12 they are a task each.
    """
    place = _parse(url)
    commands: Callable[..., ConnectionPool] = BlockingConnectionPool
    reads: Callable[..., ConnectionPool] = ConnectionPool
    # So that with all but one of them frozen, the last one is still asked while the command has time.
    sentinel_timeout_s = command_timeout_s / (len(place.sentinels) + 1)
    sentinels = [
        _client(BlockingConnectionPool, options, sentinel_timeout_s, sentinel_timeout_s)
        for options in place.sentinels
    ]
    if sentinels:
        asked = _Sentinels(sentinels)
        commands = partial(_BlockingSentinelPool, place.service, asked)
        reads = partial(SentinelConnectionPool, place.service, asked)
    connections = Connections(
        _client(commands, place.options, None, command_timeout_s),
        _client(reads, place.options, None, command_timeout_s),
        sentinels,
    )
    if sentinels:
        asked.pools = (connections.commands.connection_pool, connections.reads.connection_pool)
    _try_tls(connections.commands.connection_pool, place.options)
    return connections


def is_no_master(exc: BaseException) -> bool:
    """Whether Redis refused to write, as a replica or as a master whose replicas have left it."""
    return any(isinstance(link, ReadOnlyError) or str(link).startswith("NOREPLICAS") for link in _chain(exc))


def mistake(exc: BaseException) -> str:
    """What is wrong in the settings, with the remedy; empty when time may help."""
    for link in _chain(exc):
        match link:
            case _Refused():
                return str(link)
            case AuthenticationError():
                return f"Redis refuses us; check user and password: {link}"
            case NoPermissionError():
                return f"Redis's user lacks a right that README.md names: {link}"
            case ssl.SSLEOFError():  # it went away during the handshake
                return ""
            case ssl.SSLError():
                return f"no TLS with Redis; check ssl_ca_certs, ssl_certfile and ssl_keyfile in REDIS_URL: {link}"
    return ""


class _Refused(RedisError):
    """Every sentinel answered, and none will ever name the master."""


class _BlockingSentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """The master's connections, one of which can be waited for."""


class _Sentinels:
    """Whom pools ask for the master.

    redis-py's own asks the same question, but does not say why it got no answer, and knows one pool only.
    """

    def __init__(self, sentinels: Sequence[Redis]) -> None:
        self._sentinels = list(sentinels)
        self._master = ("", 0)
        self.pools: Sequence[ConnectionPool] = ()

    async def discover_master(self, service: str) -> tuple[str, int]:
        """Host and port of the master, as the first sentinel has it that knows one which is up.

        It is asked first the next time, so that one which is dead or frozen costs a timeout once.
        """
        told: list[str] = []
        refusals = 0
        for sentinel in tuple(self._sentinels):
            where = sentinel.connection_pool.connection_kwargs
            try:
                state = await _state(sentinel, service)
            except (RedisError, OSError, RuntimeError, AttributeError) as exc:  # as in _redis.py
                refusals += isinstance(exc, ResponseError) or mistake(exc) != ""
                told.append(f"{where['host']}:{where['port']}: {exc}")
                continue
            if not {b"s_down", b"o_down"}.intersection(state[b"flags"].split(b",")):
                self._sentinels.remove(sentinel)
                self._sentinels.insert(0, sentinel)
                return await self._remember((state[b"ip"].decode(), int(state[b"port"])))
            told.append(f"{where['host']}:{where['port']}: it is down")
        if refusals == len(self._sentinels):
            raise _Refused(
                f"no sentinel names us a master {service!r}; check the service in REDIS_URL, sentinel_username and "
                f"sentinel_password: {'; '.join(told)}"
            )
        raise MasterNotFoundError(f"no sentinel knows a master {service!r} that is up: {'; '.join(told)}")

    async def _remember(self, master: tuple[str, int]) -> tuple[str, int]:
        if master != self._master:
            self._master = master
            for pool in self.pools:
                await pool.disconnect()
        return master


async def _state(sentinel: Redis, service: str) -> dict[bytes, bytes]:
    ask: Callable[..., Awaitable[list[bytes]]] = sentinel.execute_command
    flat = await ask("SENTINEL", "MASTER", service)
    return dict(zip(flat[::2], flat[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a URL leads, in redis-py's options: to a server, or to a service by way of its sentinels."""

    options: dict[str, Any]
    service: str = ""
    sentinels: Sequence[dict[str, Any]] = ()


def _parse(url: str) -> _Place:
    if not url:
        raise ConfigError(
            "there is no Redis to use: set REDIS_URL, or `url` below [redis] in the settings file"
        )
    try:
        parts = urlsplit(url)
        if parts.scheme not in _SCHEMES:
            raise ConfigError(f"REDIS_URL must begin with one of {', '.join(f'{s}://' for s in _SCHEMES)}")
        if parts.fragment:
            raise ConfigError("REDIS_URL holds a #; write %23 for it")
        for name, _ in parse_qsl(parts.query, keep_blank_values=True):
            _check_option(parts.scheme, name)
        if parts.scheme.startswith("sentinel"):
            return _parse_sentinel(parts.scheme, parts.netloc, parts.path, parts.query)
        if parts.scheme == "unix" and not parts.path:
            raise ConfigError("REDIS_URL names no socket: unix:///path/of/socket has three slashes")
        if parts.scheme != "unix":
            _check_database(parts.path.strip("/"))
        return _Place({**parse_url(url)})
    except ValueError:
        # Its own text may quote a part of the password.
        raise ConfigError(
            "REDIS_URL is not understood: a port or an option is no number, or user or password hold a character "
            "that must be percent-encoded (/ is %2F, ? is %3F, @ is %40)"
        ) from None


def _parse_sentinel(scheme: str, netloc: str, path: str, query: str) -> _Place:
    user, at, hosts = netloc.rpartition("@")
    service, _, database = path.strip("/").partition("/")
    places = [urlsplit(f"//{host.strip()}") for host in hosts.split(",")]
    if not service or not all(place.hostname for place in places):
        raise ConfigError(
            f"REDIS_URL lacks a sentinel or the service: {scheme}://host1:26379,host2:26379/SERVICE"
        )
    _check_database(database)
    server = "rediss" if scheme == "sentinels" else "redis"
    options: dict[str, Any] = {**parse_url(f"{server}://{user}{at}/{database}?{query}")}
    username, password = options.pop("sentinel_username", None), options.pop("sentinel_password", None)
    common = {name: value for name, value in options.items() if name not in {"username", "password", "db"}}
    kind = SentinelManagedSSLConnection if server == "rediss" else SentinelManagedConnection
    return _Place(
        options | {"connection_class": kind},
        unquote(service),
        [
            common | {"host": place.hostname, "port": place.port or 26379, "username": username, "password": password}
            for place in places
        ],
    )  # fmt: skip


def _check_option(scheme: str, name: str) -> None:
    if name in _TLS_OPTIONS - _SCHEMES[scheme]:
        raise ConfigError(f"REDIS_URL: {name} needs TLS, which is {scheme}s://")
    if name not in _SCHEMES[scheme]:
        known = ", ".join(sorted(_SCHEMES[scheme] - _OURS.keys()))
        raise ConfigError(f"REDIS_URL: {name} is no option of {scheme}://, which has {known}")


def _check_database(text: str) -> None:
    if text and not text.isdecimal():
        raise ConfigError("REDIS_URL: the database must be a number, and a / in a password must be %2F")


class _PacksInC:
    """A connection that writes commands by hiredis, as redis-py does on connections that are not asyncio's.

    Its own way takes 6 µs of a call's 11 in `CallQueue.put`.
    """

    def pack_command(self, name: str, *args: str | bytes | int) -> list[bytes]:
        """A command as Redis reads it. Some of redis-py's own have two words in their name."""
        return [hiredis.pack_command((*name.split(), *args))]  # type: ignore[arg-type]  # any length will do


def _client(
    kind: Callable[..., ConnectionPool],
    options: dict[str, Any],
    timeout_s: float | None,
    connect_timeout_s: float,
) -> Redis:
    timeouts = {"socket_timeout": timeout_s, "socket_connect_timeout": connect_timeout_s}
    connection = options.get("connection_class", Connection)
    packing = {"connection_class": type(connection.__name__, (_PacksInC, connection), {})}
    client = Redis.from_pool(kind(**options | _OURS | timeouts | packing))
    client.response_callbacks.clear()  # answers come as Redis documents them
    return client


def _try_tls(pool: ConnectionPool, options: dict[str, Any]) -> None:
    """Load the certificates now: a file that is not there would look like a Redis that is away."""
    try:
        make: Callable[[], Any] = pool.make_connection
        connection = make()
        if isinstance(connection, SSLConnection):
            connection.ssl_context.get()
    except (RedisError, OSError, ValueError, TypeError) as exc:
        told = ", ".join(
            f"{name}={options[name]}" for name in sorted(_TLS_OPTIONS - {"ssl_password"}) if name in options
        )
        raise ConfigError(f"REDIS_URL: these do not work for TLS: {told}: {exc}") from exc


def _chain(exc: BaseException) -> Iterator[BaseException]:
    """The exception and what led to it. redis-py names no cause, so its contexts count, but none of our callers'."""
    yield exc
    link = exc.__cause__ or exc.__context__
    while link is not None and not isinstance(link, SandboxError):
        yield link
        link = link.__cause__ or link.__context__
