"""Keys, and where a service may do without them."""

from __future__ import annotations

import hashlib
import re
import socket
import tomllib

import pytest

from sandbox.api_keys import new_key, refuse_open_door, stanza
from sandbox.errors import ConfigError
from sandbox.settings import GatewaySettings


def test_a_key_is_random_and_can_be_recognised() -> None:
    """Each is another, and all have the prefix and the length of 32 bytes."""
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"rsk_[A-Za-z0-9_-]{43}", key) for key in keys)


def test_a_stanza_has_the_digest_and_not_the_key() -> None:
    """It is TOML, and sha256sum of the key's text is what stands in it."""
    key = new_key()
    text = stanza(key, "team-a", ["run", "admin"])
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert tomllib.loads(text) == {
        "keys": [{"sha256": digest, "tenant": "team-a", "scopes": ["run", "admin"]}]
    }
    assert key not in text


def bound_to(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, dualstack_ipv6="ffff" in host)
    except (OSError, ValueError) as exc:
        if family is socket.AF_INET6:
            pytest.skip(f"this host has no IPv6: {exc}")
        raise


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost", "::1", "::ffff:127.0.0.1"])
def test_loopback_needs_no_keys(host: str) -> None:
    """However it is written, nobody else can reach it."""
    with bound_to(host) as listener:
        refuse_open_door(listener, GatewaySettings())


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "::ffff:0.0.0.0"])
def test_an_address_that_others_reach_needs_keys_or_a_word(host: str) -> None:
    """Without both it is refused, by the address that the socket has; with either it is not."""
    with bound_to(host) as listener:
        with pytest.raises(ConfigError, match="can be reached from other machines") as caught:
            refuse_open_door(listener, GatewaySettings())
        assert str(listener.getsockname()[1]) in caught.value.message
        refuse_open_door(listener, GatewaySettings(keys_file="keys.toml"))
        refuse_open_door(listener, GatewaySettings(insecure=True))
