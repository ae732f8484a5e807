"""When calls are sent, and which: plans made before the first of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.arrivals import burst, constant, poisson
from loadtest.load import Arrivals, loads, warm_up
from loadtest.workloads import KINDS, WORKLOADS, load_workload
from sandbox import ConfigError, InvalidCall

RATES = st.floats(min_value=0.5, max_value=200)
SECONDS = st.floats(min_value=0.5, max_value=20)


@given(RATES, SECONDS, st.integers())
def test_poisson_times_are_in_order_and_within_the_time(rate: float, seconds: float, seed: int) -> None:
    """Times begin after the start, never go back, and end before the end; the same seed gives the same."""
    times = poisson(rate, seconds, random.Random(seed))

    assert times == sorted(times)
    assert all(0 < at < seconds for at in times)
    assert times == poisson(rate, seconds, random.Random(seed))


def test_poisson_calls_come_at_the_rate_and_by_chance() -> None:
    """Gaps have the mean of the rate, and, as those of callers who know nothing of each other, a deviation as large."""
    times = poisson(100, 200, random.Random(1))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.05)


@given(RATES, SECONDS)
def test_constant_times_have_one_gap(rate: float, seconds: float) -> None:
    """A constant load has its rate times its seconds calls, one gap apart."""
    times = constant(rate, seconds)

    assert len(times) == round(rate * seconds)
    assert times == pytest.approx([n / rate for n in range(len(times))])


@given(st.integers(1, 50), st.floats(min_value=0.1, max_value=5), SECONDS)
def test_a_burst_is_one_moment(size: int, every_s: float, seconds: float) -> None:
    """Each burst has all of its calls at one time, and the first is at the start."""
    moments = Counter(burst(size, every_s, seconds))

    assert min(moments) == 0
    assert set(moments.values()) == {size}


@pytest.mark.parametrize(
    "arrivals",
    [
        Arrivals("poisson", rates=(20, 40)),
        Arrivals("constant", rates=(20, 40)),
        Arrivals("burst", bursts=(8, 16), every_s=2),
    ],
    ids=lambda arrivals: arrivals.how,
)
def test_each_rate_is_a_run_and_a_seed_is_a_plan(arrivals: Arrivals) -> None:
    """A sweep has a run for each rate; the same seed plans the same calls at the same times, and another others."""
    mixed = load_workload("mixed")

    first, second = loads(arrivals, mixed, seed=1)

    assert loads(arrivals, mixed, seed=1) == [first, second]
    assert loads(arrivals, mixed, seed=2) != [first, second]
    assert len(second.planned) > len(first.planned)
    assert {first.seconds, second.seconds} == {5.0}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        (
            {"how": "constant", "bursts": (1,)},
            "--burst says nothing to --arrivals constant, which takes --rate",
        ),
        ({"how": "burst", "rates": (1,)}, "--rate says nothing"),
        ({"how": "poisson", "trace": Path("x")}, "--trace says nothing"),
        ({"how": "trace"}, "--trace FILE"),
    ],
)
def test_what_would_be_left_out_of_account_is_refused(fields: dict[str, Any], complaint: str) -> None:
    """An option that does not belong to the arrivals is named, and no default takes its place in silence."""
    with pytest.raises(ConfigError, match=complaint):
        Arrivals(**fields)


def test_a_run_without_a_call_is_refused() -> None:
    """Nothing can be said of no calls."""
    with pytest.raises(ConfigError, match="more --seconds"):
        loads(Arrivals("constant", rates=(0.1,), seconds=1), load_workload("print"), seed=1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_brings_each_kind_by_its_share(name: str) -> None:
    """Of many calls, each kind has its share of them."""
    kinds = load_workload(name).draw(random.Random(1))
    drawn = Counter(next(kinds).name for _ in range(20_000))

    for kind, share in WORKLOADS[name].items():
        assert drawn[kind] / 20_000 == pytest.approx(share, abs=0.01)


def test_a_file_is_a_workload_in_its_order(tmp_path: Path) -> None:
    """Lines of a file are sent one after the other and over again, each with all of its fields but the id."""
    file = tmp_path / "calls.jsonl"
    file.write_text('{"id": "a", "code": "1", "stdin": "x"}\n\n{"code": "2", "limits": {"wall_s": 3}}\n')

    kinds = load_workload(str(file)).draw(random.Random(1))
    calls = [next(kinds).call() for _ in range(3)]

    assert [(call.code, call.stdin, call.limits.wall_s) for call in calls] == [
        ("1", "x", 10.0),
        ("2", "", 3.0),
        ("1", "x", 10.0),
    ]
    assert len({call.id for call in calls} | {"a"}) == 4


def test_a_workload_that_is_none_is_refused(tmp_path: Path) -> None:
    """A misspelt name is answered with the names; an empty file and a line that is no call are errors, too."""
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.write_text("\n")
    broken.write_text('{"code": "1"}\n{"cod": "1"}\n')

    with pytest.raises(ConfigError, match="mixed"):
        load_workload("mixde")
    with pytest.raises(ConfigError, match="no call"):
        load_workload(str(empty))
    with pytest.raises(InvalidCall, match="broken:2: cod"):
        load_workload(str(broken))


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_warm_up_is_a_second_of_the_workload(name: str) -> None:
    """Before the first run the workload's own kinds are sent, a few and not at once."""
    planned = warm_up(load_workload(name))

    assert 0 < len(planned) < 100
    assert max(plan.at_s for plan in planned) < 1
    assert {plan.kind.name for plan in planned} <= set(KINDS)
