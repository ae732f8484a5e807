"""Permits: what they hold, what they refuse, and that all of it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from gateway.admission import LONGEST_RETRY_S, Admission, Permit
from gateway.metrics import Metrics
from gateway.tenants import ANONYMOUS, Tenant
from sandbox.errors import CallTooLarge, Overloaded
from sandbox.settings import GatewaySettings

from .conftest import Serve, Service, make_admission, until

CALLS, BYTES = 10, 4096
TENANTS = [Tenant("small", max_in_flight=3), Tenant("large", max_in_flight=8), Tenant("free")]

#: What can happen to a permit: it is taken, grows in calls, grows in bytes, and ends well or by an error.
STEPS = st.one_of(
    st.tuples(st.just("enter"), st.sampled_from(TENANTS)),
    st.tuples(st.just("widen"), st.integers(0, 12)),
    st.tuples(st.just("charge"), st.integers(0, 5000)),
    st.tuples(st.just("leave"), st.sampled_from([None, ValueError()])),
)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


class Model:
    """What permits hold, counted in the plainest way."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.open: list[tuple[Tenant, Permit, int, int]] = []

    def step(self, what: str, how: Any, which: int) -> None:
        if what == "enter":
            self.open.append((how, self.admission.enter(how).__enter__(), 1, 0))
        elif self.open:
            tenant, permit, calls, size = self.open.pop(which % len(self.open))
            try:
                if what == "widen":
                    permit.widen(how)
                    calls = max(calls, how)
                elif what == "charge":
                    permit.charge(how)
                    size = max(size, how)
            finally:
                if what == "leave":
                    permit.__exit__(type(how) if how else None, how, None)
                else:
                    self.open.append((tenant, permit, calls, size))

    def check(self, metrics: Metrics) -> None:
        held = {tenant: sum(c for t, _, c, _ in self.open if t is tenant) for tenant in TENANTS}
        size = sum(size for *_, size in self.open)
        assert (self.admission.held, self.admission.held_bytes) == (sum(held.values()), size)
        assert 0 <= self.admission.held <= CALLS
        assert 0 <= self.admission.held_bytes <= BYTES
        for tenant, calls in held.items():
            assert 0 <= calls <= (tenant.max_in_flight or CALLS)
            name = "sandbox_gateway_tenant_in_flight_calls"
            assert value(metrics.registry, name, tenant=tenant.name) == calls
        assert value(metrics.registry, "sandbox_gateway_in_flight_calls") == self.admission.held
        assert value(metrics.registry, "sandbox_gateway_in_flight_bytes") == size


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(STEPS, st.integers(0, 20)), max_size=40))
def test_what_is_held_is_what_was_taken(steps: list[tuple[tuple[str, Any], int]]) -> None:
    """In any order of events nothing is counted twice, no bound is passed, and all comes back at the end."""

    async def play() -> None:
        admission = await make_admission(max_in_flight=CALLS, max_in_flight_bytes=BYTES)
        model = Model(admission)
        for (what, how), which in steps:
            with contextlib.suppress(Overloaded, CallTooLarge):
                model.step(what, how, which)
            model.check(admission._metrics)
        while model.open:
            model.step("leave", None, 0)
        model.check(admission._metrics)
        assert (admission.held, admission.held_bytes) == (0, 0)
        await admission.emptied()

    asyncio.run(play())


async def test_retry_after_follows_the_pace() -> None:
    """The time to wait is how long calls take of late, at least a second and at most a minute."""
    admission = await make_admission(max_in_flight=1)
    assert admission.retry_after_s() == 1.0
    for seconds, expected in ((5.0, 5.0), (1000.0, LONGEST_RETRY_S), (0.1, 1.0)):
        for _ in range(400):
            admission.learn(seconds)
        assert admission.retry_after_s() == pytest.approx(expected, abs=0.1)


async def test_a_permit_that_cannot_widen_stays_as_it_was() -> None:
    """A refused batch gives back exactly what it held."""
    admission = await make_admission(max_in_flight=3)
    with admission.enter(ANONYMOUS) as permit:
        permit.widen(2)
        with pytest.raises(Overloaded):
            permit.widen(4)
        assert admission.held == 2
    assert admission.held == 0
    await admission.emptied()


async def test_a_tenant_has_no_more_than_its_calls() -> None:
    """At its own bound a tenant is refused by name, and the others are not."""
    admission = await make_admission()
    small = Tenant("small", max_in_flight=2)
    with admission.enter(small) as permit:
        permit.widen(2)
        with pytest.raises(Overloaded, match="tenant small has its 2 calls in flight here"):
            admission.enter(small)
        with admission.enter(Tenant("other")):
            assert admission.held == 3
    with admission.enter(small):
        assert admission.held == 1


async def test_a_batch_that_a_tenant_may_never_have_is_too_large() -> None:
    """It is told so, which makes the client send smaller ones, and not to come back later."""
    admission = await make_admission()
    with (
        admission.enter(Tenant("small", max_in_flight=2)) as permit,
        pytest.raises(CallTooLarge, match="3 at once, and tenant small may have 2"),
    ):
        permit.widen(3)


async def body_in_parts(*parts: bytes | asyncio.Event) -> AsyncIterator[bytes]:
    """Sends parts of a body, and waits in between."""
    for part in parts:
        if isinstance(part, bytes):
            yield part
        else:
            await part.wait()


def shed(service: Service, reason: str) -> float:
    registry = service.gateway.metrics.registry
    return value(registry, "sandbox_gateway_shed_calls_total", reason=reason)


async def test_bodies_that_are_being_read_are_bounded(serve: Serve) -> None:
    """A chunked body counts as far as it has come, and holds its place until its request has ended."""
    service = await serve(gateway={"max_in_flight_bytes": 1024})
    body = json.dumps({"code": "echo", "stdin": "x" * 600}).encode()
    go_on = asyncio.Event()
    half = asyncio.create_task(
        service.http.post("/v1/run", content=body_in_parts(body[:500], go_on, body[500:]))
    )
    await until(lambda: service.gateway.admission.held_bytes == 500)
    for content in (body, body_in_parts(body[:10], body[10:])):
        refused = await service.http.post("/v1/run", content=content)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["message"].endswith(" of 1024 bytes of requests are in flight here")
    assert shed(service, "bytes") == 2
    go_on.set()
    assert (await half).status_code == 200
    assert service.gateway.admission.held_bytes == 0
    assert (await service.http.post("/v1/run", content=body)).status_code == 200


async def test_a_declared_body_is_counted_once_and_until_its_answer(serve: Serve) -> None:
    """What a request says it has is taken before the first byte, and is not taken again as it comes."""
    service = await serve(gateway={"max_in_flight_bytes": 1024})
    body = json.dumps({"code": "hold", "stdin": "x" * 600}).encode()
    held = asyncio.create_task(service.http.post("/v1/run", content=body))
    await service.worker.has_seen(1)
    assert service.gateway.admission.held_bytes == len(body)
    assert (await service.http.post("/v1/run", content=body)).status_code == 429
    service.worker.released.set()
    assert (await held).status_code == 200
    assert service.gateway.admission.held_bytes == 0


async def test_a_request_that_never_fits_is_too_large(serve: Serve) -> None:
    """With a low bound on all bytes, a larger request is 413 and not told to come back."""
    service = await serve(gateway={"max_in_flight_bytes": 1024})
    for content in (b"x" * 1025, body_in_parts(b"x" * 1000, b"x" * 25)):
        response = await service.http.post("/v1/run", content=content)
        assert (response.status_code, response.json()["error"]["name"]) == (413, "CallTooLarge")
    assert GatewaySettings().max_body_bytes < GatewaySettings().max_in_flight_bytes
