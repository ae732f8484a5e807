"""A discrete-event simulation of the service, in plain heap code, so that 45,000 calls take about a second.

Theory of operation. A call passes these stages; it waits at each for those before it:

    caller ─► gateway ─► Redis ─► queue ─► worker ─► slot: fork, program, sleep ─► worker ─► Redis ─► gateway ─► caller

`Thread`: an event loop. Caller, gateway, Redis and worker are such threads. All that is ready when it turns is one
round, which costs a fixed part and a part for each call. So a call alone is dear and a call in a crowd is cheap, as
measured: gateway 1.3 ms at a fifth of the load that two cores can do, 0.8 at two thirds, 0.1 in a crowd.

`Cores`: what runs on one host uses its cores by turns, each time for at most one slice. The service's threads go before
programs: the kernel shares cores out by session and by group (autogroup, and a cgroup for each slot), and those
of the service hardly ever use their share. Without that, programs of 10 ms came out a fifth too quick at half load.

The queue is one for all, first come first served, and workers pull: a call goes to the worker that has waited longest
of those with a free slot, and a slot that falls free takes the oldest call. A call holds its slot while its program
runs and while that sleeps; only then it holds no core. A program without end holds its slot until its wall limit, and
wants a core all the time.

On a `one_machine` layout all threads, the caller's too, take their time from the cores of the one host. Else each
gateway and each Redis has a core of its own, callers cost nothing, and each worker's loop runs on its host.

Left out: a put of many calls wakes one worker, which takes as many of them as it has slots (here they are dealt out one
by one); the forkserver is one thread (its time counts as the program's); retries, leases, deadlines, and memory.

Rules: pure, no clock and no chance in it. The same calls and layout give the same result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

#: A worker process, which is one thread beside its jails, for so many cores: what `sandbox up` starts.
CORES_A_WORKER = 4
SLOTS_A_CORE = 4
_MOST_IN_A_ROUND = 64
#: How long a task keeps a core while others wait for it.
SLICE_S = 0.001  # shorter than the kernel's own, for programs are interrupted by threads, and here only between slices
_NEVER = math.inf

_Then: TypeAlias = Callable[[int], None]


class Work(NamedTuple):
    """What one call needs, and when it comes."""

    at_s: float
    cpu_s: float  # of the program and its forkserver; math.inf for one without end, which then needs a limit
    idle_s: float = 0.0  # in which it holds its slot and no core
    limit_s: float = math.inf  # the wall time after which it is ended


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of one thread: of each round, and of each call in it."""

    round_s: float = 0.0
    call_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Of a call that has a round to itself."""
        return self.round_s + self.call_s

    def times(self, factor: float) -> Cost:
        """So many times it."""
        return Cost(self.round_s * factor, self.call_s * factor)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a call costs beside its program. Each thread sees a call twice, on its way in and out."""

    caller: Cost = Cost()
    gateway: Cost = Cost()
    redis: Cost = Cost()
    worker: Cost = Cost()
    cold: float = 1.0  # how much more a program costs that starts on an idle core
    fixed_s: float = 0.0  # wake-ups on the way, less what is done when the answer has left already


@dataclass(frozen=True, slots=True)
class Scaler:
    """Adds all hosts that are missing when it looks and calls wait, as KEDA does; they serve a while later."""

    hosts: int  # that are there from the start
    looks_every_s: float = 15.0
    start_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Layout:
    """What there is to serve them."""

    hosts: int
    cores: int  # of each host
    slots: int = 0  # of each host; 0 for four a core
    gateways: int = 1
    redis: int = 1
    one_machine: bool = False
    slice_s: float = SLICE_S
    scaler: Scaler | None = None


@dataclass(slots=True)
class Simulated:
    """What came of it."""

    latency_s: list[float]  # in the order of the calls
    end_s: float = 0.0  # when the last call was through
    host_cpu_s: float = 0.0
    program_cpu_s: float = 0.0  # of it, of programs that have an end, and their forkservers
    gateway_cpu_s: float = 0.0
    redis_cpu_s: float = 0.0
    in_flight_peak: int = 0
    backlog_peak: int = 0
    answers: list[int] = field(default_factory=list)  # how many each call got


def simulate(calls: Sequence[Work], costs: Costs, layout: Layout) -> Simulated:
    """Serve calls, which are in the order of their times, until the last is answered."""
    return _Service(calls, costs, layout).run()


class _Clock:
    """Events in the order of their times; those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], object]] = []
        self._made = 0

    def at(self, time_s: float, then: Callable[..., None], what: object) -> None:
        self._made += 1
        heappush(self._events, (time_s, self._made, then, what))

    def next_s(self) -> float:
        return self._events[0][0] if self._events else _NEVER

    def step(self) -> None:
        self.now, _, then, what = heappop(self._events)
        then(what)


class _Task:
    """Something that runs on cores."""

    __slots__ = ("end", "left_s", "then", "what")

    def __init__(self, cpu_s: float, then: Callable[..., None], what: object) -> None:
        self.left_s = cpu_s
        self.then = then
        self.what = what
        self.end = False  # it was ended and needs no more


class _Cores:
    """The cores of a host, which programs use by turns of one slice each, whenever no thread wants them."""

    def __init__(self, clock: _Clock, count: int, slice_s: float) -> None:
        self.used_s = 0.0
        self._clock = clock
        self._slice_s = slice_s
        self._free = count
        self._ready: deque[_Task] = deque()
        self._urgent: deque[_Task] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether one more task would find a free core."""
        return self._free > 0

    def run(self, cpu_s: float, then: Callable[..., None], what: object) -> _Task:
        """Give a program its time, then call back."""
        return self._add(_Task(cpu_s, then, what), self._ready)

    def serve(self, cpu_s: float, then: Callable[..., None], what: object) -> None:
        """Give one of the service's threads its time before any program that waits, then call back."""
        self._add(_Task(cpu_s, then, what), self._urgent)

    def _add(self, task: _Task, waiting: deque[_Task]) -> _Task:
        if self._free:
            self._free -= 1
            self._turn(task)
        else:
            waiting.append(task)
        return task

    def _turn(self, task: _Task) -> None:
        if task.left_s <= self._slice_s:
            self.used_s += task.left_s
            self._clock.at(self._clock.now + task.left_s, self._done, task)
        else:
            self.used_s += self._slice_s
            self._clock.at(self._clock.now + self._slice_s, self._turned, task)

    def _turned(self, task: _Task) -> None:
        if task.end:
            self._next()
            return
        task.left_s -= self._slice_s
        if self._ready or self._urgent:
            self._ready.append(task)
            self._next()
        else:
            self._turn(task)

    def _done(self, task: _Task) -> None:
        self._next()
        task.then(task.what)

    def _next(self) -> None:
        while self._urgent or self._ready:
            task = (self._urgent or self._ready).popleft()
            if not task.end:
                self._turn(task)
                return
        self._free += 1


class _OwnCore:
    """A core that one thread has to itself."""

    def __init__(self, clock: _Clock) -> None:
        self.used_s = 0.0
        self._clock = clock

    def serve(self, cpu_s: float, then: Callable[..., None], what: object) -> None:
        """As `_Cores` does."""
        self.used_s += cpu_s
        self._clock.at(self._clock.now + cpu_s, then, what)


class _Thread:
    """An event loop: all that is ready is one round."""

    def __init__(self, cores: _Cores | _OwnCore, cost: Cost) -> None:
        self._cores = cores
        # A call comes by twice.
        self._round_s = cost.round_s / 2
        self._call_s = cost.call_s / 2
        self._waiting: deque[tuple[_Then, int]] = deque()
        self._turning = False
        self.used_s = 0.0

    def give(self, then: _Then, call: int) -> None:
        """Handle a call in the next round, then hand it on."""
        self._waiting.append((then, call))
        if not self._turning:
            self._turning = True
            self._turn()

    def _turn(self) -> None:
        waiting = self._waiting
        size = len(waiting)
        if size <= _MOST_IN_A_ROUND:
            ready = list(waiting)
            waiting.clear()
        else:
            size = _MOST_IN_A_ROUND
            ready = [waiting.popleft() for _ in range(size)]
        cpu_s = self._round_s + self._call_s * size
        self.used_s += cpu_s
        self._cores.serve(cpu_s, self._turned, ready)

    def _turned(self, ready: list[tuple[_Then, int]]) -> None:
        for then, call in ready:
            then(call)
        if self._waiting:
            self._turn()
        else:
            self._turning = False


class _Worker:
    """A worker process: its loop, on the cores of its host, and its free slots."""

    __slots__ = ("cores", "free", "thread")

    def __init__(self, cores: _Cores, cost: Cost, slots: int) -> None:
        self.cores = cores
        self.thread = _Thread(cores, cost)
        self.free = slots


class _Service:
    """The stages, wired up. Each method of a stage gets a call's number and hands it to the next one."""

    def __init__(self, calls: Sequence[Work], costs: Costs, layout: Layout) -> None:
        self._calls = calls
        self._costs = costs
        self._layout = layout
        self._clock = clock = _Clock()
        self._backlog: deque[int] = deque()
        self._pulling: deque[_Worker] = deque()  # with free slots, the one that has waited longest first
        self._worker_of: list[_Worker | None] = [None] * len(calls)
        self._hosts: list[_Cores] = []
        for _ in range(layout.scaler.hosts if layout.scaler else layout.hosts):
            self._start_host()
        shared = self._hosts[0] if layout.one_machine else None
        self._callers = _Thread(shared, costs.caller) if shared else None
        self._gateways = [_Thread(shared or _OwnCore(clock), costs.gateway) for _ in range(layout.gateways)]
        self._redis = [_Thread(shared or _OwnCore(clock), costs.redis) for _ in range(layout.redis)]
        self._open = 0
        self._result = Simulated([0.0] * len(calls), answers=[0] * len(calls))

    def run(self) -> Simulated:
        clock, calls, result = self._clock, self._calls, self._result
        if self._layout.scaler:
            clock.at(self._layout.scaler.looks_every_s, self._look, None)
        for number, call in enumerate(calls):
            while clock.next_s() <= call.at_s:
                clock.step()
            clock.now = call.at_s
            self._arrive(number)
        while self._open:
            clock.step()
        result.end_s = clock.now
        result.host_cpu_s = sum(host.used_s for host in self._hosts)
        result.gateway_cpu_s = sum(thread.used_s for thread in self._gateways)
        result.redis_cpu_s = sum(thread.used_s for thread in self._redis)
        return result

    # ---- in ----

    def _arrive(self, call: int) -> None:
        self._open += 1
        self._result.in_flight_peak = max(self._result.in_flight_peak, self._open)
        if self._callers:
            self._callers.give(self._send, call)
        else:
            self._send(call)

    def _send(self, call: int) -> None:
        self._gateway_of(call).give(self._put, call)

    def _put(self, call: int) -> None:
        self._redis_of(call).give(self._queue, call)

    def _queue(self, call: int) -> None:
        if self._pulling:
            worker = self._pulling.popleft()
            self._take(worker, call)
            if worker.free:
                self._pulling.append(worker)
        else:
            self._backlog.append(call)
            self._result.backlog_peak = max(self._result.backlog_peak, len(self._backlog))

    # ---- a slot ----

    def _take(self, worker: _Worker, call: int) -> None:
        worker.free -= 1
        self._worker_of[call] = worker
        worker.thread.give(self._start, call)

    def _start(self, call: int) -> None:
        work, cores = self._calls[call], self._taken_by(call).cores
        if math.isinf(work.cpu_s):
            task = cores.run(math.inf, self._end, call)
            self._clock.at(self._clock.now + work.limit_s, self._limit, task)
            return
        cpu_s = work.cpu_s * self._costs.cold if cores.is_idle else work.cpu_s
        self._result.program_cpu_s += cpu_s
        cores.run(cpu_s, self._sleep if work.idle_s else self._end, call)

    def _sleep(self, call: int) -> None:
        self._clock.at(self._clock.now + self._calls[call].idle_s, self._end, call)

    def _limit(self, task: _Task) -> None:
        task.end = True
        task.then(task.what)

    def _end(self, call: int) -> None:
        self._taken_by(call).thread.give(self._settle, call)

    def _settle(self, call: int) -> None:
        worker = self._taken_by(call)
        worker.free += 1
        if self._backlog:
            self._take(worker, self._backlog.popleft())
        elif worker.free == 1:
            self._pulling.append(worker)
        self._redis_of(call).give(self._reply, call)

    # ---- out ----

    def _reply(self, call: int) -> None:
        self._gateway_of(call).give(self._receive if self._callers else self._answer, call)

    def _receive(self, call: int) -> None:
        assert self._callers is not None
        self._callers.give(self._answer, call)

    def _answer(self, call: int) -> None:
        self._open -= 1
        self._result.answers[call] += 1
        self._result.latency_s[call] = self._clock.now - self._calls[call].at_s + self._costs.fixed_s

    # ---- who ----

    def _gateway_of(self, call: int) -> _Thread:
        return self._gateways[call % len(self._gateways)]

    def _redis_of(self, call: int) -> _Thread:
        return self._redis[call % len(self._redis)]

    def _taken_by(self, call: int) -> _Worker:
        worker = self._worker_of[call]
        assert worker is not None
        return worker

    # ---- hosts ----

    def _start_host(self) -> None:
        layout = self._layout
        cores = _Cores(self._clock, layout.cores, layout.slice_s)
        self._hosts.append(cores)
        workers = max(1, layout.cores // CORES_A_WORKER)
        slots = layout.slots or SLOTS_A_CORE * layout.cores
        for n in range(workers):
            worker = _Worker(cores, self._costs.worker, slots // workers + (n < slots % workers))
            while self._backlog and worker.free:
                self._take(worker, self._backlog.popleft())
            if worker.free:
                self._pulling.append(worker)

    def _look(self, _: None) -> None:
        """Of the scaler."""
        scaler = self._layout.scaler
        assert scaler is not None
        if self._backlog:
            for _missing in range(self._layout.hosts - scaler.hosts):
                self._clock.at(self._clock.now + scaler.start_s, lambda _: self._start_host(), None)
        else:
            self._clock.at(self._clock.now + scaler.looks_every_s, self._look, None)
