"""One gateway process: its parts, and how they start and end.

Who is there. Each request is a task of the HTTP server. Beside them run three loops: the batcher puts calls
into the queue and cancels them, the reply router reads results, and readiness looks after Redis and the workers. A
request takes a permit (admission), lays its calls on the batcher's list, and waits for the futures that the reply
router resolves. All of them share one `CallQueue` and one event loop, so no step between two awaits needs a
lock.

Who may die. A caller: its request's task hears of it, leaves its calls, and those that nobody waits for any more
are cancelled. A worker, or a reply on its way: at the deadline we ask the queue what it knows, and answer. Redis:
readiness refuses new calls, puts fail with their calls, the reader tries again; when it is back, all three go on, and
if it is another server, or the same one started anew, all calls that still wait are put again. A loop that
ends by an exception nobody foresaw is a bug: then all three end, open calls are answered, and the process
shall end too, because a gateway without one of them only looks alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple
from uuid import uuid4

from gateway.admission import UNAVAILABLE_RETRY_S, Admission
from gateway.batcher import Batcher
from gateway.line import Line
from gateway.metrics import Metrics
from gateway.pressure import Pressure
from gateway.readiness import ASK_AGAIN_S, Obstacle, Readiness
from gateway.replies import LATE_S, Answer, ReplyRouter, Waiting, different, fault_of, read_reply
from gateway.tenants import KeyRing, Tenant
from sandbox.calls import CallStatus, ToolCall
from sandbox.errors import NotFound, QueueTimeout, Unavailable
from sandbox.process import told_within
from sandbox.queue import CallQueue, Found, Put, QueuedCall
from sandbox.settings import Settings

log = logging.getLogger(__name__)

#: At the start, before connections are taken: who waits in our socket while we start again shall not be refused for
#: want of news. Without a Redis they are told so after that.
FIRST_NEWS_S = 2.0

_DRAINING = Obstacle("draining", "this gateway is shutting down")


class Job(NamedTuple):
    """A call that nobody need wait for, while it is under way."""

    queued: QueuedCall
    told: asyncio.Future[Put | Unavailable]  # what came of putting it
    waiting: Waiting


class Gateway:
    """The parts that a call passes, in that order, and the loops that serve them."""

    def __init__(self, settings: Settings, queue: CallQueue) -> None:
        self.id = uuid4().hex
        self.settings = settings
        self.queue = queue
        self.metrics = Metrics()
        self.pressure = Pressure(settings.gateway.max_backlog, self.metrics)
        self.readiness = Readiness(queue, self.pressure, self._put_late_call, self._put_again)
        self.keys = KeyRing(settings.gateway.keys_file, self.metrics)
        self.admission = Admission(settings.gateway, self.readiness, self.metrics)
        self.replies = ReplyRouter(queue, self.id, self.metrics, self._is_overdue, self._is_over)
        slots = (lambda: self.readiness.slots) if self.keys.are_needed else None
        self.line: Line[QueuedCall] = Line(self.metrics, slots)
        self.batcher = Batcher(
            queue, self.id, self.metrics, self._was_put, self._was_found, self.replies, self.line
        )
        #: Set when a loop has ended by itself, and what ended it.
        self.crashed = asyncio.Event()
        self.crash: Exception | None = None
        self._jobs: dict[QueuedCall, Job] = {}
        self._keeping: set[asyncio.Task[None]] = set()
        #: Set when the end has begun: not ready any more, though calls may still be taken for a moment.
        self.draining = False
        self._stop = asyncio.Event()

    def obstacle(self) -> Obstacle | None:
        """Why nobody shall send further calls here; None when they would be served."""
        return _DRAINING if self.draining else self.readiness.obstacle()

    # ---- a call ----

    def submit(self, call: ToolCall, tenant: Tenant) -> Waiting:
        """Send a call on its way, or join it where it is under way. Leave what you got, whatever comes of it.

        Raises InvalidCall when its id stands for a different call, and Overloaded when it would not be taken in time.
        """
        record = self.queue.record(tenant.name, call.id)
        waiting = self.replies.join(record, call)
        if waiting is None:
            self._check_pressure(call, tenant)
            queued = self._queued(call, record)
            waiting = self.replies.expect(queued)
            self.batcher.add(queued, tenant)
        return waiting

    def leave(self, waiting: Waiting) -> None:
        """Its caller has an answer, or is gone. A call that nobody waits for any more is cancelled."""
        if self.replies.leave(waiting):
            self.metrics.cancelled.inc()
            self.batcher.cancel(waiting.record)

    async def submit_job(self, call: ToolCall, tenant: Tenant) -> Job:
        """Queue a call whose result somebody will ask for. `keep` what you get.

        Raises what `submit` does, QueueTimeout and Unavailable.
        """
        self._check_pressure(call, tenant)
        queued = self._queued(call, self.queue.record(tenant.name, call.id), is_job=True)
        told: asyncio.Future[Put | Unavailable] = asyncio.get_running_loop().create_future()
        job = self._jobs[queued] = Job(queued, told, self.replies.watch(queued.record, call.id))
        self.batcher.add(queued, tenant)
        try:
            await self._accepted(job)
        except BaseException:
            self._end_job(job)
            raise
        return job

    @staticmethod
    async def _accepted(job: Job) -> None:
        call = job.queued.call
        try:
            async with asyncio.timeout(call.deadline_s + LATE_S):
                outcome = await job.told
        except TimeoutError as exc:
            raise QueueTimeout("it could not be queued before its deadline") from exc
        if isinstance(outcome, Unavailable):
            raise outcome
        if outcome.outcome == "other":
            raise different(call.id)

    def keep(self, job: Job, permit: ExitStack) -> None:
        """Hold a job's permit and its place until its end, and put it again where a new server does not know it."""
        task = asyncio.create_task(self._keep(job, permit))
        self._keeping.add(task)
        task.add_done_callback(self._keeping.discard)

    async def _keep(self, job: Job, permit: ExitStack) -> None:
        with permit:
            left_s = (job.queued.deadline_ms - self.queue.now_ms()) / 1000 + LATE_S
            try:
                await asyncio.wait({job.waiting.future}, timeout=max(0.0, left_s))
            finally:
                self._end_job(job)

    def _end_job(self, job: Job) -> None:
        del self._jobs[job.queued]
        self.batcher.over(job.queued)
        if self.replies.leave(job.waiting):
            self.batcher.cancel(job.queued.record)  # our part of it

    async def result_of_job(self, call_id: str, tenant: Tenant, wait_s: float) -> Answer | None:
        """What came of a call that was put before; None when nothing has within `wait_s`.

        Raises NotFound when nobody knows it any more.
        """
        record = self.queue.record(tenant.name, call_id)
        # Before the queue is asked, or a reply could slip through.
        waiting = self.replies.watch(record, call_id)
        try:
            found = await self.queue.watch(self.id, record)
            if found.state == "done":
                return read_reply(record, found.detail)
            if found.state == "unknown":
                raise NotFound(f"nobody knows a call {call_id}, or not any more")
            late_s = (found.due_ms - self.queue.now_ms()) / 1000 + LATE_S
            await asyncio.wait({waiting.future}, timeout=min(wait_s, max(0.0, late_s)))
            if not waiting.future.done():
                return await self._late_answer(record, call_id) if late_s <= wait_s else None
            answer = waiting.future.result()
            if waiting.queued is not None:
                # Who sent it here too may have been answered by us, for a deadline or a program of its own.
                found = await self.queue.look(record)
                if found.state in {"running", "waiting"}:
                    return None
                if found.state == "done":
                    return read_reply(record, found.detail)
            return answer
        finally:
            if self.replies.leave(waiting):
                self.batcher.cancel(record)  # our part of it: a job goes on

    async def _late_answer(self, record: str, call_id: str) -> Answer:
        """For a job whose deadline has passed, though nobody has settled it."""
        found = await self.queue.look(record)
        if found.state == "done":
            return read_reply(record, found.detail)
        return fault_of(call_id, *_why_late(found))

    async def stop_job(self, call_id: str, tenant: Tenant) -> bool:
        """End a call, whoever waits for it. False when it had ended before, or nobody knows it."""
        record = self.queue.record(tenant.name, call_id)
        waiting = self.replies.get(record)
        is_held_back = waiting is not None and waiting.queued is not None and not waiting.is_put
        if is_held_back:  # the queue may not know it yet
            self.replies.answer(record, read_reply(record, b""))
            self.batcher.cancel(record)
        found = await self.queue.stop(record)
        return is_held_back or found.state in {"running", "waiting"}

    def _check_pressure(self, call: ToolCall, tenant: Tenant) -> None:
        self.pressure.check(call.priority, call.deadline_s, self.line.ahead(call.priority, tenant))

    def _queued(self, call: ToolCall, record: str, *, is_job: bool = False) -> QueuedCall:
        now_ms = self.queue.now_ms()
        return QueuedCall(call, record, now_ms, now_ms + round(call.deadline_s * 1000), is_job)

    def _was_put(self, queued: QueuedCall, outcome: Put | Unavailable) -> None:
        if isinstance(outcome, Unavailable):
            self.readiness.lost(outcome.message)
        elif outcome.outcome == "queued":
            self.pressure.note_put(queued.call.priority, 1)
        if queued.is_job:
            self._job_was_put(queued, outcome)
            return
        waiting = self.replies.get(queued.record)
        if waiting is None or waiting.queued is not queued:
            return  # its callers left while it was on its way; it is cancelled, unless who came since then joins it
        if isinstance(outcome, Unavailable):
            self.replies.answer(
                queued.record,
                Unavailable(
                    f"the call could not be queued: {outcome.message}", retry_after_s=UNAVAILABLE_RETRY_S
                ),
            )
        elif outcome.outcome == "other":
            self.replies.answer(queued.record, different(queued.call.id))
            self.batcher.cancel(queued.record)  # the other may be ours, left a moment ago
        elif outcome.outcome == "later":
            self.batcher.add_again([queued])
        elif outcome.outcome == "kept":
            self.replies.answer(queued.record, read_reply(queued.record, outcome.result))
        else:
            self.replies.was_put(waiting)

    def _job_was_put(self, queued: QueuedCall, outcome: Put | Unavailable) -> None:
        job = self._jobs.get(queued)
        if job is None:
            return  # it was given up on its way
        if not job.told.done():  # else it was put again
            job.told.set_result(outcome)
        if isinstance(outcome, Unavailable) or job.waiting.future.done():
            return
        if outcome.outcome == "later":
            self.batcher.add_again([queued])
        elif (
            outcome.outcome == "kept" and job.waiting.queued is None
        ):  # else another program may wait under its id
            self.replies.answer(queued.record, read_reply(queued.record, outcome.result))

    def _is_over(self, queued: QueuedCall) -> None:
        self.batcher.over(queued)

    def _is_overdue(self, waiting: Waiting) -> None:
        """A deadline has passed without a reply: find out why, and see to it that it does not run on."""
        if not waiting.is_put:
            self.replies.fault(
                waiting, CallStatus.QUEUE_TIMEOUT, "it could not be queued before its deadline"
            )
        self.batcher.cancel(waiting.record)

    def _was_found(self, record: str, found: Found | Unavailable) -> None:
        waiting = self.replies.get(record)
        if waiting is None or not waiting.is_overdue:
            return  # its callers are gone, or it is sent again meanwhile
        if isinstance(found, Unavailable):
            self.replies.fault(waiting, CallStatus.INTERNAL_ERROR, f"at its deadline: {found.message}")
        elif found.state == "done":
            self.replies.answer(record, read_reply(record, found.detail))
        elif found.state == "later":
            self.batcher.cancel(record)
        else:
            self.replies.fault(waiting, *_why_late(found))

    def _put_again(self) -> None:
        """The server is not the one that took our calls: what it does not know, it shall know."""
        self.batcher.add_again(
            waiting.queued for waiting in self.replies if waiting.queued is not None and waiting.is_put
        )
        self.batcher.add_again(job.queued for job in self._jobs.values() if job.told.done())

    # ---- its life ----

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve inside of the block. Starts also without a Redis, and waits for it."""
        loops = asyncio.create_task(self._run_loops())
        try:
            await told_within(self.readiness.heard, FIRST_NEWS_S)
            yield
        finally:
            await self._end(loops)

    async def drain(self, grace_s: float) -> None:
        """Refuse new calls and let the open ones finish; what is left after `grace_s` is answered 503."""
        self.draining = True
        self.readiness.refusing = _DRAINING
        # Jobs outlive us: the queue has them, and any gateway tells what came of them.
        for task in self._keeping:
            task.cancel()
        log.info("refusing calls", extra={"calls": self.admission.held, "jobs": len(self._keeping)})
        try:
            async with asyncio.timeout(grace_s):
                await self.admission.emptied()
        except TimeoutError:
            left = self._abandon("this gateway is shutting down and the call was not done in time")
            log.warning("calls left behind", extra={"calls": left, "grace_s": grace_s})

    async def _put_late_call(self) -> None:
        """Put a call that its worker drops unrun, because its deadline has passed."""
        late_ms = self.queue.now_ms() - 1
        call = ToolCall(code="")
        record = self.queue.record("", call.id)
        await self.queue.put(self.id, [QueuedCall(call, record, late_ms, late_ms)])
        self.batcher.cancel(record)

    async def _end(self, loops: asyncio.Task[None]) -> None:
        """The end, in the order of dependence: what puts, what reads, then the queue below both."""
        self._stop.set()
        self.batcher.stop()
        await loops
        self._abandon("this gateway is shutting down")
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self.queue.close()
        log.info("queue closed")

    def _abandon(self, why: str) -> int:
        """Answer whoever waits for anything; say how many calls are left behind."""
        for job in self._jobs.values():
            if not job.told.done():
                job.told.set_result(Unavailable(why))
        return self.replies.abandon(why)

    async def _run_loops(self) -> None:
        try:
            if await self._open():
                async with asyncio.TaskGroup() as group:
                    group.create_task(self.readiness.run(self._stop))
                    group.create_task(self.keys.watch(self._stop))
                    group.create_task(self.batcher.run())
                    group.create_task(self.replies.run(self._stop))
        except Exception as exc:  # noqa: BLE001 - whatever ends a loop ends the process; `crash` carries it there
            self.readiness.refusing = Obstacle("crashed", "this gateway failed and is about to restart")
            self._abandon("this gateway failed; the call may have run")
            self.crash = exc
            self.crashed.set()
            self.readiness.heard.set()

    async def _open(self) -> bool:
        """Open the queue as soon as there is one; False when told to stop before that."""
        first = True
        while not self._stop.is_set():
            try:
                await self.queue.open()
            except Unavailable as exc:
                if first:
                    log.warning("waiting for Redis", extra={"reason": exc.message})
                first = False
                await told_within(self._stop, ASK_AGAIN_S)
            else:
                return True
        return False


def _why_late(found: Found) -> tuple[CallStatus, str]:
    """What a call is answered that has no result at its deadline."""
    if found.state == "running":
        worker = found.detail.decode(errors="replace")
        return CallStatus.INTERNAL_ERROR, f"the worker {worker} had it and did not answer by its deadline"
    if found.state == "waiting":
        return CallStatus.QUEUE_TIMEOUT, "no worker was free for it before its deadline"
    return CallStatus.INTERNAL_ERROR, "Redis had lost it by its deadline"
