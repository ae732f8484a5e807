"""How much may come in.

Everything that waits in this process is counted here, in calls and in bytes of their requests, and bounded here:
the batcher's list, the futures of the reply router and the bodies being read hold nothing without a permit. A
permit is taken before the request is read, grows with what turns out to be in it, and is given back when its
task has ended, as it does when the caller goes away: its call is cancelled then.

A tenant can have a bound of its own on calls. What could never fit, however empty the gateway is, is too large
(413), so that nobody sends it again and again.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from gateway.metrics import Metrics
from gateway.readiness import Readiness
from gateway.tenants import Tenant
from sandbox.errors import CallTooLarge, Overloaded, Unavailable
from sandbox.settings import GatewaySettings

#: What keeps us from serving is looked at more often, but `Retry-After` counts in whole seconds.
UNAVAILABLE_RETRY_S = 1.0
#: A full gateway says nothing above this, however long its calls take: places come free all the time.
LONGEST_RETRY_S = 60.0


class Admission:
    """Permits for calls, and for the bytes of their requests."""

    def __init__(self, bounds: GatewaySettings, readiness: Readiness, metrics: Metrics) -> None:
        self.held = 0
        self.held_bytes = 0
        self.most_bytes = bounds.max_in_flight_bytes
        self._most = bounds.max_in_flight
        self._held_by: dict[str, int] = {}
        self._readiness = readiness
        self._metrics = metrics
        self._usual_s = 0.0
        self._emptied: asyncio.Event | None = None
        # Asked when somebody reads the metrics: to set them with each permit took 5 µs a request.
        metrics.in_flight.set_function(lambda: self.held)
        metrics.in_flight_bytes.set_function(lambda: self.held_bytes)

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
        held = self._held_of(tenant)
        if tenant.max_in_flight is not None and held + calls > tenant.max_in_flight:
            raise self._refusal(
                "tenant", f"tenant {tenant.name} has its {tenant.max_in_flight} calls in flight here"
            )
        if self.held + calls > self._most:
            raise self._refusal("full", f"{self.held} of {self._most} calls are in flight here")
        self.held += calls
        self._held_by[tenant.name] = held + calls

    def take_bytes(self, size: int) -> None:
        """Count `size` bytes more. Raises Overloaded, then none is counted."""
        if self.held_bytes + size > self.most_bytes:
            raise self._refusal(
                "bytes", f"{self.held_bytes} of {self.most_bytes} bytes of requests are in flight here"
            )
        self.held_bytes += size

    def give_back_bytes(self, size: int) -> None:
        """Count `size` bytes less."""
        self.held_bytes -= size

    def give_back(self, tenant: Tenant, calls: int, size: int) -> None:
        """Count `calls` and `size` bytes less."""
        self.held -= calls
        self.give_back_bytes(size)
        self._held_by[tenant.name] -= calls
        if self._emptied is not None and self.held == 0:
            self._emptied.set()

    def _held_of(self, tenant: Tenant) -> int:
        name = tenant.name
        if name not in self._held_by:
            self._held_by[name] = 0
            self._metrics.tenant_in_flight.labels(name).set_function(lambda: self._held_by[name])
        return self._held_by[name]

    def _refusal(self, reason: str, message: str) -> Overloaded:
        self._metrics.shed.labels(reason).inc()
        return Overloaded(message, retry_after_s=self.retry_after_s())

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
    """One request's share of the bounds, held for the length of a `with` block."""

    __slots__ = ("_admission", "_calls", "_since", "_size", "_tenant")

    def __init__(self, admission: Admission, tenant: Tenant) -> None:
        self._admission = admission
        self._tenant = tenant
        self._calls = 1
        self._size = 0
        self._since = asyncio.get_running_loop().time()

    def widen(self, calls: int) -> None:
        """Hold `calls` in all. Raises Overloaded or CallTooLarge, then the permit stays as it was."""
        if calls > self._calls:
            most = self._tenant.max_in_flight
            if most is not None and calls > most:
                raise CallTooLarge(f"calls: {calls} at once, and tenant {self._tenant.name} may have {most}")
            self._admission.take(self._tenant, calls - self._calls)
            self._calls = calls

    def charge(self, size: int) -> None:
        """Hold `size` bytes in all. Raises Overloaded or CallTooLarge, then the permit stays as it was."""
        if size > self._size:
            if size > self._admission.most_bytes:
                raise CallTooLarge(
                    f"the request is larger than the {self._admission.most_bytes} bytes that this gateway holds"
                )
            self._admission.take_bytes(size - self._size)
            self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self._admission.learn(asyncio.get_running_loop().time() - self._since)
        self._admission.give_back(self._tenant, self._calls, self._size)
