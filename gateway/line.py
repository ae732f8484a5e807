"""The line before the batcher: whose call leaves next.

Theory of operation. A request lays its call in the line (`push`). The batcher takes calls from it (`pop`) while it
packs a round trip, and puts them into the streams in that order. A call is over by its answer, whatever that is
(`answered`). One that nobody wants any more is over too, and leaves the line at once: its permit is given back, so
nothing else would bound how many of those stand here.

Why calls are held back. Once in a stream a call cannot be overtaken, since workers read a stream in its order. Whoever
sends ten thousand calls at once would have them all done before the next caller's first. So where tenants are named,
only so many of our calls of a priority may lie unanswered in Redis as keep the workers busy: twice what they run at a
time, so that each finds the next call there when it has settled one. The others wait here, where the next one can
still be chosen. Where there are no keys there is one tenant, whom nobody need be kept from, and no window.

What that costs. The lag of a stream, which autoscalers read, no longer shows what waits in gateways. The gauge
`sandbox_gateway_held_back_calls` does, and has to be added to it. And each gateway has a window of its own, so turns
are kept between the tenants of one gateway; between gateways it is who comes first.

Who is next. `tool` goes before `judge`, but of eight calls one is a judge's while it has any that may leave, as at the
workers (`CallQueue.take`). Within a priority tenants have turns, and in its turn a tenant sends as many calls as its
weight says: deficit round robin, where every call costs one. A tenant's own calls leave in the order of their arrival.
Nothing is kept for who has no calls: who comes back begins like a newcomer, at the end of the turns.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, Protocol, TypeVar

from gateway.metrics import Metrics
from gateway.tenants import Tenant
from sandbox.calls import ToolCall
from sandbox.queue import FLOOR_SHARE

#: Calls of a priority in Redis for each slot of the live workers, where there are tenants.
CALLS_PER_SLOT = 2
#: And at least so many: a few slots would get each call by a round trip of its own.
LEAST_WINDOW = 64


class Queued(Hashable, Protocol):
    """What this file needs to know of a call, which is equal to itself only."""

    @property
    def call(self) -> ToolCall:
        """The call itself."""


T = TypeVar("T", bound=Queued)


class Line(Generic[T]):
    """Calls that wait to be put, by priority and tenant."""

    def __init__(self, metrics: Metrics, slots: Callable[[], int] | None = None) -> None:
        """`slots` tells how many calls the live workers run at a time; None: there is one tenant, and no window."""
        self._slots = slots
        self._tool, self._judge = _Lane[T](), _Lane[T]()
        self._lanes = {"tool": self._tool, "judge": self._judge}
        self._in_redis: set[T] = set()
        self._judge_waits_for = 0  # tool calls that have left while one of judge could have
        for priority in self._lanes:
            metrics.held_back.labels(priority).set_function(partial(self.held_back, priority))

    def __len__(self) -> int:
        return self._tool.length + self._judge.length

    def held_back(self, priority: str) -> int:
        """Calls of one priority that stand here."""
        return self._lanes[priority].length

    def ahead(self, priority: str, tenant: Tenant) -> int:
        """Calls of this priority that would leave before one that this tenant pushed now, to within a round."""
        return self._lanes[priority].ahead(tenant)

    def push(self, queued: T, tenant: Tenant) -> None:
        """Put a call at the end of its tenant's line."""
        self._lanes[queued.call.priority].push(queued, tenant)

    def pop(self) -> T | None:
        """The call that leaves next; None when there is none, or none of which more may lie in Redis.

        Where there is a window the call has a place in it until `answered`.
        """
        lane = self._next()
        if lane is None:
            return None
        queued = lane.pop()
        if self._slots is not None:
            lane.in_redis += 1
            self._in_redis.add(queued)
        return queued

    def clear(self) -> list[T]:
        """Take out all calls, whatever lies in Redis."""
        return self._tool.clear() + self._judge.clear()

    def answered(self, queued: T) -> bool:
        """Forget a call that is over: its place in the line, or in Redis. True when another may leave for it."""
        lane = self._lanes[queued.call.priority]
        if queued not in self._in_redis:
            lane.remove(queued)
            return False
        self._in_redis.remove(queued)
        lane.in_redis -= 1
        return lane.length > 0

    def _next(self) -> _Lane[T] | None:
        tool, judge = self._tool.length > 0, self._judge.length > 0
        if self._slots is not None:
            window = max(LEAST_WINDOW, CALLS_PER_SLOT * self._slots())
            tool = tool and self._tool.in_redis < window
            judge = judge and self._judge.in_redis < window
        if judge and not (tool and self._judge_waits_for < FLOOR_SHARE - 1):
            self._judge_waits_for = 0
            return self._judge
        self._judge_waits_for = self._judge_waits_for + 1 if judge else 0
        return self._tool if tool else None


class _Lane(Generic[T]):
    """The calls of one priority, and whose turn it is."""

    __slots__ = ("_by_tenant", "_shares", "_turns", "in_redis", "length")

    def __init__(self) -> None:
        self.length = 0
        self.in_redis = 0
        self._by_tenant: dict[str, _Share[T]] = {}  # of those that have calls
        self._turns: deque[_Share[T]] = deque()  # the same, and the first one has its turn
        self._shares: dict[T, _Share[T]] = {}  # by each of their calls

    def push(self, queued: T, tenant: Tenant) -> None:
        share = self._by_tenant.get(tenant.name)
        if share is None:
            share = self._by_tenant[tenant.name] = _Share(tenant)
            self._turns.append(share)
        share.tenant = tenant  # whose weight may be another than it was at its last call
        share.calls[queued] = None
        self._shares[queued] = share
        self.length += 1

    def pop(self) -> T:
        share = self._turns[0]
        queued, _ = share.calls.popitem(last=False)
        del self._shares[queued]
        self.length -= 1
        share.left -= 1
        if not share.calls:
            self._turns.popleft()
            del self._by_tenant[share.tenant.name]
        elif share.left == 0:
            share.left = share.tenant.weight
            self._turns.rotate(-1)
        return queued

    def remove(self, queued: T) -> None:
        share = self._shares.pop(queued, None)
        if share is None:
            return
        del share.calls[queued]
        self.length -= 1
        if not share.calls:
            self._turns.remove(share)
            del self._by_tenant[share.tenant.name]

    def clear(self) -> list[T]:
        calls = [queued for share in self._turns for queued in share.calls]
        self._shares.clear()
        self._turns.clear()
        self._by_tenant.clear()
        self.length = 0
        return calls

    def ahead(self, tenant: Tenant) -> int:
        own = self._by_tenant.get(tenant.name)
        own_calls = len(own.calls) if own is not None else 0
        turns = own_calls // tenant.weight + 1
        others = (share for share in self._turns if share is not own)
        return own_calls + sum(min(len(share.calls), turns * share.tenant.weight) for share in others)


class _Share(Generic[T]):
    """One tenant's calls of one priority."""

    __slots__ = ("calls", "left", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.calls: OrderedDict[T, None] = OrderedDict()  # a dict is slow to find its first one
        self.left = tenant.weight  # calls that it may still send in this turn
