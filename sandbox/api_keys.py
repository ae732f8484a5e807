"""API keys: what they look like, how they are written down, and where a gateway may do without them.

A key is 32 random bytes behind a prefix that scanners for lost secrets can look for. Whoever has it shows it
with each request; the service knows its SHA-256 only. A plain hash will do: what is random for 256 bits cannot
be guessed from it, and needs no salt.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from hashlib import sha256
from secrets import token_urlsafe
from typing import Annotated, Literal

from pydantic import StringConstraints

from sandbox.errors import ConfigError
from sandbox.settings import API_KEY, GatewaySettings

TENANT_PATTERN = r"^[a-z0-9_-]{1,64}$"
TenantName = Annotated[str, StringConstraints(pattern=TENANT_PATTERN)]

#: `run` sends calls and asks after them; `admin` reads metrics and dead letters. Neither holds the other.
Scope = Literal["run", "admin"]


def key_of_caller() -> str | None:
    """The key of whoever runs a command. No option has it, because every user of a machine sees its command lines."""
    return os.environ.get(API_KEY) or None  # noqa: TID251 - a command line


def new_key() -> str:
    """A key that nobody has."""
    return f"rsk_{token_urlsafe(32)}"


def digest_of(key: bytes) -> bytes:
    """What a service knows of a key."""
    return sha256(key).digest()


def stanza(key: str, tenant: str, scopes: Iterable[Scope]) -> str:
    """The lines of a keys file that let a key in; they do not have it in them."""
    listed = ", ".join(f'"{scope}"' for scope in scopes)
    return f'[[keys]]\nsha256 = "{digest_of(key.encode()).hex()}"\ntenant = "{tenant}"\nscopes = [{listed}]\n'


def refuse_open_door(listener: socket.socket, gateway: GatewaySettings) -> None:
    """Raise ConfigError for a socket that other machines can reach, where nobody needs a key.

    It asks the socket itself: a host name, `::` or what a parent has bound says less than that.
    """
    host, port = listener.getsockname()[:2]
    if gateway.keys_file or gateway.insecure or _is_loopback(host):
        return
    raise ConfigError(
        f"{host} port {port} can be reached from other machines, and there are no API keys. Either name a file of "
        "keys by gateway.keys_file (SANDBOX_GATEWAY__KEYS_FILE; `sandbox keys new` makes one), or, where everybody "
        "who reaches it may run programs, say `sandbox up --insecure` (SANDBOX_GATEWAY__INSECURE=true)"
    )


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
