"""`python -m loadtest.standin`: a stand-in for a worker, for measurements of everything around the jail.

It takes calls from the real queue and settles them as a worker does, but runs nothing: each call is held for a fixed
time and answered `ok`. It has no bound of slots. It says in the list of workers and in each result that it is a
stand-in, so that no figure of it can be taken for one of a jail. It renews no lease: what it holds for longer than one
is safe, since stand-ins do not reclaim. So `up` has a Redis of its own, where no worker is that would, and no call of
anybody who wants an answer from a jail.

    python -m loadtest.standin up --gateways 3 --hold 0.3       a whole service with stand-ins for workers
    python -m loadtest.standin work --hold 0.3 --after 45056    one of them; REDIS_URL says where the queue is

`--after` lets them begin when so many calls wait, so that all of these are in flight at that moment; `up` lets the
gateways take as many. Two tasks: one takes, one settles what has been held for long enough, both as many in a round
trip as are there.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time
from collections import deque
from typing import Annotated

import typer
import uvloop

from sandbox import logs
from sandbox.calls import CallStatus, ToolResult
from sandbox.process import told_within, use_all_descriptors
from sandbox.queue import CallQueue, Delivery, Outcome, WorkerInfo
from sandbox.settings import PREFIX, load_settings
from sandbox.stack import PYTHON, up

NAME = "stand-in"
PRINTED = "held\n"  # by every call
_AT_A_TIME = 256  # calls in one round trip
_ALIVE_S = 60.0  # how long its word holds that it is there
_LOOK_S = 0.02  # how often it looks whether enough calls wait
#: While nobody takes anything, gateways guess from this how soon a call would be taken, and refuse what is due before.
_NO_BOUND = 1_000_000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

Hold = Annotated[float, typer.Option(min=0.0, help="Seconds that each call is held.")]
After = Annotated[int, typer.Option(min=0, help="Calls that must wait before the first is taken.")]


class StandIn:
    """Takes calls and settles each a while later."""

    def __init__(self, queue: CallQueue, hold_s: float, after: int) -> None:
        self._queue = queue
        self._hold_s = hold_s
        self._after = after
        self._name = f"{NAME}-{os.getpid()}"
        self._held: deque[tuple[float, Delivery]] = deque()
        self._came = asyncio.Event()
        self._stop = asyncio.Event()
        self._takes = True  # until what the last read brought is held

    def stop(self) -> None:
        """Take nothing more; what is held, or on its way here, is answered now."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until stopped. Raises Unavailable when Redis goes away: a measurement ends with it."""
        await self._queue.open()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take())
            group.create_task(self._settle())
        await self._queue.retire(self._name)

    async def _take(self) -> None:
        announce_at = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            if now >= announce_at:
                await self._announce()
                announce_at = now + _ALIVE_S / 3
            if self._after:
                if not await self._may_begin():
                    await asyncio.sleep(_LOOK_S)  # nobody tells us, so we ask again
                    continue
                self._after = 0
            taken = await self._queue.take(self._name, _AT_A_TIME)
            due = time.monotonic() + self._hold_s
            self._held.extend((due, delivery) for delivery in taken)
            self._came.set()
        self._takes = False
        self._came.set()

    async def _may_begin(self) -> bool:
        """Whether enough calls wait, or another stand-in has found that they did."""
        streams = (await self._queue.pulse()).streams.values()
        waiting = sum(stream.waiting for stream in streams)
        return waiting >= self._after or any(stream.taken_total for stream in streams)

    async def _settle(self) -> None:
        while self._takes or self._held:
            if not self._held:
                self._came.clear()
                await self._came.wait()
                continue
            if (left_s := self._held[0][0] - time.monotonic()) > 0:
                await told_within(self._stop, left_s)
            now = math.inf if self._stop.is_set() else time.monotonic()
            done: list[Outcome] = []
            while self._held and self._held[0][0] <= now and len(done) < _AT_A_TIME:
                done.append(Outcome(delivery := self._held.popleft()[1], self._result(delivery)))
            await self._queue.settle(done)

    def _result(self, delivery: Delivery) -> ToolResult:
        return ToolResult(
            id=delivery.call.id, status=CallStatus.OK, exit_code=0, stdout=PRINTED, worker=self._name
        )

    async def _announce(self) -> None:
        info = WorkerInfo(
            id=self._name,
            slots=_NO_BOUND,
            busy=len(self._held),
            level=f"none ({NAME})",
            draining=False,
            started_at=time.time(),
            version=NAME,
        )
        await self._queue.announce(info, ttl_s=_ALIVE_S)


@app.command()
def work(hold: Hold = 0.3, after: After = 0) -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = load_settings()
    logs.set_up(settings.log, NAME)
    use_all_descriptors()

    async def serve() -> None:
        queue = CallQueue(settings.redis)
        standin = StandIn(queue, hold, after)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, standin.stop)
        await standin.run()
        await queue.close()

    uvloop.run(serve())


@app.command("up")
def serve_all(
    gateways: Annotated[int, typer.Option(min=1)] = 1,
    executors: Annotated[int, typer.Option(min=1, help="Stand-ins.")] = 1,
    hold: Hold = 0.3,
    after: After = 0,
) -> None:
    """Run Redis, gateways and stand-ins on a free port of this machine, until a signal.

    With --after the calls must be due much later, or gateways refuse them as none is taken.
    """
    ours = {
        "REDIS__URL": "",
        "GATEWAY__HOST": "127.0.0.1",
        "GATEWAY__PORT": "0",
        "GATEWAY__KEYS_FILE": "",
        **({"GATEWAY__MAX_IN_FLIGHT": after, "GATEWAY__MAX_BACKLOG": after + 1} if after else {}),
    }
    environ = dict(os.environ) | {f"{PREFIX}{name}": str(value) for name, value in ours.items()}  # noqa: TID251 - a command line, which hands it on
    worker = [*PYTHON, "-m", "loadtest.standin", "work", "--hold", str(hold), "--after", str(after)]
    settings = load_settings(environ)
    asyncio.run(up(settings, environ, gateways=gateways, workers=executors, worker=worker))


if __name__ == "__main__":
    sys.exit(app())
