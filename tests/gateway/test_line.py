"""The line alone: nothing is lost or doubled, each tenant has its share, and judges have theirs."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gateway.line import CALLS_PER_SLOT, LEAST_WINDOW, Line
from gateway.metrics import Metrics
from gateway.tenants import ANONYMOUS, Tenant
from sandbox.calls import ToolCall
from sandbox.queue import FLOOR_SHARE

PRIORITIES = ("tool", "judge")
TENANTS = [Tenant("a", 1), Tenant("b", 3), Tenant("c", 7)]


@dataclass(frozen=True, eq=False)
class Waiting:
    """A call as gateways queue it."""

    name: str
    call: ToolCall
    tenant: str


class Bench:
    """A line, and names for the calls that are pushed into it."""

    def __init__(self, slots: Callable[[], int] | None = None) -> None:
        self.metrics = Metrics()
        self.line: Line[Waiting] = Line(self.metrics, slots)
        self.calls: dict[str, Waiting] = {}
        self._numbers = count()

    def push(self, tenant: Tenant = ANONYMOUS, priority: str = "tool", calls: int = 1) -> list[str]:
        names = [f"{tenant.name}|{next(self._numbers)}" for _ in range(calls)]
        for name in names:
            call = ToolCall.model_construct(id=name, code="", priority=priority)
            self.calls[name] = Waiting(name, call, tenant.name)
            self.line.push(self.calls[name], tenant)
        return names

    def answered(self, name: str) -> bool:
        return self.line.answered(self.calls[name])

    def pop(self) -> Waiting:
        queued = self.line.pop()
        assert queued is not None
        return queued

    def held_back(self, priority: str) -> float | None:
        return self.metrics.registry.get_sample_value(
            "sandbox_gateway_held_back_calls", {"priority": priority}
        )


def plenty() -> int:
    """More slots than a test has calls."""
    return 1_000_000


class Traffic(RuleBasedStateMachine):
    """Calls come, leave, are answered, given up and cleared in any order; a model knows what must be where."""

    slots = 8
    windowed = True

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench((lambda: self.slots) if self.windowed else None)
        self.here: dict[tuple[str, str], deque[str]] = defaultdict(deque)
        self.in_redis: dict[str, str] = {}

    def waiting(self, priority: str) -> int:
        return sum(len(names) for (_, lane), names in self.here.items() if lane == priority)

    def has_room(self, priority: str) -> bool:
        window = max(LEAST_WINDOW, CALLS_PER_SLOT * self.slots)
        return not self.windowed or Counter(self.in_redis.values())[priority] < window

    @rule(tenant=st.sampled_from(TENANTS), priority=st.sampled_from(PRIORITIES), calls=st.integers(1, 40))
    def push(self, tenant: Tenant, priority: str, calls: int) -> None:
        self.here[tenant.name, priority].extend(self.bench.push(tenant, priority, calls))

    @rule(calls=st.integers(1, 40))
    def pop(self, calls: int) -> None:
        for _ in range(calls):
            may_leave = {lane for lane in PRIORITIES if self.waiting(lane) and self.has_room(lane)}
            queued = self.bench.line.pop()
            if queued is None:
                assert not may_leave
                return
            priority = queued.call.priority
            assert priority in may_leave
            assert self.here[queued.tenant, priority].popleft() == queued.name
            self.in_redis[queued.name] = priority

    @precondition(lambda self: self.in_redis)
    @rule(calls=st.integers(1, 40))
    def answer(self, calls: int) -> None:
        for name in list(self.in_redis)[:calls]:
            priority = self.in_redis.pop(name)
            assert self.bench.answered(name) == (self.windowed and self.waiting(priority) > 0)
            assert not self.bench.answered(name)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        here = [(key, name) for key, names in self.here.items() for name in names]
        if here:
            key, name = data.draw(st.sampled_from(here))
            self.here[key].remove(name)
            assert not self.bench.answered(name)

    @rule()
    def clear(self) -> None:
        names = {queued.name for queued in self.bench.line.clear()}
        assert names == {name for names in self.here.values() for name in names}
        for names_here in self.here.values():
            names_here.clear()

    @rule(slots=st.integers(0, 64))
    def workers_come_and_go(self, slots: int) -> None:
        self.slots = slots

    @invariant()
    def counts_are_right(self) -> None:
        assert len(self.bench.line) == sum(map(self.waiting, PRIORITIES))
        for priority in PRIORITIES:
            assert self.bench.held_back(priority) == self.waiting(priority)


@pytest.mark.parametrize("windowed", [True, False])
def test_no_call_is_lost_or_doubled(windowed: bool) -> None:
    """Every call that is not over before leaves once or is cleared, in its tenant's order and while there is room."""
    machine = type("Machine", (Traffic,), {"windowed": windowed})
    run_state_machine_as_test(machine, settings=settings(max_examples=100, deadline=None, derandomize=True))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    weights=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    guests=st.lists(st.integers(0, 3), max_size=150),
    begin=st.integers(0, 100),
    length=st.integers(1, 200),
)
def test_tenants_share_by_weight(
    weights: tuple[int, int], guests: list[int], begin: int, length: int
) -> None:
    """While two tenants have calls, what either has sent per weight differs by one at most, over any stretch.

    Others may come and go meanwhile.
    """
    one, other = Tenant("one", weights[0]), Tenant("other", weights[1])
    bench = Bench(plenty)
    bench.push(one, calls=begin + length)
    bench.push(other, calls=begin + length)
    left = []
    for number in range(begin + length):
        if number < len(guests):
            bench.push(Tenant("guest", 2), calls=guests[number])
        left.append(bench.pop().tenant)
    sent = Counter(left[begin:])
    assert abs(sent["one"] / one.weight - sent["other"] / other.weight) <= 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    windowed=st.booleans(),
    begin=st.integers(0, 50),
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_judges_have_their_share(windowed: bool, begin: int, weights: list[int]) -> None:
    """While both priorities have calls that may leave, one call of eight is a judge's, whosever they are."""
    bench = Bench(plenty if windowed else None)
    bench.push(Tenant("judging"), "judge", calls=200)
    for number, weight in enumerate(weights):
        bench.push(Tenant(f"tool-{number}", weight), calls=200)
    left = [bench.pop().call.priority for _ in range(200)]
    assert left[begin : begin + FLOOR_SHARE].count("judge") == 1


def test_tool_goes_first() -> None:
    """A tool call overtakes judges that came before it."""
    bench = Bench()
    bench.push(priority="judge", calls=3)
    [tool] = bench.push()
    assert bench.pop().name == tool


def test_one_tenant_is_a_plain_line() -> None:
    """Without names calls leave as they came, as many as there are."""
    bench = Bench()
    names = bench.push(calls=10_000)
    assert [bench.pop().name for _ in names] == names
    assert bench.line.pop() is None


def test_a_flood_does_not_shut_out_the_next_tenant() -> None:
    """Whoever comes after ten thousand calls of another waits for its turn and what is in Redis, not for them."""
    bench = Bench(lambda: 8)
    flood = bench.push(Tenant("flood", 5), calls=10_000)
    for _ in range(LEAST_WINDOW):
        bench.pop()
    assert bench.line.pop() is None
    newcomer = Tenant("newcomer")
    ahead = bench.line.ahead("tool", newcomer)
    bench.push(newcomer)
    for name in flood[: ahead + 1]:
        assert bench.answered(name)
    left = [bench.pop().tenant for _ in range(ahead + 1)]
    assert left.index("newcomer") <= ahead <= 5


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 30), st.integers(0, 20)), max_size=8),
    st.data(),
)
def test_ahead_is_how_many_leave_before(crowd: list[tuple[Tenant, int, int]], data: st.DataObject) -> None:
    """A call leaves after at most so many others as were said to be ahead, and less than a round earlier."""
    bench = Bench(plenty)
    for tenant, calls, leaving in crowd:
        bench.push(tenant, calls=calls)
        for _ in range(min(leaving, len(bench.line))):
            bench.pop()
    tenant = data.draw(st.sampled_from(TENANTS))
    ahead = bench.line.ahead("tool", tenant)
    [name] = bench.push(tenant)
    before = 0
    while bench.pop().name != name:
        before += 1
    a_round = sum(tenant.weight for tenant in TENANTS)
    assert ahead - a_round <= before <= ahead + a_round


def test_another_weight_holds_from_the_next_turn() -> None:
    """A tenant whose weight was changed while it has calls gets the new one without losing its place."""
    bench = Bench(plenty)
    bench.push(Tenant("a", 1), calls=10)
    bench.push(Tenant("b", 1), calls=10)
    bench.push(Tenant("a", 3), calls=1)
    left = "".join(bench.pop().tenant for _ in range(9))
    assert left == "abaaabaaa"


@pytest.mark.parametrize("slots", [0, 8, 32, 33, 500])
def test_the_window_follows_the_workers(slots: int) -> None:
    """Twice their slots, and at least 64, for each priority by itself."""
    bench = Bench(lambda: slots)
    for priority in PRIORITIES:
        bench.push(priority=priority, calls=2000)
    popped = []
    while (queued := bench.line.pop()) is not None:
        popped.append(queued.call.priority)
    window = max(64, 2 * slots)
    assert Counter(popped) == {"tool": window, "judge": window}
