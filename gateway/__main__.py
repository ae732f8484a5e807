"""`python -m gateway [--fd N ...]`: settings, listening sockets, uvicorn, and an end in good order."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
import uvloop
from starlette.types import ASGIApp

from gateway.app import create_app
from gateway.connection import Connection
from gateway.gateway import Gateway
from gateway.websocket import PING_EVERY_S, PONG_WITHIN_S, websockets_of
from sandbox.api_keys import refuse_open_door
from sandbox.errors import ConfigError
from sandbox.logs import set_up
from sandbox.process import told_within, use_all_descriptors
from sandbox.queue import CallQueue
from sandbox.settings import Settings, load_settings

log = logging.getLogger("gateway")

#: How long open calls may go on after SIGTERM. As long as a worker's grace: what a draining worker still
#: finishes can still be answered. Orchestrators give up soon after.
GRACE_S = 30.0
#: How long answers that are written may take to leave, once no call is open; who reads nothing is cut off.
FLUSH_S = 5
#: How long Redis may take to answer: a caller shall know within a second that its call was not taken.
ANSWER_S = 0.75
#: Connections that wait to be accepted. The kernel caps it at net.core.somaxconn, by default 4096.
BACKLOG = 4096
#: Above the keep-alive of common clients and load balancers (60 s), so that they, not we, close an idle
#: connection; the other way round a request can meet a connection that is just being closed.
KEEP_ALIVE_S = 75


def main() -> int:
    """Serve until told to stop. 0: drained; 1: a loop failed; 2: the start was refused."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description="HTTP in, HTTP out.")
    parser.add_argument(
        "--fd",
        type=int,
        action="append",
        help="serve on this inherited listening socket, or on several, instead of host and port",
    )
    fds = parser.parse_args().fd
    try:
        settings = load_settings()
        set_up(settings.log, "gateway")
        use_all_descriptors()
        addresses = [(settings.gateway.host, settings.gateway.port), *settings.gateway.also]
        listeners = [_inherit(fd) for fd in fds] if fds else [_listen(*address) for address in addresses]
        for listener in listeners:
            refuse_open_door(listener, settings.gateway)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(settings, listeners))
    except ConfigError as exc:
        print(f"gateway: {exc.message}", file=sys.stderr)
        return 2


async def serve(settings: Settings, listeners: list[socket.socket]) -> int:
    """Serve on listening sockets until a signal or a crash ends it; the exit code.

    Raises ConfigError for a keys file that is broken, and when the Redis that it finds will never do.
    """
    app = create_app(settings, CallQueue(settings.redis, timeout_s=ANSWER_S))
    gateway: Gateway = app.state.gateway
    server = _Server(server_config(app, gateway))
    serving = asyncio.create_task(server.serve(sockets=listeners))
    reasons = {asyncio.create_task(_first_signal().wait()), asyncio.create_task(gateway.crashed.wait())}
    await asyncio.wait({serving, *reasons}, return_when=asyncio.FIRST_COMPLETED)
    for reason in reasons:
        reason.cancel()
    await shut_down(gateway, server, serving, settings.gateway.notice_s)
    if isinstance(gateway.crash, ConfigError):
        raise gateway.crash
    if gateway.crash is not None:
        log.critical("a loop of the gateway failed", exc_info=gateway.crash)
        return 1
    return 0


async def shut_down(gateway: Gateway, server: _Server, serving: asyncio.Task[None], notice_s: float) -> None:
    """The end, from the outside inwards. A second signal ends the process at any of these steps.

    1. Not ready, and every answer closes its connection. Calls are still taken for `notice_s`, because
       balancers need a moment to notice, and send us calls until then.
    2. The listeners close. Their ports are free for others; or, where a supervisor holds the socket too, what
       arrives waits in it for our next life. What comes on connections that are still open gets 503.
    3. Open calls finish, for at most GRACE_S; what is left then is answered 503.
    4. Idle connections close; answers on their way leave, for at most FLUSH_S.
    5. uvicorn ends the app's lifespan: the batcher (empty by now) and the reply reader end, then the queue
       closes.
    """
    gateway.draining = True
    log.info("draining", extra={"calls": gateway.admission.held, "notice_s": notice_s})
    await told_within(gateway.crashed, notice_s)
    server.stop_listening()
    await gateway.drain(GRACE_S)
    server.should_exit = True
    await serving
    log.info("stopped")


def _first_signal() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT. A second one ends the process as if nobody handled it."""
    loop = asyncio.get_running_loop()
    first = asyncio.Event()

    def on_signal(number: int) -> None:
        if not first.is_set():
            log.info("asked to stop", extra={"signal": signal.Signals(number).name})
            first.set()
            return
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return first


def spare_the_collector() -> None:
    """Let collections be few and short while many requests stay open.

    By default, with 10,000 of them, they triple the CPU that a request costs. Each open request is some 80 objects, and
    the second generation holds what stayed since it was last looked at; nothing else runs while that is done. With 20
    times the first one it was a million objects and half a second, in which Redis seemed to be away.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 2, 700)


class _Server(uvicorn.Server):
    """uvicorn, whose signals are ours: it would close the listener at once and end by the signal."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, say so, and tell the collector that what is there by now will stay."""
        await super().startup(sockets)
        for server in self.servers:
            host, port, *_ = server.sockets[0].getsockname()
            log.info("listening", extra={"address": f"http://{f'[{host}]' if ':' in host else host}:{port}"})
        spare_the_collector()

    def stop_listening(self) -> None:
        """Let go of the ports, and of no connection. Before the start there is nothing to let go of."""
        if self.started:
            for server in self.servers:
                server.close()


def server_config(app: ASGIApp, gateway: Gateway) -> uvicorn.Config:
    """How uvicorn serves an application of ours; websockets only where a dialect has a door for them."""
    settings = gateway.settings.gateway
    return uvicorn.Config(
        app,
        http=Connection,
        ws=websockets_of(gateway.admission) if "openenv" in settings.dialects else "none",
        ws_max_size=settings.max_body_bytes,
        ws_ping_interval=PING_EVERY_S,
        ws_ping_timeout=PONG_WITHIN_S,
        ws_per_message_deflate=False,
        lifespan="on",
        interface="asgi3",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=FLUSH_S,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as exc:
        raise ConfigError(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc


def _inherit(fd: int) -> socket.socket:
    try:
        listener = socket.socket(fileno=fd)
    except OSError as exc:
        raise ConfigError(f"--fd {fd} is no socket: {exc.strerror}") from exc
    if listener.family not in {socket.AF_INET, socket.AF_INET6} or listener.type != socket.SOCK_STREAM:
        raise ConfigError(f"--fd {fd} is no TCP socket")
    return listener


if __name__ == "__main__":
    sys.exit(main())
