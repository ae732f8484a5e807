"""Who may come in.

Everything that waits in this process is counted here, in calls, and bounded here: the batcher's list, the
futures of the reply router and the bodies being read hold nothing without a permit. A permit is taken
before the request is read and given back when its task has ended, also when the caller has gone: its
program runs on and its place is not free.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType
from typing import Self

from gateway.metrics import Metrics
from gateway.readiness import Readiness
from gateway.tenants import Tenant
from sandbox.errors import Overloaded, Unavailable

#: What keeps us from serving is looked at once a second, so nothing changes sooner.
UNAVAILABLE_RETRY_S = 1.0
#: A full gateway says nothing above this, however long its calls take: places come free all the time.
LONGEST_RETRY_S = 60.0


class Admission:
    """Permits for calls."""

    def __init__(self, bound: int, readiness: Readiness, metrics: Metrics) -> None:
        self.bound = bound
        self.held = 0
        self._held_by: Counter[str] = Counter()
        self._readiness = readiness
        self._metrics = metrics
        self._usual_s = 0.0
        self._emptied: asyncio.Event | None = None

    def enter(self, tenant: Tenant) -> Permit:
        """A permit for one call of a tenant. Raises Unavailable or Overloaded."""
        obstacle = self._readiness.obstacle()
        if obstacle is not None:
            self._metrics.shed.labels(obstacle.word).inc()
            raise Unavailable(obstacle.sentence, retry_after_s=UNAVAILABLE_RETRY_S)
        self.take(tenant, 1)
        return Permit(self, tenant)

    def take(self, tenant: Tenant, calls: int) -> None:
        """Count `calls` more. Raises Overloaded, then none is counted."""
        of_tenant = self._held_by.get(tenant.name, 0)
        if tenant.max_in_flight is not None and of_tenant + calls > tenant.max_in_flight:
            self._metrics.shed.labels("tenant").inc()
            raise Overloaded(
                f"tenant {tenant.name} has its {tenant.max_in_flight} calls in flight",
                retry_after_s=self.retry_after_s(),
            )
        if self.held + calls > self.bound:
            self._metrics.shed.labels("full").inc()
            raise Overloaded(
                f"{self.held} of {self.bound} calls are in flight here", retry_after_s=self.retry_after_s()
            )
        self._count(tenant, calls)

    def give_back(self, tenant: Tenant, calls: int) -> None:
        """Count `calls` less."""
        self._count(tenant, -calls)
        if self._emptied is not None and self.held == 0:
            self._emptied.set()

    def _count(self, tenant: Tenant, calls: int) -> None:
        self.held += calls
        self._held_by[tenant.name] += calls
        self._metrics.in_flight.set(self.held)

    def learn(self, seconds: float) -> None:
        """Note how long a request held its permit; the last twenty or so count."""
        self._usual_s += (seconds - self._usual_s) / 20

    def retry_after_s(self) -> float:
        """The time in which, at the present pace, everything that is held now will have left."""
        return round(min(max(self._usual_s, 1.0), LONGEST_RETRY_S), 1)

    async def emptied(self) -> None:
        """Wait until nothing is held."""
        if self.held:
            self._emptied = asyncio.Event()
            await self._emptied.wait()


class Permit:
    """One request's share of the bound, held for the length of a `with` block."""

    __slots__ = ("_admission", "_calls", "_since", "_tenant")

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._calls = 1
        self._since = asyncio.get_running_loop().time()

    def widen(self, calls: int) -> None:
        """Hold `calls` in all. Raises Overloaded, then the permit stays as it was."""
        if calls > self._calls:
            self._admission.take(self._tenant, calls - self._calls)
            self._calls = calls

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self._admission.learn(asyncio.get_running_loop().time() - self._since)
        self._admission.give_back(self._tenant, self._calls)
