"""`sandbox up`: a whole service on this machine - a Redis of its own unless there is one, workers, gateways.

What they are to each other. Workers and gateways meet in Redis only; if it dies it starts again, empty, at the
same place, and both find it. The listening sockets are ours, at each address one for each gateway and all on one port
(SO_REUSEPORT), and gateways inherit them: connections that arrive while a gateway starts again wait for it.
At the end we let go of the sockets first; a gateway closes its own copy when it is told to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import httpx
from pydantic import BaseModel

from sandbox import logs
from sandbox.api_keys import refuse_open_door
from sandbox.errors import ConfigError, Unavailable
from sandbox.outlet import Outlet
from sandbox.queue import CallQueue, WorkerInfo
from sandbox.redis_server import RedisServer, private_directory, wait_ready
from sandbox.settings import PREFIX, SLOTS_PER_CORE, RedisSettings, Settings
from sandbox.supervise import Program, Stage, Supervisor

BACKLOG = 4096  # connections that wait while a gateway starts; the kernel caps it at net.core.somaxconn
READY_S = 60.0  # from start to the first call served; a cold worker imports sympy and scipy

#: A single call takes some 0.1 ms of a gateway's CPU, and one in a batch a quarter of that (`python -m loadtest.edge`);
#: jail and worker take 2.6 ms for the cheapest program, `print(1)` (`python -m loadtest.costs`). So a gateway, which is
#: one event loop, could feed 26 cores; with sixteen it is busy for six tenths of the time, and still answers at once.
CORES_PER_GATEWAY = 16

#: -P: the folder that we are started in, and a `worker` in it, are none of the service's business.
PYTHON = (sys.executable, "-P")

_REDIS_READY_S = 10.0
_ASK_S = 10.0  # until a gateway that starts answers
_REDIS_GRACE_S = 5.0
_GATEWAY_GRACE_S = 40.0  # after its notice it gives open requests 30 s, and answers on their way 5
_MARGIN_S = 5.0  # beyond a worker's own grace


async def up(
    settings: Settings,
    environ: Mapping[str, str],
    *,
    gateways: int,
    workers: int,
    worker: Sequence[str] = (*PYTHON, "-m", "worker"),
) -> None:
    """Run a whole service until a signal ends it, and say on stdout where it listens.

    `environ` is what the children start with, and what `settings` was read from; `worker` is the command line
    of each worker. Raises ConfigError when the stack cannot start, Unavailable when it is not ready in time.
    """
    if workers > 1 and settings.worker.metrics_port > 0:
        raise ConfigError(f"{workers} workers cannot share worker.metrics_port; 0 gives each a free one")
    variables = dict(environ) | _variables(settings, workers)
    stages: list[Stage] = []
    with contextlib.ExitStack() as stack:
        outlet = stack.enter_context(Outlet(sys.stderr.fileno()))
        logs.set_up(settings.log, "up", outlet)
        if not settings.redis.url:
            server = RedisServer.find()
            directory, fd = stack.enter_context(private_directory())
            url = variables[f"{PREFIX}REDIS__URL"] = server.url(directory)
            settings = settings.model_copy(update={"redis": settings.redis.model_copy(update={"url": url})})
            command = server.command(directory)
            redis = Program("redis", command, variables, _REDIS_GRACE_S, fds=(fd,), quiet=True)
            stages.append(Stage("redis", [redis], partial(wait_ready, url, _REDIS_READY_S)))
        addresses = [(settings.gateway.host, settings.gateway.port), *settings.gateway.also]
        listeners = [bind(host, port, gateways) for host, port in addresses]
        for first, *_ in listeners:
            refuse_open_door(first, settings.gateway)
        grace_s = settings.worker.grace_s + _MARGIN_S
        leave_s = settings.gateway.notice_s + _GATEWAY_GRACE_S
        programs = [Program(f"worker-{n}", worker, variables, grace_s) for n in range(1, workers + 1)]
        stages.append(Stage("workers", programs))
        stages.append(
            Stage(
                "gateways",
                [
                    _gateway(n, variables, own, leave_s)
                    for n, own in enumerate(zip(*listeners, strict=True), 1)
                ],
                partial(_announce, [_url(first) for first, *_ in listeners], settings, workers),
            )
        )
        await Supervisor(stages, outlet, list(chain.from_iterable(listeners))).run()


def bind(host: str, port: int, count: int) -> list[socket.socket]:
    """Listening sockets that share a port, which is a free one if `port` is 0. Raises ConfigError."""
    listeners: list[socket.socket] = []
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Shared ports are shared with every process of ours that asks: a second service would take half of
        # our connections without a word. A socket that does not share finds out whether anybody listens.
        with socket.socket(family, kind) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            address = alone.getsockname()
        for _ in range(count):
            listeners.append(socket.socket(family, kind))
            listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listeners[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listeners[-1].bind(address)
            listeners[-1].listen(BACKLOG)
    except OSError as exc:
        for listener in listeners:
            listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    return listeners


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if listener.family is socket.AF_INET6 else f"http://{host}:{port}"


def _variables(settings: Settings, workers: int) -> dict[str, str]:
    """What the children must know and cannot find out.

    They share the cores; somebody reads their logs; and no balancer stands before a gateway that needs notice, for
    our own sockets take connections all the time.
    """
    variables = {}
    if "notice_s" not in settings.gateway.model_fields_set:
        variables[f"{PREFIX}GATEWAY__NOTICE_S"] = "0"
    if workers > 1 and settings.worker.slots == 0:
        variables[f"{PREFIX}WORKER__SLOTS"] = str(max(1, SLOTS_PER_CORE * cores() // workers))
    if settings.log.format == "auto" and sys.stderr.isatty():
        variables[f"{PREFIX}LOG__FORMAT"] = "text"
    return variables


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gateways_for(cores: int) -> int:
    """How many gateways serve so many cores of jails."""
    return math.ceil(cores / CORES_PER_GATEWAY)


def _gateway(
    number: int, variables: Mapping[str, str], listeners: Iterable[socket.socket], grace_s: float
) -> Program:
    fds = tuple(listener.fileno() for listener in listeners)
    command = [*PYTHON, "-m", "gateway", *(word for fd in fds for word in ("--fd", str(fd)))]
    return Program(f"gateway-{number}", command, variables, grace_s, fds=fds)


async def _announce(urls: Sequence[str], settings: Settings, workers: int) -> None:
    """Wait until the whole stack serves, and say so to a person, and to a program that reads the first line."""
    url, *others = urls
    alive = await _serving(url, settings.redis, workers)
    levels = " and ".join(sorted({worker.level for worker in alive}))
    slots = sum(worker.slots for worker in alive)
    key = " -H 'authorization: Bearer KEY'" if settings.gateway.keys_file else ""
    print(f"listening on {url}")
    for other in others:
        print(f"and on {other}")
    print(f"isolation level {levels}, {slots} slots in {len(alive)} worker(s)")
    print(
        f"try: curl -s {url}/v1/run{key} -H 'content-type: application/json' "
        """-d '{"code": "print(6 * 7)"}'"""
    )
    sys.stdout.flush()


async def _serving(url: str, redis: RedisSettings, workers: int) -> list[WorkerInfo]:
    """The workers, once all of them are up and a gateway would take calls for them.

    The gateway is asked for its readiness only, which needs no key; who the workers are stands in Redis.
    """
    deadline = time.monotonic() + READY_S
    queue = CallQueue(redis)
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=_ASK_S) as http:
            while True:
                try:
                    reason = _Health.model_validate_json((await http.get(f"{url}/readyz")).content).reason
                    if reason is None:
                        alive = await queue.workers()
                        if len(alive) >= workers:
                            return alive
                        reason = f"{len(alive)} of {workers} workers are up"
                except (httpx.TransportError, Unavailable) as exc:
                    reason = str(exc) or type(exc).__name__
                if time.monotonic() > deadline:
                    raise Unavailable(f"the service was not ready within {READY_S:.0f} s: {reason}")
                await asyncio.sleep(0.05)  # nobody tells us, so we ask again
    finally:
        await queue.close()


class _Health(BaseModel):
    """What `/readyz` says."""

    reason: str | None = None
