"""`python -m gateway` as a process of its own, on a real Redis, with an echo worker in another process."""

from __future__ import annotations

import asyncio
import copy
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from gateway.app import create_app
from gateway.openapi import add_keys
from gateway.tenants import scope_of
from sandbox._redis import _READ_TIMEOUT_S
from sandbox.api_keys import new_key, stanza
from sandbox.queue import CallQueue
from sandbox.redis_server import RedisServer
from sandbox.settings import GatewaySettings, RedisSettings, Settings

from .conftest import start_redis, working

HERE = Path(__file__).parent
BOUNDS = GatewaySettings(max_body_bytes=65_536, max_in_flight=8, max_batch=8)
DESCRIPTION = create_app(Settings(gateway=BOUNDS), CallQueue(RedisSettings(url="unix:///nowhere"))).openapi()
# The most that a task may have is a thousand calls, and the most is tried of everything.
DESCRIPTION["components"]["schemas"]["CaseTask"]["properties"]["cases"]["maxItems"] = 5
API = schemathesis.openapi.from_dict(DESCRIPTION)
WITH_KEYS = copy.deepcopy(DESCRIPTION)
add_keys(WITH_KEYS)
API_WITH_KEYS = schemathesis.openapi.from_dict(WITH_KEYS)


class Process:
    """A running gateway: where it listens and what it logs."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self.events.append(json.loads(line) if line.startswith("{") else {"event": line.rstrip()})
                self._changed.notify_all()
        with self._changed:
            self.events.append({"event": "end of log"})
            self._changed.notify_all()

    def wait_for(self, event: str) -> dict[str, Any]:
        """The first log line of this event."""
        with self._changed:
            assert self._changed.wait_for(lambda: event in self.said or "end of log" in self.said, 30), event
            found = [line for line in self.events if line["event"] == event]
        assert found, f"{event!r} was not logged: {self.events}"
        return found[0]

    @property
    def said(self) -> list[str]:
        return [line["event"] for line in self.events]

    @property
    def url(self) -> str:
        return str(self.wait_for("listening")["address"])

    def end(self) -> int:
        """Wait for its end; the exit code."""
        code = self.process.wait(30)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@contextmanager
def gateway(url: str, namespace: str, *argv: str, fds: tuple[int, ...] = (), **env: str) -> Iterator[Process]:
    """A gateway process; killed at the end if it is still there."""
    names = {"REDIS_URL": url, "SANDBOX_REDIS__NAMESPACE": namespace, "SANDBOX_GATEWAY__PORT": "0", **env}
    settings = [f"{name}={value}" for name, value in names.items()]
    process = subprocess.Popen(
        ["env", *settings, sys.executable, "-m", "gateway", *argv],
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )
    running = Process(process)
    try:
        yield running
    finally:
        process.kill()
        running.end()


@contextmanager
def echo_worker(url: str, namespace: str) -> Iterator[subprocess.Popen[bytes]]:
    """An echo worker as a process."""
    process = subprocess.Popen([sys.executable, HERE / "echo_worker.py", url, namespace])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)


def wait_ready(url: str, status: int = 200) -> None:
    """Ask until `/readyz` answers with this status."""
    until = time.monotonic() + 20
    while httpx.get(f"{url}/readyz").status_code != status:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def service(redis_url: str) -> Iterator[str]:
    """The URL of a gateway that serves, with small bounds."""
    namespace = uuid4().hex
    env = {
        f"SANDBOX_GATEWAY__{name.upper()}": str(value)
        for name, value in BOUNDS
        if name in BOUNDS.model_fields_set
    }
    with gateway(redis_url, namespace, **env) as running, echo_worker(redis_url, namespace):
        wait_ready(running.url)
        yield running.url


@pytest.fixture(scope="module")
def service_with_keys(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a gateway that wants keys, and one that is good for everything."""
    key, keys_file = new_key(), tmp_path_factory.mktemp("keys") / "keys.toml"
    keys_file.write_text(stanza(key, "team-a", ["run", "admin"]))
    namespace = uuid4().hex
    env = {"SANDBOX_GATEWAY__KEYS_FILE": str(keys_file)}
    with gateway(redis_url, namespace, **env) as running, echo_worker(redis_url, namespace):
        wait_ready(running.url)
        yield running.url, key


@asynccontextmanager
async def stack(redis_url: str, **env: str) -> AsyncIterator[tuple[Process, httpx.AsyncClient, Any]]:
    """A gateway process, a client of it, and an echo worker in this process that the test can look into."""
    namespace = env.setdefault("SANDBOX_REDIS__NAMESPACE", uuid4().hex)
    async with AsyncExitStack() as exits:
        worker = await exits.enter_async_context(
            working(CallQueue(RedisSettings(url=redis_url, namespace=namespace)))
        )
        running = exits.enter_context(gateway(redis_url, namespace, **env))
        url = await asyncio.to_thread(lambda: running.url)
        await asyncio.to_thread(wait_ready, url)
        http = await exits.enter_async_context(httpx.AsyncClient(base_url=url, timeout=30))
        yield running, http, worker


def test_run_and_batch(service: str) -> None:
    """Calls go through HTTP, Redis and a worker process, and come back in order."""
    assert httpx.post(f"{service}/v1/run", json={"code": "echo 1"}).json()["stdout"] == "1"
    calls = {"calls": [{"code": f"echo {number}"} for number in range(8)]}
    results = httpx.post(f"{service}/v1/batch", json=calls).json()["results"]
    assert [result["stdout"] for result in results] == [str(number) for number in range(8)]


def test_refusals(service: str) -> None:
    """413 for too much, declared or not, 422 for a wrong call; a refused body breaks no connection."""
    with httpx.Client(base_url=service) as http:
        assert http.post("/v1/run", content=b"x" * 65537).status_code == 413
        assert http.post("/v1/run", content=iter([b"x" * 40_000] * 2)).status_code == 413
        assert http.post("/v1/batch", json={"calls": [{"code": ""}] * 9}).status_code == 413
        assert http.post("/v1/run", json={"cod": ""}).status_code == 422
        assert http.post("/v1/run", json={"code": "echo"}).status_code == 200


async def test_lines_arrive_while_others_run(redis_url: str) -> None:
    """A line of an NDJSON answer is on the wire before the last call of its batch is done."""
    async with stack(redis_url) as (_, http, worker):
        calls = {"calls": [{"code": "hold"}, {"code": "echo 1"}, {"cod": ""}]}
        headers = {"accept": "application/x-ndjson"}
        async with http.stream("POST", "/v1/batch", json=calls, headers=headers) as response:
            lines = response.aiter_lines()
            early = [json.loads(await anext(lines)) for _ in range(2)]
            assert sorted(line["index"] for line in early) == [1, 2]
            worker.released.set()
            assert json.loads(await anext(lines))["index"] == 0


async def test_sigterm_closes_websockets(redis_url: str) -> None:
    """On SIGTERM an open step gets its answer, a further one an error, and then the session is closed with 1012."""
    async with stack(redis_url, SANDBOX_GATEWAY__NOTICE_S="0") as (running, _, worker):
        url = running.url.replace("http", "ws", 1) + "/openenv/ws"
        async with connect(url, proxy=None) as stepping, connect(url, proxy=None) as idle:
            await stepping.send(json.dumps({"type": "step", "data": {"code": "hold 1"}}))
            await worker.has_seen(1)
            running.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(running.wait_for, "refusing calls")
            await idle.send(json.dumps({"type": "step", "data": {"code": "echo 2"}}))
            assert json.loads(await idle.recv())["data"]["name"] == "Unavailable"
            worker.released.set()
            assert json.loads(await stepping.recv())["data"]["observation"]["stdout"] == "1"
            for websocket in (stepping, idle):
                with pytest.raises(ConnectionClosed) as closed:
                    await websocket.recv()
                assert closed.value.rcvd is not None
                assert closed.value.rcvd.code == 1012
        assert await asyncio.to_thread(running.end) == 0
        assert "Exception in ASGI application" not in running.said


async def test_sigterm_drains(redis_url: str) -> None:
    """On SIGTERM the port is let go of, new calls get 503, open ones their results, and the process ends with 0."""
    async with stack(redis_url, SANDBOX_GATEWAY__NOTICE_S="0") as (running, http, worker):
        held = asyncio.create_task(http.post("/v1/run", json={"code": "hold"}))
        await worker.has_seen(1)
        assert (await http.get("/healthz")).status_code == 200  # on a second connection, which stays open
        running.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(running.wait_for, "refusing calls")
        refused = await http.post("/v1/run", json={"code": "echo"})
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert refused.json()["error"]["message"] == "this gateway is shutting down"
        with pytest.raises(httpx.ConnectError):
            await http.get("/healthz")
        host, port = running.url.removeprefix("http://").split(":")
        socket.create_server((host, int(port))).close()
        worker.released.set()
        answer = await held
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert await asyncio.to_thread(running.end) == 0
        assert running.said[-5:] == ["draining", "refusing calls", "queue closed", "stopped", "end of log"]


async def test_balancers_have_time_to_notice(redis_url: str) -> None:
    """After SIGTERM it is not ready at once, and still serves whoever comes, each on a connection that then closes."""
    async with stack(redis_url, SANDBOX_GATEWAY__NOTICE_S="3600") as (running, http, _):
        running.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(running.wait_for, "draining")
        assert (await http.get("/readyz")).status_code == 503
        for number in "12":
            served = await http.post("/v1/run", json={"code": f"echo {number}"})
            assert (served.json()["stdout"], served.headers["connection"]) == (number, "close")
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.end) == -signal.SIGTERM


async def test_a_second_signal_ends_at_once(redis_url: str) -> None:
    """Who asks twice does not want to wait for open calls."""
    async with stack(redis_url, SANDBOX_GATEWAY__NOTICE_S="0") as (running, http, worker):
        held = asyncio.create_task(http.post("/v1/run", json={"code": "hold"}))
        await worker.has_seen(1)
        running.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(running.wait_for, "refusing calls")
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.end) == -signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            await held


async def test_a_caller_that_hangs_up_leaves_no_trace(redis_url: str) -> None:
    """A connection cut while its call runs, or in the middle of a body, is no error and leaks no permit."""
    async with stack(redis_url) as (running, http, worker):
        host, port = running.url.removeprefix("http://").split(":")
        for body in (b'{"code":"hold"}', b'{"code"'):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/run HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n" + body)
            await writer.drain()
            await worker.has_seen(1)
            writer.close()
            await writer.wait_closed()
        worker.released.set()
        while (await http.get("/v1/status")).json()["in_flight"]:
            pass
        assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 200
        assert not [event for event in running.events if event.get("level") in {"error", "critical"}]


async def test_a_frozen_gateway_loses_no_reply(redis_url: str) -> None:
    """Replies that came while a gateway was stopped for longer than its reads take are all there afterwards.

    Another gateway serves meanwhile.
    """
    namespace = uuid4().hex
    async with stack(redis_url, SANDBOX_REDIS__NAMESPACE=namespace) as (running, http, worker):
        calls = {"calls": [{"id": str(number), "code": "hold"} for number in range(100)]}
        held = asyncio.create_task(http.post("/v1/batch", json=calls))
        await worker.has_seen(100)
        running.process.send_signal(signal.SIGSTOP)
        worker.released.set()
        frozen_until = time.monotonic() + _READ_TIMEOUT_S + 1
        with gateway(redis_url, namespace) as other:
            await asyncio.to_thread(wait_ready, await asyncio.to_thread(lambda: other.url))
            async with httpx.AsyncClient(base_url=other.url, timeout=30) as elsewhere:
                assert (await elsewhere.post("/v1/run", json={"code": "echo"})).status_code == 200
            await asyncio.sleep(frozen_until - time.monotonic())  # so long it has to be
        running.process.send_signal(signal.SIGCONT)
        results = (await held).json()["results"]
        assert [result.get("status") for result in results] == ["ok"] * 100


async def test_full(redis_url: str) -> None:
    """429 with Retry-After while the gateway holds all it may."""
    async with stack(redis_url, SANDBOX_GATEWAY__MAX_IN_FLIGHT="1") as (_, http, worker):
        held = asyncio.create_task(http.post("/v1/run", json={"code": "hold"}))
        await worker.has_seen(1)
        full = await http.post("/v1/run", json={"code": "echo"})
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        worker.released.set()
        assert (await held).status_code == 200


def test_no_worker(redis_url: str) -> None:
    """503 with the reason while there is no worker."""
    with gateway(redis_url, uuid4().hex) as running:
        running.wait_for("Redis answers")
        refused = httpx.post(f"{running.url}/v1/run", json={"code": ""})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["message"] == "no worker is alive"


def test_redis_comes_late_and_goes(tmp_path: Path) -> None:
    """A gateway starts without Redis, serves when it comes, answers 503 while it is gone, and recovers."""
    server = RedisServer.find()
    tmp_path.chmod(0o700)
    url, namespace = server.url(tmp_path), uuid4().hex
    with gateway(url, namespace, SANDBOX_GATEWAY__NOTICE_S="0") as running:
        wait_ready(running.url, 503)
        assert httpx.get(f"{running.url}/healthz").status_code == 200
        assert httpx.post(f"{running.url}/v1/run", json={"code": "echo"}).status_code == 503
        for _ in range(2):
            redis = start_redis(server, tmp_path)
            with echo_worker(url, namespace):
                wait_ready(running.url)
                assert httpx.post(f"{running.url}/v1/run", json={"code": "echo"}).status_code == 200
            redis.terminate()
            redis.wait(10)
            wait_ready(running.url, 503)
            refused = httpx.post(f"{running.url}/v1/run", json={"code": "echo"})
            assert refused.json()["error"]["message"].startswith("Redis is away")
        assert running.said.count("Redis is away") == 2
        running.process.send_signal(signal.SIGTERM)
        assert running.end() == 0


def test_an_inherited_socket(redis_url: str) -> None:
    """With `--fd` the gateway serves on the socket that its parent has bound."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        with gateway(redis_url, uuid4().hex, "--fd", str(fd), fds=(fd,)) as running:
            assert running.url == f"http://127.0.0.1:{port}"
            assert httpx.get(f"{running.url}/healthz").status_code == 200


def test_several_inherited_sockets(redis_url: str) -> None:
    """`--fd` may stand there several times; each is served, and each is asked whether others can reach it."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("0.0.0.0", 0)) as other:
        fds = (one.fileno(), other.fileno())
        argv = [word for fd in fds for word in ("--fd", str(fd))]
        with gateway(redis_url, uuid4().hex, *argv, fds=fds) as running:
            assert running.end() == 2
        assert f"0.0.0.0 port {other.getsockname()[1]} can be reached" in running.said[0]
        insecure = {"SANDBOX_GATEWAY__INSECURE": "true"}
        with gateway(redis_url, uuid4().hex, *argv, fds=fds, **insecure) as running:
            running.wait_for("listening")
            for listener in (one, other):
                port = listener.getsockname()[1]
                assert httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200


async def test_a_second_address_serves_and_ends_as_the_first(redis_url: str) -> None:
    """With `gateway.also` both are served by one process; on SIGTERM both ports are let go of, and calls finish."""
    env = {"SANDBOX_GATEWAY__ALSO": "127.0.0.1:0", "SANDBOX_GATEWAY__NOTICE_S": "0"}
    async with stack(redis_url, **env) as (running, http, worker):
        urls = [line["address"] for line in running.events if line["event"] == "listening"]
        assert (urls[0], len(set(urls))) == (running.url, 2)
        async with httpx.AsyncClient(base_url=urls[1], timeout=30) as other:
            held = [asyncio.create_task(one.post("/v1/run", json={"code": "hold"})) for one in (http, other)]
            await worker.has_seen(2)
            running.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(running.wait_for, "refusing calls")
            for url in urls:
                host, port = url.removeprefix("http://").split(":")
                socket.create_server((host, int(port))).close()
            worker.released.set()
            assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
        assert await asyncio.to_thread(running.end) == 0


def test_an_inherited_socket_that_others_can_reach(redis_url: str) -> None:
    """What a parent has bound is asked itself; with the operator's word it is served."""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        fd = listener.fileno()
        with gateway(redis_url, uuid4().hex, "--fd", str(fd), fds=(fd,)) as running:
            assert running.end() == 2
        assert "can be reached from other machines" in running.said[0]
        insecure = {"SANDBOX_GATEWAY__INSECURE": "true"}
        with gateway(redis_url, uuid4().hex, "--fd", str(fd), fds=(fd,), **insecure) as running:
            running.wait_for("listening")


async def test_keys_of_a_process(redis_url: str, tmp_path: Path) -> None:
    """With a keys file others may reach it, a key runs a call, and no key is ever logged."""
    key, keys_file = new_key(), tmp_path / "keys.toml"
    _write(keys_file, stanza(key, "team-a", ["run"]))
    env = {"SANDBOX_GATEWAY__KEYS_FILE": str(keys_file), "SANDBOX_LOG__LEVEL": "debug"}
    async with stack(redis_url, SANDBOX_GATEWAY__HOST="0.0.0.0", **env) as (running, http, _):
        assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 401
        http.headers["authorization"] = f"Bearer {key}"
        assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 200
        assert (await http.get("/metrics")).status_code == 403
        _write(keys_file, "[[keys")
        await asyncio.to_thread(running.wait_for, "keys file is broken")
        assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 200
        _write(keys_file, "keys = []")
        await asyncio.to_thread(running.wait_for, "keys read")
        assert (await http.post("/v1/run", json={"code": "echo"})).status_code == 401
        assert key not in json.dumps(running.events)


def _write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize(
    ("argv", "env", "words"),
    [
        (("--fd", "99"), {}, "--fd 99 is no socket"),
        ((), {"SANDBOX_GATEWAY__HOST": "192.0.2.1"}, "cannot listen on 192.0.2.1:0"),
        ((), {"SANDBOX_GATEWAY__ALSO": "192.0.2.1:80"}, "cannot listen on 192.0.2.1:80"),
        ((), {"SANDBOX_GATEWAY__ALSO": "0.0.0.0:0"}, "can be reached from other machines"),
        ((), {"SANDBOX_GATEWAY__PROT": "1"}, "SANDBOX_GATEWAY__PORT"),
        ((), {"REDIS_URL": "http://nowhere"}, "REDIS_URL"),
        (
            (),
            {"SANDBOX_GATEWAY__HOST": "0.0.0.0"},
            "can be reached from other machines, and there are no API",
        ),
        ((), {"SANDBOX_GATEWAY__HOST": ""}, "SANDBOX_GATEWAY__INSECURE=true"),
        ((), {"SANDBOX_GATEWAY__KEYS_FILE": "/nowhere.toml"}, "cannot read the keys file /nowhere.toml"),
    ],
)
def test_a_refused_start_is_one_sentence(argv: tuple[str, ...], env: dict[str, str], words: str) -> None:
    """What makes a start impossible is told in one line, without a traceback, and the exit code is 2."""
    with gateway("unix:///nowhere", "x", *argv, **env) as running:
        assert running.end() == 2
    assert words in running.said[0]
    assert len(running.said) == 2


def tries(most: int) -> settings:
    """So many examples, the same ones each time."""
    return settings(
        max_examples=most,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


#: An example of a task takes long to make, and many calls to judge.
GRADERS = "^/v1/(judge|grade)"


def keeps_its_word(case: Case, url: str) -> None:
    response = case.call(base_url=url)
    assert response.status_code < 500, response.text
    # What is accepted is for test_openapi.py, which knows that a bad item is answered within a 200.
    case.validate_response(response, excluded_checks=[negative_data_rejection, positive_data_acceptance])


@API.exclude(path_regex=GRADERS).parametrize()
@tries(40)
def test_the_api_keeps_its_word(case: Case, service: str) -> None:
    """Whatever fits the description, and much that does not, gets a documented answer and never a 5xx of a bug."""
    keeps_its_word(case, service)


@API.include(path_regex=GRADERS).parametrize()
@tries(10)
def test_graders_keep_their_word(case: Case, service: str) -> None:
    """So do the routes that judge."""
    keeps_its_word(case, service)


@API_WITH_KEYS.exclude(path_regex=GRADERS).parametrize()
@tries(10)
def test_the_api_with_keys_keeps_its_word(case: Case, service_with_keys: tuple[str, str]) -> None:
    """With a good key as without keys; and what says that it needs one is refused without, in documented words."""
    url, key = service_with_keys
    case.call_and_validate(
        base_url=url,
        headers={"Authorization": f"Bearer {key}"},
        excluded_checks=[negative_data_rejection, positive_data_acceptance],
    )
    stranger = case.call(
        base_url=url, headers={"Authorization": "Bearer rsk_wrong", "X-API-Key": "rsk_wrong"}
    )
    assert stranger.status_code < 500
    assert (stranger.status_code == 401) == (scope_of(case.operation.path) is not None)
