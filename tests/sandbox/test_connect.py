"""How a link reaches Redis: what a URL may say, and what becomes of a link when the way or the server changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox._redis import RedisLink
from sandbox.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://:secret@cache.example:6380/3",
        "redis://user:p%40ss@[::1]:6380",
        "rediss://cache.example?ssl_cert_reqs=none&ssl_min_version=771",
        "unix://user:secret@/run/redis.sock?db=1",
        "sentinel://one/main",
        "sentinel://user:secret@one:26379,two:26380,[::1]:26381/main/2?sentinel_password=other",
        "sentinels://one,two/main?ssl_check_hostname=no",
        "redis://cache?socket_timeout=1&retry_on_timeout=yes&protocol=3",
    ],
)
def test_a_url_that_leads_somewhere(url: str) -> None:
    """Every scheme is taken with what it may carry, and nothing is connected for it."""
    RedisLink(url)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:6379", "must begin with one of redis://, rediss://, unix://, sentinel://, sentinels://"),
        ("redis://cache:many", "a port or an option is no number"),
        ("redis://user:pa/ss@cache", "a / in a password must be %2F"),
        ("redis://user:pa#ss@cache", "write %23"),
        ("redis://cache/first", "database must be a number"),
        ("redis://cache?db=first", "an option is no number"),
        ("redis://cache?ssl_ca_certs=/ca.pem", "ssl_ca_certs needs TLS, which is rediss://"),
        ("sentinel://one/main?ssl_ca_certs=/ca.pem", "ssl_ca_certs needs TLS, which is sentinels://"),
        ("rediss://cache?ssl_ca_cert=/ca.pem", "ssl_ca_cert is no option of rediss://, which has .*ssl_ca_certs"),
        ("redis://cache?ssl=yes", "ssl is no option of redis://"),
        ("redis://cache?sentinel_password=secret", "sentinel_password is no option of redis://"),
        ("redis://cache?connection_class=Redis", "connection_class is no option"),
        ("rediss://cache?ssl_cert_reqs=requird", "ssl_cert_reqs=requird: Invalid SSL Certificate Requirements"),
        ("rediss://cache?ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs=/nowhere/ca.pem: .*No such file"),
        ("rediss://cache?ssl_certfile=/nowhere/us.pem", "ssl_certfile=/nowhere/us.pem: .*No such file"),
        ("rediss://cache?ssl_ciphers=good", "ssl_ciphers=good: .*cipher"),
        ("sentinels://one/main?ssl_ca_certs=/nowhere/ca.pem", "ssl_ca_certs=/nowhere/ca.pem: .*No such file"),
        ("unix://redis.sock", "unix:///path/of/socket has three slashes"),
        ("sentinel://one:26379", r"sentinel or the service: sentinel://host1:26379,host2:26379/SERVICE"),
        ("sentinel://one,,two/main", "sentinel or the service"),
        ("sentinel:///main", "sentinel or the service"),
        ("sentinels://one", "sentinels://host1:26379,host2:26379/SERVICE"),
        ("sentinel://one:many/main", "a port or an option is no number"),
        ("sentinel://one/main/first", "database must be a number"),
    ],
)  # fmt: skip
def test_a_url_that_leads_nowhere_stops_the_start(url: str, words: str) -> None:
    """It is refused before anything is connected, with the remedy and without the password."""
    with pytest.raises(ConfigError, match=words) as caught:
        RedisLink(url)
    assert "secret" not in caught.value.message
    assert "ss@" not in caught.value.message


def test_a_certificate_that_is_none_stops_the_start(tmp_path: Path) -> None:
    """A file that holds something else is named."""
    path = tmp_path / "ca.pem"
    path.write_text("hello")
    with pytest.raises(ConfigError, match=rf"ssl_ca_certs={path}: "):
        RedisLink(f"rediss://cache?ssl_ca_certs={path}")
