"""The scenarios and shapes for locust, as people start them, against the real service."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.stack import own_stack, standin_stack
from sandbox.api_keys import new_key, stanza
from sandbox.settings import API_KEY

pytestmark = pytest.mark.usefixtures("_jail_runtime")

FILES = Path(__file__).parents[2] / "loadtest" / "locustfiles"


@dataclass(frozen=True)
class Swarm:
    """What a run of locust left behind."""

    code: int
    output: str
    requests: dict[str, int]  # by row
    failures: dict[str, int]


def swarm(url: str, *options: str, files: str = "scenarios") -> Swarm:
    """Run locust to its end."""
    paths = ",".join(str(FILES / f"{name}.py") for name in files.split())
    command = [sys.executable, "-m", "locust", "-f", paths, "--headless", "--only-summary", "-s", "10"]
    done = subprocess.run(
        [*command, "--host", url, *options], capture_output=True, text=True, timeout=50, check=False
    )
    output = done.stdout + done.stderr
    rows = re.findall(r"^(?:POST|ITEM) +(\S.*?) {2,}(\d+) +(\d+)\(", output, re.MULTILINE)
    assert rows, output
    return Swarm(
        done.returncode,
        output,
        {name: int(requests) for name, requests, _ in rows},
        {name: int(failures) for name, _, failures in rows},
    )


def users_in(output: str) -> list[int]:
    """The numbers of users that a shape asked for."""
    return [int(users) for users in re.findall(r"Shape test updating to (\d+) users", output)]


@pytest.fixture(scope="module")
def url(_jail_runtime: None) -> Iterator[str]:
    """A whole service."""
    with own_stack() as running:
        yield running.url


@pytest.mark.parametrize("scenario", ["Single", "Batch", "Rollout"])
def test_each_scenario_gets_right_answers(url: str, scenario: str) -> None:
    """Users of a scenario have requests, and all of their answers are right."""
    options = ["-u", "4", "-r", "4", "-t", "2s", "--think", "0.1", "--batch-size", "8"]
    ran = swarm(url, *options, scenario)
    assert ran.code == 0, ran.output
    assert sum(ran.requests.values()) > 0
    assert all(row.startswith(scenario.lower()) for row in ran.requests), "a scenario that was not asked for"
    assert not any(ran.failures.values()), ran.output


def test_steps_add_users_until_the_last_step(url: str) -> None:
    """The shape of steps goes up by a fifth of the users, and ends by itself."""
    options = ["-u", "10", "-r", "10", "-t", "5s", "Single"]
    ran = swarm(url, *options, files="scenarios steps")
    assert ran.code == 0, ran.output
    users = users_in(ran.output)
    assert users[0] == 2
    assert users == sorted(users)
    assert set(users) <= {2, 4, 6, 8, 10}
    assert sum(ran.requests.values()) > 0


def test_training_steps_are_bursts_with_quiet_between(url: str) -> None:
    """The shape of a training job has all users, then none, then all of them again."""
    options = ["-u", "6", "-t", "4s", "--training-step", "2", "--think", "0.1", "Rollout"]
    ran = swarm(url, *options, files="scenarios training")
    assert ran.code == 0, ran.output
    users = users_in(ran.output)
    assert users[:2] == [6, 0]
    assert set(users) == {6, 0}
    assert sum(ran.requests.values()) > 0


@pytest.mark.parametrize("scenario", ["Single", "Batch"])
def test_a_wrong_answer_is_a_failure_that_says_so(scenario: str) -> None:
    """A service that answers each call `ok` and runs none of them fails every check."""
    options = ["-u", "2", "-r", "2", "-t", "2s", "--batch-size", "8", "--workload", "print", scenario]
    with standin_stack("--hold", "0.01") as running:
        ran = swarm(running.url, *options)
    assert ran.code == 1, ran.output
    row = {"Single": "single print", "Batch": "batch item"}[scenario]
    assert ran.failures[row] == ran.requests[row] > 0
    assert re.search(r"print: printed .*held.* where .* must come", ran.output)


def test_a_refusal_is_counted_apart_and_the_call_goes_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """429 fails nothing: it has its own row, and who was refused is answered later."""
    monkeypatch.setenv("SANDBOX_GATEWAY__MAX_IN_FLIGHT", "1")
    options = ["-u", "4", "-r", "4", "-t", "4s", "--workload", "sleepers", "Single"]
    with own_stack("--gateways", "1") as running:
        ran = swarm(running.url, *options)
    assert ran.code == 0, ran.output
    refused = sum(number for row, number in ran.requests.items() if row.endswith("refused (429)"))
    assert refused > 0
    assert sum(ran.requests.values()) > refused
    assert not any(ran.failures.values())


def test_a_key_opens_a_service_that_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_API_KEY goes with each request; without it every one fails as what it is."""
    key = new_key()
    keys = tmp_path / "keys.toml"
    keys.write_text(stanza(key, "team", ["run"]))
    monkeypatch.setenv("SANDBOX_GATEWAY__KEYS_FILE", str(keys))
    options = ["-u", "1", "-t", "2s", "--workload", "print", "Single"]
    with own_stack() as running:
        without = swarm(running.url, *options)
        monkeypatch.setenv(API_KEY, key)
        with_key = swarm(running.url, *options)
    assert without.code == 1
    assert "401 Unauthorized" in without.output
    assert with_key.code == 0, with_key.output
    assert with_key.requests["single print"] > 0


def test_locust_finds_no_event_loop_in_its_way() -> None:
    """What waits in a process is replaced by gevent, which the loop that our service runs on would get past."""
    program = "import sys, locust; import scenarios; sys.exit('uvloop' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=FILES, check=True, timeout=30)


def test_a_service_of_its_own_is_started_for_a_run() -> None:
    """`python -m loadtest.locustfiles` hands its options to locust, and gives its exit code."""
    options = ["--headless", "-u", "2", "-r", "2", "-t", "2s", "--workload", "print", "Single"]
    command = [sys.executable, "-m", "loadtest.locustfiles", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr
    assert "single print" in done.stderr + done.stdout
