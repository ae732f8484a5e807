"""The soak: short, for real, and each way in which it can fail."""

from __future__ import annotations

import io
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
from rich.console import Console

from loadtest import soak as soak_module
from loadtest.held import GROWTH, Held, compare, count_held
from loadtest.soak import Program, folder_programs, shipped_programs, soak
from sandbox import CallStatus, ConfigError, JailError, ToolCall, ToolResult
from sandbox.jail import PRELOADS
from sandbox.settings import load_settings
from worker import pool as pool_module
from worker.pool import JailPool

RIGHT = "# EXPECT: status=ok\nprint('HELD')\n"


HONEST = Program("honest", ToolCall(code="print(1)"), False, lambda result: [])
HOSTILE = Program("hostile", ToolCall(code="import os\nos.abort()"), True, lambda result: [])


class LeakyPool(JailPool):
    """A pool that loses a descriptor with every call."""

    lost: ClassVar[list[int]] = []

    async def run(self, call: ToolCall) -> ToolResult:
        """Run a call, and open something that nobody closes."""
        self.lost.append(os.dup(0))
        return await super().run(call)


class FaultyPool(JailPool):
    """A pool that has no verdict for anything."""

    async def run(self, call: ToolCall) -> ToolResult:
        """Run a call, and lose what came of it."""
        await super().run(call)
        raise JailError("no luck")


def run_soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The tool as a person starts it, for seconds."""
    command = [sys.executable, "-m", "loadtest.soak", "--slots", "4", "--seed", "1", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)


def result(**fields: object) -> ToolResult:
    """A result that ended `ok` and printed nothing, but for the fields given."""
    return ToolResult.model_validate({"id": "1", "status": "ok", "exit_code": 0} | fields)


def test_a_short_one_is_well(tmp_path: Path) -> None:
    """Real programs of both kinds in real jails: every answer is right, and nothing is leaked."""
    (tmp_path / "1.py").write_text(RIGHT)
    done = run_soak("--minutes", "0.07", "--hostile", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wrong 0" in done.stdout
    assert "LEAK" not in done.stdout
    assert "seed 1" in done.stdout


async def soak_briefly(kind: type[JailPool], *programs: Program) -> tuple[bool, list[str]]:
    """Whether a soak in the lightest jail alone was well, and what it complained about."""
    pool = await kind.open(load_settings().jail, 2)
    said = io.StringIO()
    try:
        is_well = await soak(pool, programs, 1.0, random.Random(1), Console(file=said))
    finally:
        await pool.close()
    return is_well, [line for line in said.getvalue().splitlines() if re.match("WRONG|LEAK", line)]


@pytest.fixture
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of jail, and no patience with what differs."""
    monkeypatch.setattr(pool_module, "PRELOADS", PRELOADS[:1])
    monkeypatch.setattr(soak_module, "SETTLE_S", 1.0)


@pytest.mark.usefixtures("_light")
async def test_a_leak_fails_it() -> None:
    """A worker that loses a descriptor with every call is found out, and only that is reported."""
    try:
        is_well, complaints = await soak_briefly(LeakyPool, HONEST, HOSTILE)
    finally:
        while LeakyPool.lost:
            os.close(LeakyPool.lost.pop())
    assert not is_well
    assert len(complaints) == 1
    assert complaints[0].startswith("LEAK: descriptors of the worker: ")


@pytest.mark.usefixtures("_light")
@pytest.mark.parametrize("is_hostile", [False, True])
async def test_a_wrong_answer_fails_it(is_hostile: bool) -> None:
    """A program that ends otherwise than it must is named, honest or not; there is no leak."""
    program = Program("strange", ToolCall(code="print(1)"), is_hostile, lambda result: [result.stdout])
    is_well, complaints = await soak_briefly(JailPool, program, HOSTILE if not is_hostile else HONEST)
    assert not is_well
    assert set(complaints) == {"WRONG: strange: 1"}


@pytest.mark.usefixtures("_light")
async def test_a_fault_fails_it() -> None:
    """A call that has no verdict is wrong, whatever was expected of it."""
    is_well, complaints = await soak_briefly(FaultyPool, HONEST, HOSTILE)
    assert not is_well
    assert set(complaints) == {"WRONG: honest: no luck", "WRONG: hostile: no luck"}


def test_counts_see_what_this_process_holds() -> None:
    """A child and a descriptor more are each one more of theirs, and nothing else differs but memory."""
    before = count_held(1, None)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        held = compare(before, count_held(1, None))
        assert child.stdin is not None
        child.stdin.close()
    differing = {each.what: each.after - each.before for each in held if each.is_leak}
    assert differing.pop("descriptors of the jails") >= 3  # those of the child
    assert differing == {"descriptors of the worker": 1, "processes below the worker": 1}
    assert [each for each in compare(before, count_held(1, None)) if each.is_leak] == []


@pytest.mark.usefixtures("_light")
async def test_groups_are_those_of_the_slots() -> None:
    """A folder for the worker and one for each slot in each hierarchy, and nobody in them while nothing runs."""
    before = count_held(2, None)
    pool = await JailPool.open(load_settings().jail, 2)
    try:
        if pool.host.place.kind == "none":
            pytest.skip(pool.host.place.reason)
        during = count_held(2, None)
    finally:
        await pool.close()
    assert during["groups"] - before["groups"] == (1 + 2) * len(pool.host.place.parents)
    assert during["processes in groups"] == before["processes in groups"] == 0
    assert count_held(2, None)["groups"] == before["groups"]


def test_what_may_grow_and_what_must_stay() -> None:
    """Memory has a bound; of all else not one more and not one less."""
    memory = "memory of the worker, KiB"
    assert not Held(memory, 1000, 1000 + GROWTH[memory]).is_leak
    assert Held(memory, 1000, 1001 + GROWTH[memory]).is_leak
    assert not Held(memory, 1000, 0).is_leak
    assert [Held("groups", 5, after).is_leak for after in (4, 5, 6)] == [True, False, True]


@pytest.mark.parametrize(
    ("expected", "status", "is_right"),
    [
        ("status=ok", "ok", True),
        ("status=ok", "timeout", False),
        ("status=timeout or memory_limit", "memory_limit", True),
        ("status=error (signal 9), not memory_limit, not timeout", "signaled", True),
        ("status=error (signal 9), not memory_limit, not timeout", "memory_limit", False),
        ("status=ok; never a timeout", "timeout", False),
    ],
)
def test_heads_of_a_folder(tmp_path: Path, expected: str, status: str, is_right: bool) -> None:
    """The statuses that a head names are right, those that it rules out and all others are not."""
    (tmp_path / "a.py").write_text(f"# EXPECT: {expected}\n")
    [program] = folder_programs(tmp_path)
    assert (program.complaints(result(status=status)) == []) is is_right


def test_a_breach_is_never_right(tmp_path: Path) -> None:
    """Whatever the status, a program that says that a wall gave way is a complaint."""
    (tmp_path / "a.py").write_text(RIGHT)
    [program] = folder_programs(tmp_path)
    assert program.complaints(result(stdout="HELD\nBREACH read a secret\n")) == ["BREACH read a secret"]


def test_only_what_is_about_time_may_meet_the_clock(tmp_path: Path) -> None:
    """Programs that must end by themselves get a minute, so that busy neighbours cannot make them wrong."""
    (tmp_path / "a.py").write_text(RIGHT)
    (tmp_path / "b.py").write_text("# EXPECT: status=timeout or error\n")
    assert [program.call.limits.wall_s for program in folder_programs(tmp_path)] == [60, 4]
    for program in shipped_programs():
        assert program.call.limits.wall_s >= 4
        assert program.complaints(result(id=program.call.id, status=CallStatus.MEMORY_LIMIT, stdout="?"))


@pytest.mark.parametrize("files", [{}, {"a.py": "print(1)\n"}, {"a.py": "# EXPECT: never a timeout\n"}])
def test_a_folder_that_says_nothing_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    """No programs, or one without an expectation, would be a soak that proves less than it seems to."""
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    with pytest.raises(ConfigError):
        folder_programs(tmp_path)


def test_ten_kinds_of_hostility_ship() -> None:
    """The soak has something to meet without any folder."""
    hostile = {program.name for program in shipped_programs() if program.is_hostile}
    assert hostile >= {
        f"limit_{kind}"
        for kind in (
            "endless_loop", "sleeper", "fork_bomb", "memory", "output_flood", "daemons", "scratch_files",
            "closed_streams", "stopped_children", "cpu_burners",
        )
    }  # fmt: skip
    assert "signal_segfault" in hostile
