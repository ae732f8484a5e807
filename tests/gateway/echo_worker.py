"""A worker without a jail: the code of a call says what comes of it.

`echo TEXT`   ok, with TEXT on stdout           `fail`   error, exit code 1
`hold`        ok, once a `release` has run      `fault`  internal_error     `late`  queue_timeout
`lose`        never answered
`timeout TEXT`, `memory_limit TEXT`, `output_limit TEXT`, `signaled TEXT`   that status, with TEXT on stdout

Tests run it as a task, or as a process: `python echo_worker.py URL NAMESPACE`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from sandbox.calls import CallStatus, ToolResult
from sandbox.errors import Unavailable
from sandbox.queue import CallQueue, Delivery, Outcome, WorkerInfo
from sandbox.settings import RedisSettings


class EchoWorker:
    """Takes calls from a queue and settles them."""

    def __init__(self, queue: CallQueue, name: str = "echo") -> None:
        self.queue = queue
        self.name = name
        self.seen: list[Delivery] = []
        self.released = asyncio.Event()
        self.draining = False
        self.python = "3.13.1"
        self._news = asyncio.Condition()
        self._stopping = False
        self._idle = asyncio.Event()
        self._held: set[asyncio.Task[None]] = set()

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.name,
            slots=64,
            busy=0,
            level="none",
            draining=self.draining,
            started_at=0.0,
            version="test",
            python=self.python,
        )

    async def run(self) -> None:
        while not self._stopping:
            try:
                await self._turn()
            except Unavailable:
                await asyncio.sleep(0.05)
        self._idle.set()
        await asyncio.gather(*self._held)

    async def _turn(self) -> None:
        await self.queue.announce(self.info(), ttl_s=30.0)
        taken = await self.queue.take(self.name, 64, block_s=0.05)
        async with self._news:
            self.seen += taken
            self._news.notify_all()
        now = [delivery for delivery in taken if delivery.call.code not in {"hold", "lose"}]
        await self.queue.settle([Outcome(delivery, self._result(delivery)) for delivery in now])
        for delivery in taken:
            if delivery.call.code == "hold":
                self._held.add(asyncio.create_task(self._settle_later(delivery)))

    async def has_seen(self, calls: int) -> None:
        """Wait until so many calls have arrived here."""
        async with self._news:
            await self._news.wait_for(lambda: len(self.seen) >= calls)

    def stop(self) -> None:
        """End after the read at hand; what is held is released."""
        self._stopping = True
        self.released.set()

    async def rest(self) -> None:
        """Take nothing more, though the word that we live stands for a while; what is held stays held."""
        self._stopping = True
        await self._idle.wait()

    async def _settle_later(self, delivery: Delivery) -> None:
        await self.released.wait()
        await self.queue.settle([Outcome(delivery, self._result(delivery))])

    def _result(self, delivery: Delivery) -> ToolResult:
        call = delivery.call
        word, _, rest = call.code.partition(" ")
        if word == "release":
            self.released.set()
        match word:
            case "fault":
                status, code, reason = CallStatus.INTERNAL_ERROR, None, "the jail broke"
            case "late":
                status, code, reason = CallStatus.QUEUE_TIMEOUT, None, "no slot was free in time"
            case "fail":
                status, code, reason = CallStatus.ERROR, 1, None
            case "timeout" | "memory_limit" | "output_limit" | "signaled":
                status, code, reason = CallStatus(word), None, None
            case _:
                status, code, reason = CallStatus.OK, 0, None
        signaled = 11 if status is CallStatus.SIGNALED else None
        return ToolResult(
            id=call.id,
            status=status,
            exit_code=code,
            signal=signaled,
            stdout=rest,
            stdout_bytes=len(rest.encode()),
            worker=self.name,
            reason=reason,
        )


async def main(url: str, namespace: str) -> None:
    queue = CallQueue(RedisSettings(url=url, namespace=namespace))
    await queue.open()
    worker = EchoWorker(queue, f"echo-{os.getpid()}")
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    await worker.run()
    await queue.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
