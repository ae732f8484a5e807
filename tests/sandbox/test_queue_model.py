"""The queue against a model of what it promises, over long sequences of steps in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from sandbox.calls import CallStatus, ToolResult
from sandbox.queue import CallQueue, Delivery, Found, Outcome, Place

from .queueing import KEYS, calls, lag, pending

NAMES = ("a", "b", "c")
GATEWAYS = ("gw-1", "gw-2")
WORKERS = ("w1", "w2")
ENDS = ("verdict", "verdict", "fault", "poison", "nothing")


@dataclass
class Record:
    """What the model knows of a name: one life of a call, from its put until it is forgotten."""

    waiters: set[str]
    is_job: bool
    is_cancelled: bool = False
    result: bytes | None = None
    is_fault: bool = False  # a kept fault, of a job

    @property
    def is_open(self) -> bool:
        return self.result is None and not self.is_cancelled


@dataclass
class Model:
    """The promises, without streams, leases and keys."""

    records: dict[str, Record] = field(default_factory=dict)
    undelivered: list[tuple[str, Record]] = field(default_factory=list)
    runs: dict[Place, tuple[str, Record]] = field(default_factory=dict)  # all that were ever taken
    holders: dict[Place, str] = field(default_factory=dict)  # "": handed back
    replies: dict[str, list[tuple[str, bytes]]] = field(default_factory=lambda: {"gw-1": [], "gw-2": []})
    orders: dict[str, list[Place]] = field(default_factory=lambda: {"w1": [], "w2": []})

    def wants(self, name: str, run: Record) -> bool:
        """Whether this run of a call is still to be done. One whose record expired is for the worker to answer."""
        known = self.records.get(name)
        return known is None or (known is run and known.is_open)

    def found(self, name: str) -> Found:
        """What `look` says."""
        known = self.records.get(name)
        if known is None or known.is_cancelled:
            return Found("unknown")
        if known.result is not None:
            return Found("done", known.result)
        place = next((place for place, (_, run) in self.runs.items() if run is known), None)
        holder = self.holders.get(place, "") if place else ""
        return Found("running", holder.encode()) if holder else Found("waiting")

    def cancel(self, name: str) -> None:
        """Nobody wants it; whoever runs it is told."""
        known = self.records[name]
        place = next((place for place, (_, run) in self.runs.items() if run is known), None)
        if place and self.holders.get(place):
            self.orders[self.holders[place]].append(place)
        known.is_cancelled = True


class Everybody:
    """Two gateways and two workers, which do by chance whatever they may do."""

    def __init__(self, redis_server: Any, queues: dict[str, CallQueue], seed: int) -> None:
        self.redis_server = redis_server
        self.queues = queues
        self.random = random.Random(seed)
        self.model = Model()
        self.deliveries: dict[Place, Delivery] = {}  # as they were last given out
        self.results = 0

    async def step(self) -> None:
        """Anybody does anything; what comes of it is what the model says."""
        gateway, worker = self.random.choice(GATEWAYS), self.random.choice(WORKERS)
        name = self.random.choice(NAMES)
        step = self.random.choice(
            [
                *[lambda: self.put(gateway, name, is_job=self.random.random() < 0.2)] * 5,
                lambda: self.put_another_call_of_the_name(gateway),
                *[lambda: self.cancel(gateway, self.random.sample(NAMES, 2))] * 3,
                lambda: self.stop(gateway, name),
                lambda: self.watch(gateway, name),
                *[lambda: self.read_replies(gateway)] * 2,
                *[lambda: self.take(worker, self.random.randint(1, 3))] * 4,
                lambda: self.reclaim(worker),
                *[lambda: self.settle(self.random.choice(ENDS))] * 4,
                lambda: self.renew(worker),
                lambda: self.resume(worker),
                lambda: self.hand_back(worker),
                lambda: self.read_orders(worker),
                *[lambda: self.expire(name)] * 2,
                self.queues[worker].trim,
            ]
        )
        await step()
        for asked in NAMES:
            assert await self.queues[gateway].look(self.key(asked)) == self.model.found(asked)

    def key(self, name: str) -> str:
        """The record's key."""
        return KEYS.call("", name)

    # ---- gateways ----

    async def put(self, gateway: str, name: str, is_job: bool) -> None:
        queue = self.queues[gateway]
        [(outcome, result)] = await queue.put(gateway, calls(queue, name, is_job=is_job))
        known = self.model.records.get(name)
        waiters = {gateway}
        if known and known.result is not None and not known.is_fault:
            assert (outcome, result) == ("kept", known.result)
        elif known and known.is_open:
            assert outcome == "joined"
            known.waiters |= waiters
            known.is_job |= is_job
        else:
            assert outcome == "queued"
            record = self.model.records[name] = Record(waiters, is_job)
            self.model.undelivered.append((name, record))

    async def put_another_call_of_the_name(self, gateway: str) -> None:
        if not self.model.records:
            return
        queue, name = self.queues[gateway], self.random.choice(list(self.model.records))
        [put] = await queue.put(gateway, calls(queue, name, code="another"))
        assert put.outcome == "other"

    async def cancel(self, gateway: str, chosen: list[str]) -> None:
        expected = [self.model.found(name) for name in chosen]
        assert await self.queues[gateway].cancel(gateway, [self.key(name) for name in chosen]) == expected
        for name in chosen:
            known = self.model.records.get(name)
            if known and known.is_open:
                known.waiters.discard(gateway)
                if not known.waiters and not known.is_job:
                    self.model.cancel(name)

    async def stop(self, gateway: str, name: str) -> None:
        assert await self.queues[gateway].stop(self.key(name)) == self.model.found(name)
        known = self.model.records.get(name)
        if known and known.is_open:
            for waiter in known.waiters:
                self.model.replies[waiter].append((self.key(name), b""))
            known.waiters.clear()
            self.model.cancel(name)

    async def watch(self, gateway: str, name: str) -> None:
        assert await self.queues[gateway].watch(gateway, self.key(name)) == self.model.found(name)
        known = self.model.records.get(name)
        if known and known.is_open:
            known.waiters.add(gateway)

    async def read_replies(self, gateway: str) -> None:
        """Each reply once, in the order in which it was given."""
        assert await self.queues[gateway].replies(gateway, block_s=0) == self.model.replies[gateway]
        self.model.replies[gateway].clear()

    # ---- workers ----

    async def take(self, worker: str, count: int) -> None:
        wanted: list[tuple[str, Record]] = []
        while self.model.undelivered and not wanted:  # it reads on while it finds none that somebody wants
            read, self.model.undelivered = self.model.undelivered[:count], self.model.undelivered[count:]
            wanted = [waits for waits in read if self.model.wants(*waits)]
        taken = await self.queues[worker].take(worker, count, block_s=0)
        for delivery, run in zip(taken, wanted, strict=True):
            assert delivery.call.id == run[0]
            self.deliveries[delivery.place] = delivery
            self.model.runs[delivery.place] = run
            self.model.holders[delivery.place] = worker

    async def reclaim(self, worker: str) -> None:
        """All leases have run out."""
        wanted = {place for place in self.model.holders if self.model.wants(*self.model.runs[place])}
        for delivery in await self.queues[worker].reclaim(worker, 0, 100):
            wanted.remove(delivery.place)
            self.deliveries[delivery.place] = delivery
        assert not wanted
        self.model.holders = {
            place: worker for place in self.model.holders if self.model.wants(*self.model.runs[place])
        }

    async def settle(self, end: str) -> None:
        """Of anything that was taken lately, whoever has it now, and twice at once."""
        if not self.deliveries:
            return
        place = self.random.choice(list(self.deliveries)[-5:])
        outcome = self.outcome(self.deliveries[place], end)
        expected = [place in self.model.holders, False]
        assert await self.queues["w1"].settle([outcome, outcome]) == expected
        if expected[0]:
            self.settled(place, outcome)

    def outcome(self, delivery: Delivery, end: str) -> Outcome:
        """A result that is like no other."""
        self.results += 1
        status = CallStatus.OK if end == "verdict" else CallStatus.INTERNAL_ERROR
        result = ToolResult(id=delivery.call.id, status=status, stdout=f"{self.results}")
        return Outcome(delivery, None if end == "nothing" else result, end == "poison")

    def settled(self, place: Place, outcome: Outcome) -> None:
        """The worker's word was the first, and counts if the call was not put anew meanwhile."""
        del self.model.holders[place]
        name, run = self.model.runs[place]
        if self.model.records.get(name) is not run:
            return
        if outcome.result is None:
            del self.model.records[name]
            return
        result = outcome.result.model_dump_json().encode()
        for waiter in run.waiters:
            self.model.replies[waiter].append((self.key(name), result))
        is_fault = outcome.result.status.is_fault and not outcome.is_poison
        if is_fault and not run.is_job:
            del self.model.records[name]
        else:
            run.result, run.is_fault, run.is_cancelled, run.waiters = result, is_fault, False, set()

    async def renew(self, worker: str) -> None:
        lost = await self.queues[worker].renew(worker, list(self.deliveries.values()))
        assert {delivery.place for delivery in lost} == {
            place
            for place in self.deliveries
            if self.model.holders.get(place) != worker or not self.model.wants(*self.model.runs[place])
        }

    async def resume(self, worker: str) -> None:
        """Some of the answers to `take` have not come."""
        ours = [place for place, holder in self.model.holders.items() if holder == worker]
        held = set(self.random.sample(ours, len(ours) // 2))
        missed = set(ours) - held
        wanted = {place for place in missed if self.model.wants(*self.model.runs[place])}
        brought = await self.queues[worker].resume(worker, held, 100)
        assert {delivery.place for delivery in brought} == wanted
        for place in missed - wanted:
            del self.model.holders[place]

    async def hand_back(self, worker: str) -> None:
        await self.queues[worker].hand_back(worker, list(self.deliveries.values()))
        self.model.holders = {
            place: "" if holder == worker else holder for place, holder in self.model.holders.items()
        }

    async def read_orders(self, worker: str) -> None:
        assert await self.queues[worker].orders(worker, block_s=0) == self.model.orders[worker]
        self.model.orders[worker].clear()

    # ---- others ----

    async def expire(self, name: str) -> None:
        """A record whose time has come is gone."""
        with self.redis_server.client() as stranger:
            stranger.delete(self.key(name))
        self.model.records.pop(name, None)

    async def end(self) -> None:
        """All that is wanted runs, everybody has what he waited for, and the counts are exact."""
        await self.reclaim("w1")
        while self.model.undelivered:
            await self.take("w1", 3)
        assert await self.queues["w1"].take("w1", 1, block_s=0) == []
        for place in list(self.model.holders):
            outcome = self.outcome(self.deliveries[place], "verdict")
            assert await self.queues["w1"].settle([outcome]) == [True]
            self.settled(place, outcome)
        assert not any(record.is_open for record in self.model.records.values())
        for gateway in GATEWAYS:
            await self.read_replies(gateway)
        assert (lag(self.redis_server), pending(self.redis_server)) == (0, 0)
        assert self.redis_server.leaks() == []


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_steps_keeps_the_promises(redis_server, open_queue, seed: int) -> None:
    """No reply is lost, doubled or given to who has left; no call runs that nobody wants; nothing stays behind."""
    everybody = Everybody(redis_server, {name: await open_queue() for name in GATEWAYS + WORKERS}, seed)
    for _ in range(800):
        await everybody.step()
    await everybody.end()
