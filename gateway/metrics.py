"""All metrics of one gateway process, with their units and buckets.

Every process serves its own; several gateways behind one port are told apart by whoever scrapes them. No
label holds anything that a caller can choose: routes, codes, statuses, reasons and tenants are closed lists.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from sandbox.calls import CallStatus

#: The whole way of a call aims at 0.3 s; a program may run for minutes.
CALL_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
#: One round trip to Redis; the upper end is a Redis that is in trouble.
PUT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 1.0, 5.0)
#: Powers of two up to the largest batch and the largest flush.
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """One attribute a metric, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sandbox_gateway_requests",
            "HTTP requests answered; a websocket that was let in is one with 101.",
            ("route", "code"),
            registry=self.registry,
        )
        self.websockets = Gauge(
            "sandbox_gateway_websockets",
            "Websockets that are open now.",
            registry=self.registry,
        )
        self.calls = Counter(
            "sandbox_gateway_calls",
            "Calls that got a result, by its status; faults are among them.",
            ("status",),
            registry=self.registry,
        )
        self.by_status = {status: self.calls.labels(status.value) for status in CallStatus}
        self.cancelled = Counter(
            "sandbox_gateway_cancelled_calls",
            "Calls that were cancelled because their last caller had gone.",
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "sandbox_gateway_in_flight_calls",
            "Calls held now, from their arrival to the end of their answer.",
            registry=self.registry,
        )
        self.in_flight_bytes = Gauge(
            "sandbox_gateway_in_flight_bytes",
            "Bytes of the requests that are held now.",
            registry=self.registry,
        )
        self.tenant_in_flight = Gauge(
            "sandbox_gateway_tenant_in_flight_calls",
            "Calls held now, by the tenant whose they are.",
            ("tenant",),
            registry=self.registry,
        )
        self.keys_stale_seconds = Gauge(
            "sandbox_gateway_keys_stale_seconds",
            "Seconds for which the keys file has been broken and the keys from before it hold; 0 when it is not.",
            registry=self.registry,
        )
        self.shed = Counter(
            "sandbox_gateway_shed_calls",
            "Calls refused with 429 or 503 before they were queued.",
            ("reason",),
            registry=self.registry,
        )
        self.batch_calls = Histogram(
            "sandbox_gateway_batch_calls",
            "Calls in one batch request.",
            buckets=COUNTS,
            registry=self.registry,
        )
        self.flush_calls = Histogram(
            "sandbox_gateway_flush_calls",
            "Calls put into the queue by one pipeline.",
            buckets=COUNTS,
            registry=self.registry,
        )
        self.put_seconds = Histogram(
            "sandbox_gateway_put_seconds",
            "Seconds that one pipeline into the queue took.",
            buckets=PUT_SECONDS,
            registry=self.registry,
        )
        self.call_seconds = Histogram(
            "sandbox_gateway_call_seconds",
            "Seconds from a call's acceptance to its answer.",
            buckets=CALL_SECONDS,
            registry=self.registry,
        )
        self.estimated_wait = Gauge(
            "sandbox_gateway_estimated_wait_seconds",
            "Seconds that a call which comes now would wait for a worker; NaN while nobody can tell.",
            ("priority",),
            registry=self.registry,
        )
        self.held_back = Gauge(
            "sandbox_gateway_held_back_calls",
            "Calls that wait in this process for their tenant's turn, and so are not in Redis yet.",
            ("priority",),
            registry=self.registry,
        )
        self.waiting = Gauge(
            "sandbox_gateway_waiting_calls",
            "Calls in Redis, of all gateways, that no worker has taken.",
            ("priority",),
            registry=self.registry,
        )
        self.running = Gauge(
            "sandbox_gateway_running_calls",
            "Calls, of all gateways, that workers have taken and not settled.",
            ("priority",),
            registry=self.registry,
        )
        self.redis_used = Gauge(
            "sandbox_gateway_redis_used_bytes",
            "Memory that Redis uses.",
            registry=self.registry,
        )
        self.redis_max = Gauge(
            "sandbox_gateway_redis_max_bytes",
            "Memory that Redis may use; 0 for as much as there is.",
            registry=self.registry,
        )
        self.replies_dropped = Counter(
            "sandbox_gateway_replies_dropped",
            "Replies that nobody waited for any more, or that a broken read brought again.",
            registry=self.registry,
        )
        self.replies_lost = Counter(
            "sandbox_gateway_replies_lost",
            "Calls answered with a fault at their deadline without knowing why no reply had come.",
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Everything in the text format of Prometheus."""
        return generate_latest(self.registry)
