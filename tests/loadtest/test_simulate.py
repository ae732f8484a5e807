"""The simulation, held against queueing theory, which knows these few cases exactly."""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from loadtest.simulate import Cost, Costs, Layout, Scaler, Simulated, Work, simulate

NOTHING = Costs()  # beside the programs
CALLS = 30_000


def poisson(rate: float, cpu_s: list[float], rng: random.Random) -> list[Work]:
    """Calls at random times."""
    at, calls = 0.0, []
    for each in cpu_s:
        at += rng.expovariate(rate)
        calls.append(Work(at, each))
    return calls


def one_host(calls: list[Work], cores: int, slots: int, slice_s: float = math.inf) -> Simulated:
    return simulate(calls, NOTHING, Layout(hosts=1, cores=cores, slots=slots, slice_s=slice_s))


def erlang_c(servers: int, load: float) -> float:
    """The share of calls that wait."""
    terms = [load**n / math.factorial(n) for n in range(servers)]
    last = load**servers / math.factorial(servers) / (1 - load / servers)
    return last / (sum(terms) + last)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.8), (4, 3.0), (10, 8.5)])
def test_exponential_service_waits_as_erlang_says(servers: int, load: float) -> None:
    """M/M/c, one slot a core: the mean time in the system is that of Erlang C."""
    rng = random.Random(1)
    calls = poisson(load, [rng.expovariate(1.0) for _ in range(CALLS)], rng)
    expected = 1 + erlang_c(servers, load) / (servers - load)
    assert fmean(one_host(calls, servers, servers).latency_s) == pytest.approx(expected, rel=0.08)


def test_shared_cores_forgive_long_calls() -> None:
    """M/G/1 with a core that all share: the mean depends on the mean service time alone, 1 / (1 - load)."""
    rng = random.Random(2)
    # Nine of ten take 0.2, one takes 8.2: a mean of 1 and a squared variation of 5.8.
    calls = poisson(0.6, [0.2 if rng.random() < 0.9 else 8.2 for _ in range(20_000)], rng)
    shared = fmean(one_host(calls, 1, 10_000, slice_s=0.02).latency_s)
    in_turn = fmean(one_host(calls, 1, 1).latency_s)
    assert shared == pytest.approx(1 / (1 - 0.6), rel=0.08)
    assert in_turn == pytest.approx(1 + 0.6 * (1 + 5.76) / 2 / (1 - 0.6), rel=0.15)  # Pollaczek and Khinchine


def test_regular_calls_never_wait() -> None:
    """D/D/1 below its capacity: each call takes its service time and no more."""
    calls = [Work(n * 1.0, 0.9) for n in range(100)]
    assert one_host(calls, 1, 1).latency_s == pytest.approx([0.9] * 100)


def test_a_burst_leaves_one_after_the_other() -> None:
    """All at one instant on one core: the n-th is through after n service times, and the backlog is all but those in slots."""
    simulated = one_host([Work(0.0, 0.5)] * 10, 1, 1)
    assert simulated.latency_s == pytest.approx([0.5 * (n + 1) for n in range(10)])
    assert (simulated.in_flight_peak, simulated.backlog_peak) == (10, 9)


def test_sleepers_hold_slots_and_no_core() -> None:
    """Four sleepers on one core with four slots sleep together; the fifth waits for a slot."""
    simulated = one_host([Work(0.0, 0.0, idle_s=1.0)] * 5, 1, 4)
    assert simulated.latency_s == pytest.approx([1.0, 1.0, 1.0, 1.0, 2.0])


def test_a_program_without_end_ends_at_its_limit() -> None:
    """It shares its core until then, and holds one slot."""
    calls = [Work(0.0, math.inf, limit_s=2.0), Work(0.0, 0.5)]
    simulated = one_host(calls, 1, 2, slice_s=0.001)
    assert simulated.latency_s == pytest.approx([2.0, 1.0], rel=0.01)
    assert simulated.host_cpu_s == pytest.approx(2.0, rel=0.01)


MIXED_COSTS = Costs(
    caller=Cost(0.0003, 0.0004),
    gateway=Cost(0.001, 0.0001),
    redis=Cost(0.0002, 0.00003),
    worker=Cost(0.0006, 0.0008),
    cold=1.2,
)


def mixed(count: int, window_s: float, seed: int) -> list[Work]:
    rng = random.Random(seed)
    return [
        Work(at, math.inf if rng.random() < 0.005 else rng.expovariate(200), 0.1 * (rng.random() < 0.1), 0.5)
        for at in sorted(rng.uniform(0, window_s) for _ in range(count))
    ]


LAYOUTS = [
    Layout(hosts=3, cores=8, gateways=3, redis=2),
    Layout(hosts=1, cores=2, one_machine=True),
    Layout(hosts=5, cores=4, scaler=Scaler(hosts=0, looks_every_s=0.5, start_s=0.7)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_call_is_answered_once(layout: Layout) -> None:
    """Whatever there is to serve them, no call is lost or answered twice, and none before its work is done."""
    calls = mixed(2000, 3.0, seed=3)
    simulated = simulate(calls, MIXED_COSTS, layout)
    assert simulated.answers == [1] * len(calls)
    for call, latency_s in zip(calls, simulated.latency_s, strict=True):
        assert latency_s > min(call.cpu_s + call.idle_s, call.limit_s)


def test_cores_do_what_the_calls_need() -> None:
    """Work is conserved: the cores give each call what it and its worker's loop need, and nothing to anybody else."""
    calls = [Work(n * 0.01, 0.005) for n in range(500)]
    simulated = simulate(calls, Costs(worker=Cost(0.0, 0.001)), Layout(hosts=2, cores=4))
    assert simulated.host_cpu_s == pytest.approx(500 * 0.006)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_calls_give_the_same_result(layout: Layout) -> None:
    """Nothing in it is left to chance."""
    first, second = (simulate(mixed(500, 1.0, seed=4), MIXED_COSTS, layout) for _ in range(2))
    assert first == second


def test_hosts_that_start_late_serve_late() -> None:
    """With no host at first, nothing is answered before the scaler has looked and a host has started."""
    calls = [Work(0.0, 0.001)] * 50
    simulated = simulate(
        calls, NOTHING, Layout(hosts=2, cores=4, scaler=Scaler(0, looks_every_s=15.0, start_s=40.0))
    )
    assert 55.0 < min(simulated.latency_s) < max(simulated.latency_s) < 56.0
