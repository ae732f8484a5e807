"""Workers on two hosts, one of which is cut off under load and comes back.

The hosts are network namespaces, each with a line of its own to a third one, where Redis and the gateway are. A line
that is down swallows packets and says nothing, so both ends believe in their connections until they time out: Redis
goes on handing calls to the host that cannot hear it. That is why this takes a network and no signal does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import redis

from sandbox.redis_server import RedisServer

from .callers import Load, all_right
from .leftovers import in_redis, settled
from .processes import alive, family, until

LEASE_S = 3
SLOTS = 4
PASSWORD = "between hosts"
HOSTS = ("a", "b")
#: Where the middle listens on its line to each host; that end of the line has the next address.
ADDRESSES = {"a": "10.213.1.1", "b": "10.213.2.1"}


class Network:
    """A middle and two hosts, for one run of one test."""

    def __init__(self, stack: ExitStack) -> None:
        """Make the namespaces and the lines between them; they go with `stack`. Skips where that is not allowed."""
        self._stack = stack
        self._name = f"roc-{secrets.token_hex(4)}"
        self.directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        for host in ("middle", *HOSTS):
            self._make(host)
        for host, address in ADDRESSES.items():
            ends = (
                "netns",
                self._space("middle"),
                "type",
                "veth",
                "peer",
                "name",
                "line",
                "netns",
                self._space(host),
            )
            ip("link", "add", f"to-{host}", *ends)
            there = address.removesuffix("1") + "2"
            for space, line, own in (("middle", f"to-{host}", address), (host, "line", there)):
                ip("-netns", self._space(space), "address", "add", f"{own}/30", "dev", line)
                ip("-netns", self._space(space), "link", "set", line, "up")

    def _make(self, host: str) -> None:
        try:
            ip("netns", "add", self._space(host))
        except subprocess.CalledProcessError as exc:
            pytest.skip(f"no network namespace can be made here: {exc.stderr.strip()}")
        self._stack.callback(ip, "netns", "delete", self._space(host))
        ip("-netns", self._space(host), "link", "set", "lo", "up")

    def _space(self, host: str) -> str:
        return f"{self._name}-{host}"

    def start(
        self, host: str, command: Sequence[str | Path], fds: Sequence[int] = (), **variables: str
    ) -> int:
        """Run a program on a host until the end of the test; its process number."""
        log = self.directory / f"{host}-{Path(command[-1]).name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self._space(host)}", *command],
                env={**os.environ, "TMPDIR": str(self.directory), **variables},  # noqa: TID251
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=fds,
            )
        self._stack.callback(end, process)
        return process.pid

    @contextmanager
    def cut(self, host: str) -> Iterator[None]:
        """Take the line to a host down for the length of the block."""
        ip("-netns", self._space("middle"), "link", "set", f"to-{host}", "down")
        try:
            yield
        finally:
            ip("-netns", self._space("middle"), "link", "set", f"to-{host}", "up")


def ip(*words: str) -> None:
    """Run iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask a program to end, and kill it and what it has started when it does not."""
    started = family(process.pid)
    process.terminate()
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for left in started:
        if left.lives:
            with suppress(ProcessLookupError):
                os.kill(left.pid, signal.SIGKILL)


class Service:
    """A gateway and a Redis in the middle, and a worker on each host."""

    def __init__(self, network: Network, stack: ExitStack) -> None:
        self.workers: dict[str, int] = {}
        self.network = network
        self._socket = network.directory / "redis.sock"
        network.start("middle", self._redis())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))  # in our own network
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        python = [sys.executable, "-P", "-m"]
        address = f"redis://:{PASSWORD.replace(' ', '%20')}@{{}}:6379"
        command = [*python, "gateway", "--fd", str(listener.fileno())]
        network.start("middle", command, [listener.fileno()], REDIS_URL=address.format("127.0.0.1"))
        for host in HOSTS:
            variables = {"SANDBOX_WORKER__SLOTS": str(SLOTS), "SANDBOX_WORKER__LEASE_S": str(LEASE_S)}
            variables["REDIS_URL"] = address.format(ADDRESSES[host])
            self.workers[host] = network.start(host, [*python, "worker"], **variables)
        self._http = stack.enter_context(httpx.Client(base_url=self.url, timeout=20, trust_env=False))
        until(lambda: self.serving() == set(HOSTS), f"both workers: {self.tail()}")

    def _redis(self) -> list[str]:
        program = str(RedisServer.find().program)
        bound = ("--bind", "127.0.0.1", *ADDRESSES.values(), "--port", "6379", "--requirepass", PASSWORD)
        kept = ("--dir", str(self.network.directory), "--save", "", "--appendonly", "no")
        return [program, *bound, "--unixsocket", str(self._socket), *kept, "--maxmemory-policy", "noeviction"]

    def serving(self) -> set[str]:
        """The hosts whose worker the gateway knows."""
        try:
            told = self._http.get("/v1/status").json()
        except httpx.TransportError:  # it has not begun to listen
            return set()
        known = {worker["id"] for worker in told["workers"]}
        return {host for host, pid in self.workers.items() if any(f"-{pid}-" in id_ for id_ in known)}

    def hosts_of(self, load: Load) -> set[str]:
        """Where the calls of a load were run."""
        ran = {body["worker"] for attempt in load.oracle.attempts() for _, body in attempt.answers}
        return {host for host, pid in self.workers.items() if any(f"-{pid}-" in worker for worker in ran)}

    def programs(self, host: str) -> int:
        """How many programs run on a host."""
        return sum(process.command == "init" for process in family(self.workers[host]))

    def redis(self) -> redis.Redis:
        """A connection that goes through no network. Use it in a `with`."""
        return redis.Redis(
            unix_socket_path=str(self._socket), password=PASSWORD, protocol=2, socket_timeout=10
        )

    def tail(self) -> str:
        """The ends of all logs, for a failed test."""
        logs = sorted(self.network.directory.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs)


@pytest.fixture
def service() -> Iterator[Service]:
    """The whole of it, gone without a trace after the test."""
    if missing := [word for word in ("ip", "nsenter") if shutil.which(word) is None]:
        pytest.skip(f"{' and '.join(missing)} is missing (Debian: apt install iproute2 util-linux)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    with ExitStack() as stack:
        yield Service(Network(stack), stack)


def test_a_host_is_cut_off_and_comes_back(service: Service) -> None:
    """Its calls are answered by the other host, each once; what it has kept is dropped, and it serves again."""
    before = Load(service.url, "before", 60, seconds=0.2)
    all_right(before)
    assert service.hosts_of(before) == set(HOSTS)
    # These outlast the lease, so the host is still at them when they are no longer its own.
    load = Load(service.url, "held", 2 * SLOTS, seconds=3 * LEASE_S)
    until(lambda: service.programs("a") == service.programs("b") == SLOTS, "both hosts full")
    with service.network.cut("a"):
        # Redis hands some of these to a host that does not hear it.
        during = Load(service.url, "during", 60, seconds=0.2)
        until(lambda: service.serving() == {"b"}, "the silence of one")
        all_right(during)
        all_right(load)
        assert service.hosts_of(during) == service.hosts_of(load) == {"b"}
    until(lambda: service.serving() == set(HOSTS), f"both workers: {service.tail()}")
    until(lambda: service.programs("a") == 0, "the end of programs that others have answered")
    after = Load(service.url, "after", 60, seconds=0.2)
    for each in (before, load, during, after):
        all_right(each)
    assert service.hosts_of(after) == set(HOSTS)
    lives = {process.pid for process in alive()}
    assert lives >= set(service.workers.values())
    with service.redis() as client:
        assert settled(lambda: in_redis(client)) == []
