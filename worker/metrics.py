"""All metrics of a worker. Base units; no label that a caller can choose."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sandbox.calls import CallStatus, ToolResult

#: Around the promise of 0.3 s.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60)


class WorkerMetrics:
    """Made once by the worker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "sandbox_worker_calls_total", "Calls settled, by status.", ["status"], registry=self.registry
        )
        self._by_status = {status: self._calls.labels(status.value) for status in CallStatus}
        self._wall = Histogram(
            "sandbox_worker_execution_seconds", "From fork to end.", buckets=BUCKETS_S, registry=self.registry
        )
        self._queue = Histogram(
            "sandbox_worker_queue_wait_seconds",
            "From acceptance to start.",
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self._cpu = Counter(
            "sandbox_worker_program_cpu_seconds_total", "CPU time of programs.", registry=self.registry
        )
        self.slots = Gauge(
            "sandbox_worker_slots", "Calls this worker can run at a time.", registry=self.registry
        )
        self.busy = Gauge("sandbox_worker_busy_slots", "Calls it runs now.", registry=self.registry)
        self.reclaimed = Counter(
            "sandbox_worker_reclaimed_total", "Calls taken over from a silent worker.", registry=self.registry
        )
        self.jail_failures = Counter(
            "sandbox_worker_jail_failures_total", "Calls that no jail could run.", registry=self.registry
        )

        self.lost = Counter(
            "sandbox_worker_lost_calls_total",
            "Calls killed because they were another worker's by then, or nobody's.",
            registry=self.registry,
        )
        self._second = Counter(
            "sandbox_worker_second_replies_total",
            "Results dropped because another one was first, or Redis had lost the call.",
            registry=self.registry,
        )
        self._cancelled = Counter(
            "sandbox_worker_cancelled_calls_total",
            "Calls killed because nobody waited for them any more.",
            registry=self.registry,
        )

    def settled(self, result: ToolResult | None, was_ours: bool) -> None:
        """Count one outcome, and by `was_ours` whether it was the one that counts."""
        if not was_ours:
            if result is not None:
                self._second.inc()
            return
        if result is None:
            self._cancelled.inc()
            return
        self._by_status[result.status].inc()
        self._queue.observe(result.usage.queue_s)
        if not result.status.is_fault:
            self._wall.observe(result.usage.wall_s)
            self._cpu.inc(result.usage.cpu_s)
