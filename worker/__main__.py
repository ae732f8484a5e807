"""`python -m worker`: settings, jails, queue, then serve until SIGTERM or SIGINT. A second signal ends at once."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable

import uvloop
from prometheus_client import start_http_server

from sandbox import logs
from sandbox.errors import SandboxError
from sandbox.process import use_all_descriptors
from sandbox.queue import CallQueue
from sandbox.settings import Settings, load_settings
from worker.metrics import WorkerMetrics
from worker.pool import JailPool
from worker.worker import Worker, default_slots

log = logging.getLogger("worker")


def main() -> int:
    """Run one worker; the exit status is 0 after a drain and 2 when settings or host make a start impossible."""
    try:
        settings = load_settings()
        logs.set_up(settings.log, "worker")
        use_all_descriptors()
        uvloop.run(serve(settings))
    except SandboxError as exc:
        print(f"worker: {exc.message}", file=sys.stderr)
        return 2
    return 0


async def serve(settings: Settings) -> None:
    """Open everything, serve, close everything. A signal ends it in good order at any moment."""
    task = asyncio.current_task()
    assert task is not None
    _on_signals(task.cancel)
    queue = CallQueue(settings.redis)  # refuses a missing address before a jail is there
    try:
        pool = await JailPool.open(settings.jail, settings.worker.slots or default_slots())
    except asyncio.CancelledError:
        log.info("asked to stop before the first jail was there")
        return
    try:
        metrics = WorkerMetrics()
        worker = Worker(settings.worker, queue, pool, metrics)
        _on_signals(worker.stop)
        if settings.worker.metrics_port >= 0:
            server, _thread = start_http_server(
                settings.worker.metrics_port, addr="127.0.0.1", registry=metrics.registry
            )
            log.info("metrics", extra={"port": server.server_port})
        await worker.run()
    finally:
        await queue.close()
        await pool.close()


def _on_signals(stop: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        stop()
        # The second one ends us on the spot: the jails die with us, and our leases hand the calls on.
        loop.remove_signal_handler(number)
        signal.signal(number, lambda *_: os._exit(128 + number))

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


if __name__ == "__main__":
    sys.exit(main())
