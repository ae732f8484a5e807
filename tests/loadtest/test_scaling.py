"""What a call costs while processes become more, measured on a real service."""

from __future__ import annotations

import os

import pytest

from loadtest.processes import processes_of
from loadtest.scaling import _threads, measure_scaling, pin
from loadtest.stack import own_stack
from sandbox import SandboxClient

pytestmark = pytest.mark.usefixtures("_jail_runtime")


def test_a_row_counts_every_part_that_a_call_passes() -> None:
    """Each part has used CPU time, the total is that of all, and the same service pinned is a row of its own."""
    free, pinned = measure_scaling([(1, 1)], 0.5)
    assert (free.pinned, pinned.pinned) == (False, True)
    for row in (free, pinned):
        assert (row.workers, row.gateways, row.errors) == (1, 1, {})
        assert row.calls > 16
        parts = (row.client_ms, row.gateway_ms, row.redis_ms, row.worker_ms, row.jail_ms)
        assert min(parts) > 0
        assert row.total_ms == pytest.approx(sum(parts))
    assert free.of_first == 1.0
    assert pinned.of_first == pytest.approx(pinned.total_ms / free.total_ms)


async def test_what_a_pinned_worker_starts_runs_on_its_core() -> None:
    """Workers take the cores by turns, with all that they have started; also a program that comes later."""
    cores = sorted(os.sched_getaffinity(0))
    with own_stack("--workers", "2", "--slots", "1", "--gateways", "1") as stack:
        pin(stack)
        workers = processes_of(stack.pid, "worker")
        bound = [{tuple(os.sched_getaffinity(thread)) for thread in _threads(worker)} for worker in workers]
        assert bound == [{(cores[number % len(cores)],)} for number in range(2)]
        async with SandboxClient(stack.url) as client:
            result = await client.run("import os; print(os.sched_getaffinity(0))")
    assert result.stdout in {f"{{{core}}}\n" for core in cores}
