"""The plan: its search, held against a table that was made by another simulation, and what makes it longer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import NormalDist

import pytest
import typer
from typer.testing import CliRunner

from loadtest.__main__ import app
from loadtest.capacity import fewest, make_load, make_plan, read_load
from loadtest.plan import seconds
from loadtest.profile import SHIPPED, KindCost, Profile, load_profile, save_profile
from loadtest.simulate import Cost, Costs
from sandbox import ConfigError


def lognormal(mean_s: float, parts: int = 400) -> tuple[float, ...]:
    """Values of a lognormal distribution with this mean, whose deviation is as large as its mean."""
    sigma = math.sqrt(math.log(2))
    middles = [NormalDist().inv_cdf((n + 0.5) / parts) for n in range(parts)]
    values = [math.exp(math.log(mean_s) - sigma**2 / 2 + sigma * z) for z in middles]
    return tuple(value * mean_s / (sum(values) / parts) for value in values)


def synthetic(cpu_s: float) -> Profile:
    """Programs that need so much, and a service that costs no CPU and adds 12 ms."""
    return Profile(
        machine="none",
        cores=1,
        day="never",
        kinds={"print": KindCost(lognormal(cpu_s))},
        costs=Costs(gateway=Cost(0.0, 1e-6), redis=Cost(0.0, 1e-6), fixed_s=0.012),
        calls_per_s=1 / cpu_s,
        idle_jail_cores=0.0,
        gateway_rss_bytes=1,
        host_rss_bytes=1,
        others_cores=0.0,
    )


@pytest.mark.parametrize(
    ("cpu_s", "window_s", "cores"),
    [(0.005, 10.0, 22), (0.020, 10.0, 85), (0.020, 60.0, 15), (0.020, 0.0, 1561)],
)
def test_cores_are_those_of_another_simulation(cpu_s: float, window_s: float, cores: int) -> None:
    """45,000 calls, mean 0.3 s: within 15 % of what was found for one call a core at a time, without shared cores."""
    profile = synthetic(cpu_s)
    load = make_load(profile, "print", 45_000, window_s, 0.3)
    needed = fewest(load, profile, host_cores=1 if cores < 50 else 4 if cores < 1000 else 32)
    assert needed.mean_s <= 0.3
    assert needed.cores == pytest.approx(cores, rel=0.15)


def test_one_host_less_is_too_few() -> None:
    """The search ends at the fewest hosts: the wanted mean just met makes it need no host more."""
    profile = synthetic(0.02)
    load = make_load(profile, "print", 3000, 2.0, 0.1)
    needed = fewest(load, profile, host_cores=2)
    easier = make_load(profile, "print", 3000, 2.0, needed.mean_s + 1e-9)
    harder = make_load(profile, "print", 3000, 2.0, needed.mean_s - 1e-9)
    assert fewest(easier, profile, 2).hosts <= needed.hosts < fewest(harder, profile, 2).hosts


def test_a_mean_that_nothing_can_bring_is_an_error() -> None:
    """A mean below the service time alone ends the search with what was reached."""
    profile = synthetic(0.5)
    with pytest.raises(ConfigError, match="no number of hosts"):
        fewest(make_load(profile, "print", 50, 1.0, 0.2), profile, 64)


def test_runaways_and_late_hosts_make_it_worse() -> None:
    """A hundredth of the calls without end needs more cores; a smaller floor answers later."""
    profile = synthetic(0.02)
    made = make_plan(make_load(profile, "print", 4000, 2.0, 0.3), profile, host_cores=4, limit_s=10.0)
    none, few, many = made.runaways
    assert none.same == made.needed
    assert none.same.mean_s < few.same.mean_s < many.same.mean_s
    assert many.needed is not None
    assert many.needed.cores > made.needed.cores
    means = [floor.outcome.mean_s for floor in made.floors]
    assert means == sorted(means)
    assert means[-1] > made.scaler.looks_every_s + made.scaler.start_s - 2.0


def test_a_trace_is_what_its_lines_say(tmp_path: Path) -> None:
    """Each line's own times count before its kind's, in the order of the times."""
    profile = load_profile(SHIPPED)
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 2.0, "kind": "sleep-100", "latency_s": 0.2},
        {"at_s": 1.0, "cpu_s": 0.25, "wall_s": 0.75},
        {"at_s": 0.5},
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    load = read_load(profile, trace, "print", 0.3)
    assert [call.at_s for call in load.calls] == [0.5, 1.0, 2.0]
    assert load.window_s == 2.0
    assert load.calls[1].cpu_s >= 0.25
    assert load.calls[1].idle_s == pytest.approx(0.5)
    assert load.calls[2].idle_s == profile.kinds["sleep-100"].idle_s


@pytest.mark.parametrize("line", ["{}", '{"at_s": -1}', "no json", '{"at_s": 1, "kind": "of nobody"}'])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    """A trace that cannot be read says which line it is."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f'{{"at_s": 0}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: "):
        read_load(load_profile(SHIPPED), trace, "print", 0.3)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    """What is written is what is read; what is no profile is an error that names the file."""
    profile = synthetic(0.02)
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"other\.json is no profile"):
        load_profile(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("text", "expected"), [("10s", 10), ("500ms", 0.5), ("1m", 60), ("2.5", 2.5), ("0", 0)]
)
def test_windows_have_units(text: str, expected: float) -> None:
    """Seconds, unless a unit says otherwise."""
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "ten", "10h", "-1s", "1s2"])
def test_other_words_are_no_window(text: str) -> None:
    """What is no time is refused."""
    with pytest.raises(typer.BadParameter):
        seconds(text)


def test_the_command_prints_one_object() -> None:
    """With --json stdout has the plan and nothing else, and it says what is simulated and what was measured."""
    done = CliRunner().invoke(
        app, ["plan", "--calls", "500", "--window", "1s", "--host-cores", "2", "--json"]
    )
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert (made["how"], made["calibration"], made["calls"]) == ("simulated", "measured", 500)
    assert made["needed"]["cores"] == 2 * made["needed"]["hosts"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--trace", "x", "--calls", "7"), "leave out --calls"),
        (("--profile", "x", "validate"), "--profile"),
        (("measure", "-o", "no such folder/profile.json"), "there is no such folder"),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(arguments: tuple[str, ...], complaint: str) -> None:
    """Nobody waits for a plan that leaves out half of what was asked."""
    done = CliRunner().invoke(app, ["plan", *arguments])
    assert done.exit_code in {1, 2}
    assert complaint in (done.stderr or str(done.exception))
    assert done.stdout == ""


def test_the_tables_say_what_they_are() -> None:
    """Every table is marked simulated, and the machine of the costs is named."""
    done = CliRunner().invoke(app, ["plan", "--calls", "500", "--window", "1s"])
    assert done.exit_code == 0, done.output
    assert done.stdout.count(": simulated") == 3
    assert f"measured on {load_profile(SHIPPED).machine}" in done.stdout
