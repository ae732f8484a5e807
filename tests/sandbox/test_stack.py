"""`sandbox up` as a process, with a real Redis and with programs that only look like ours."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from sandbox.errors import ConfigError
from sandbox.stack import bind, gateways_for
from tests.conftest import RunningRedis

#: Answers each connection with the variables that it was started with, and says its own number.
GATEWAY = """
import json, os, select, socket, sys
words = sys.argv
listeners = [socket.socket(fileno=int(fd)) for word, fd in zip(words, words[1:]) if word == "--fd"]
variables = {name: value for name, value in os.environ.items() if name.startswith("SANDBOX_")}
body = json.dumps({"ok": True, "pid": os.getpid(), "variables": variables}).encode()
while True:
    for listener in select.select(listeners, [], [])[0]:
        connection, _ = listener.accept()
        while connection.recv(65536):
            connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n%b" % (len(body), body))
            break
        connection.close()
"""
#: Says that it is there, and does nothing.
WORKER = """
import asyncio, os, signal
from sandbox.queue import CallQueue, WorkerInfo
from sandbox.settings import load_settings

async def announce():
    queue = CallQueue(load_settings().redis)
    await queue.open()
    fields = {"level": "cardboard", "slots": 3, "busy": 0, "draining": False, "started_at": 0.0, "version": "0"}
    await queue.announce(WorkerInfo(id=str(os.getpid()), **fields), ttl_s=600)
    await queue.close()

asyncio.run(announce())
signal.pause()
"""
ROOT = Path(__file__).parents[2]

Up = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Up]:
    """Starts `sandbox up`, in which `gateway` and `worker` are the programs above."""
    (tmp_path / "gateway.py").write_text(GATEWAY)
    (tmp_path / "worker.py").write_text(WORKER)
    started = []

    async def start(*options: str, workers: int = 1, **variables: str) -> asyncio.subprocess.Process:
        environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}  # noqa: TID251
        environ |= {
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "TMPDIR": str(tmp_path),
            **variables,
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "sandbox", "up", "--port", "0", "--workers", str(workers), *options,
            env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.communicate()


async def url_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    first = (await process.stdout.readline()).decode()
    assert first.startswith("listening on http://127.0.0.1:"), first
    return first.split()[-1]


def redis_directories(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("sandbox-redis-*"))


async def ask(url: str) -> dict[str, object]:
    async with httpx.AsyncClient(trust_env=False) as client:
        answer: dict[str, object] = (await client.get(f"{url}/v1/status")).json()
        return answer


async def test_up_says_where_it_listens_and_what_it_got(up: Up, tmp_path: Path) -> None:
    """Its stdout has the address on its first line, then level and slots and a line to try; SIGTERM ends all."""
    process = await up(workers=2)
    url = await url_of(process)
    process.send_signal(signal.SIGTERM)
    rest, log = await process.communicate()
    assert rest.decode().splitlines() == [
        "isolation level cardboard, 6 slots in 2 worker(s)",
        f"try: curl -s {url}/v1/run -H 'content-type: application/json' -d '{{\"code\": \"print(6 * 7)\"}}'",
    ]
    assert process.returncode == 0
    stages = [
        line.split('"stage": "')[1].split('"')[0] for line in log.decode().splitlines() if "stopping" in line
    ]
    assert stages == ["gateways", "workers", "redis"]
    assert redis_directories(tmp_path) == []


async def test_up_starts_a_redis_that_the_children_are_told_of(up: Up, tmp_path: Path) -> None:
    """Without REDIS_URL they get the address of one in a directory of its own; several workers share the cores."""
    variables = (await ask(await url_of(await up(workers=2))))["variables"]
    assert isinstance(variables, dict)
    [directory] = redis_directories(tmp_path)
    assert variables["SANDBOX_REDIS__URL"] == f"unix://{directory}/redis.sock"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert variables["SANDBOX_WORKER__SLOTS"] == str(2 * len(os.sched_getaffinity(0)))


async def test_up_says_nothing_of_its_redis(up: Up) -> None:
    """Neither a server's greeting nor its advice to the host stands among the service's own lines."""
    process = await up()
    await url_of(process)
    process.send_signal(signal.SIGTERM)
    _, log = await process.communicate()
    assert [line for line in log.decode().splitlines() if not line.startswith("{")] == []


async def test_up_serves_and_ends_though_nobody_reads_its_log(up: Up, tmp_path: Path) -> None:
    """A worker that says far more than a pipe holds stalls neither itself nor the supervisor."""
    (tmp_path / "worker.py").write_text(f"for _ in range(50_000): print('x' * 99, flush=True)\n{WORKER}")
    process = await up()
    await url_of(process)
    process.send_signal(signal.SIGTERM)
    while process.returncode is None:  # noqa: ASYNC110 - wait() would wait until all is read
        await asyncio.sleep(0.01)
    assert process.returncode == 0


async def test_a_killed_stack_leaves_nothing_for_long(up: Up, tmp_path: Path) -> None:
    """After kill -9 of the supervisor the next one removes what the first could not."""
    first = await up()
    await url_of(first)
    [left] = redis_directories(tmp_path)
    first.kill()
    fd = os.open(left, os.O_RDONLY)
    await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)  # until its Redis has ended too
    os.close(fd)
    await url_of(await up())
    assert not left.exists()
    assert len(redis_directories(tmp_path)) == 1


async def test_up_uses_the_redis_that_there_is(up: Up, tmp_path: Path, any_redis: RunningRedis) -> None:
    """With REDIS_URL none is started, and the options of the command line reach the children."""
    process = await up("--slots", "5", "--insecure", REDIS_URL=any_redis.settings.url)
    variables = (await ask(await url_of(process)))["variables"]
    assert isinstance(variables, dict)
    assert redis_directories(tmp_path) == []
    assert variables == {
        "SANDBOX_WORKER__SLOTS": "5",
        "SANDBOX_GATEWAY__PORT": "0",
        "SANDBOX_GATEWAY__NOTICE_S": "0",
        "SANDBOX_GATEWAY__INSECURE": "True",
    }


async def test_gateways_need_no_notice_unless_somebody_says_so(up: Up) -> None:
    """No balancer stands before them; where one does, the operator's word holds."""
    variables = (await ask(await url_of(await up(SANDBOX_GATEWAY__NOTICE_S="7"))))["variables"]
    assert isinstance(variables, dict)
    assert variables["SANDBOX_GATEWAY__NOTICE_S"] == "7"


async def test_connections_wait_while_a_gateway_starts_again(up: Up) -> None:
    """Nobody is refused between the death of the only gateway and its next life."""
    url = await url_of(await up())
    first = (await ask(url))["pid"]
    assert isinstance(first, int)
    os.kill(first, signal.SIGKILL)
    second = (await ask(url))["pid"]
    assert second != first


@pytest.mark.parametrize(("cores", "gateways"), [(1, 1), (16, 1), (17, 2), (64, 4)])
def test_there_are_as_many_gateways_as_the_cores_need(cores: int, gateways: int) -> None:
    """There is always one, and none has to feed more than sixteen cores of jails."""
    assert gateways_for(cores) == gateways


async def test_several_gateways_share_the_port(up: Up) -> None:
    """Connections reach each of them, and their answers come from different processes."""
    url = await url_of(await up("--gateways", "2"))
    seen = set()
    while len(seen) < 2:
        seen.add((await ask(url))["pid"])


async def test_a_second_address_is_as_good_as_the_first(up: Up) -> None:
    """Each gateway serves both, stdout names both, and neither refuses anybody while a gateway starts again."""
    process = await up("--gateways", "2", "--also", "127.0.0.1:0")
    url = await url_of(process)
    assert process.stdout is not None
    also = (await process.stdout.readline()).decode().removeprefix("and on ").strip()
    assert also not in {"", url}
    seen: dict[str, set[object]] = {url: set(), also: set()}
    while any(len(pids) < 2 for pids in seen.values()):
        for address, pids in seen.items():
            pids.add((await ask(address))["pid"])
    assert seen[url] == seen[also]
    for pid in seen[url]:
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
    for address, pids in seen.items():
        assert (await ask(address))["pid"] not in pids


async def test_a_refused_start_ends_up_with_the_reason(up: Up, tmp_path: Path) -> None:
    """Exit code 1, nothing on stdout, and the program's own words as the last on stderr."""
    (tmp_path / "worker.py").write_text("import sys; print('no jail here', file=sys.stderr); sys.exit(2)")
    process = await up()
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    assert err.decode().splitlines()[-2:] == [
        "sandbox: worker-1 does not stay up (exit code 2). The last it said:",
        "    no jail here",
    ]
    assert redis_directories(tmp_path) == []


async def test_up_refuses_a_metrics_port_that_workers_would_share(up: Up) -> None:
    """Two workers cannot listen on one port; the message names the way out."""
    process = await up(workers=2, SANDBOX_WORKER__METRICS_PORT="9100")
    _, err = await process.communicate()
    assert process.returncode == 1
    assert b"cannot share worker.metrics_port; 0 gives each a free one" in err


@pytest.mark.parametrize("address", [("--host", "0.0.0.0"), ("--also", "0.0.0.0:0")])
async def test_up_lets_no_other_machine_in_without_keys(
    up: Up, tmp_path: Path, address: tuple[str, str]
) -> None:
    """An address that others can reach stops the start before anything runs; the message has both remedies."""
    process = await up(*address)
    out, err = await process.communicate()
    assert (process.returncode, out) == (1, b"")
    [line] = err.decode().splitlines()
    assert "can be reached from other machines, and there are no API keys" in line
    assert "SANDBOX_GATEWAY__KEYS_FILE" in line
    assert "--insecure" in line
    assert redis_directories(tmp_path) == []


@pytest.mark.parametrize("remedy", ["--insecure", "keys"])
async def test_up_lets_others_in_where_somebody_says_so(up: Up, tmp_path: Path, remedy: str) -> None:
    """With keys, or at somebody's word, it listens everywhere; with keys the line to try has a place for one."""
    keys = {"SANDBOX_GATEWAY__KEYS_FILE": str(tmp_path / "keys.toml")} if remedy == "keys" else {}
    process = await up("--host", "0.0.0.0", *([] if keys else [remedy]), **keys)
    assert process.stdout is not None
    lines = [(await process.stdout.readline()).decode() for _ in range(3)]
    assert lines[0].startswith("listening on http://0.0.0.0:")
    assert ("authorization: Bearer KEY" in lines[2]) == bool(keys)


def test_bind_shares_one_port() -> None:
    """All sockets listen on the same free port."""
    listeners = bind("127.0.0.1", 0, 3)
    assert len({listener.getsockname() for listener in listeners}) == 1
    for listener in listeners:
        listener.close()


@pytest.mark.parametrize("shares", [True, False])
def test_bind_refuses_a_port_where_somebody_listens(shares: bool) -> None:
    """Also if that other process would share it, because then each of us would get half of the calls."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shares))
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            bind("127.0.0.1", port, 1)


def test_bind_names_a_host_that_is_not_ours() -> None:
    """The message has the address and the system's reason."""
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:80"):
        bind("192.0.2.1", 80, 1)
