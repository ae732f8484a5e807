"""How a process of ours reaches Redis: from a URL to two clients, each with a bounded pool of connections.

Commands wait for a free connection. A blocking read, of which a process has one or two, is refused.
"""

from __future__ import annotations

from typing import Any

from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sandbox.errors import ConfigError

#: Redis runs one command after the other, so more than a few connections only move the queue.
_MAX_CONNECTIONS = 8


def connect(url: str, command_timeout_s: float, read_timeout_s: float) -> tuple[Redis, Redis]:
    """One client for commands and one for blocking reads; neither connects before it is used.

    Raises ConfigError for a URL that leads nowhere.
    """
    options = _options(url)
    return (
        _client(BlockingConnectionPool, options, command_timeout_s, command_timeout_s),
        _client(ConnectionPool, options, read_timeout_s, command_timeout_s),
    )


def _options(url: str) -> dict[str, Any]:
    if not url:
        raise ConfigError(
            "there is no Redis to use: set REDIS_URL, or `url` below [redis] in the settings file"
        )
    try:
        return {**parse_url(url)}
    except ValueError as exc:
        raise ConfigError(f"REDIS_URL: {exc}") from exc


def _client(
    kind: type[ConnectionPool], options: dict[str, Any], timeout_s: float, connect_timeout_s: float
) -> Redis:
    # Ours come last, since a URL's query could set these too and break what the queue relies on.
    ours = {
        "max_connections": _MAX_CONNECTIONS,
        "protocol": 2,
        "decode_responses": False,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s,
    }
    client = Redis.from_pool(kind(**options | ours))
    client.response_callbacks.clear()  # answers come as Redis documents them
    return client
