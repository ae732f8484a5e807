"""Hostile programs that were written before this jail, by its users' reviewers. Each says in its head what must come of it.

They lie beside the checkout, not in it. Where they are not, these tests skip.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtest.soak import folder_programs
from sandbox.calls import MIB, ToolCall, ToolResult
from tests.sandbox.jail.box import Box, program

FOLDER = Path(__file__).parents[3] / "shared/hostile"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
EXPECTED = {each.name: each for each in folder_programs(FOLDER)} if FILES else {}
#: The limits that the expectations were written for.
LIMITS = {"wall_s": 4.0, "cpu_s": 6.0, "memory_bytes": 512 * MIB, "processes": 48, "output_bytes": 64 * 1024}
TOGETHER = 4

pytestmark = pytest.mark.skipif(not FILES, reason=f"no hostile programs at {FOLDER}")


def call(file: Path) -> ToolCall:
    """One of them, with the limits of the heads."""
    return program(file.read_text(encoding="utf-8"), **LIMITS)


def pairs(how: str) -> list[list[Path]]:
    """Programs that belong together, by what their heads say of it."""
    found = [
        file
        for file in FILES
        if re.search(rf"^# PAIR:.*{how}", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    return [found[n : n + 2] for n in range(0, len(found), 2)]


AFTER, BESIDE = pairs(r"run \d+a, then"), pairs("start .* at the same time")
SINGLE = [file for file in FILES if not any(file in pair for pair in AFTER + BESIDE)]


def check(file: Path, result: ToolResult) -> None:
    """The status is one that the head allows, and no wall gave way."""
    assert not EXPECTED[file.stem].complaints(result), result


@pytest.fixture(scope="module")
def results(_at_level: Box) -> dict[Path, ToolResult]:
    """All that stand alone, a few at a time, at the level of the tests."""
    found: dict[Path, ToolResult] = {}
    for start in range(0, len(SINGLE), TOGETHER):
        files = SINGLE[start : start + TOGETHER]
        found |= zip(files, _at_level.run_together(map(call, files)), strict=True)
        assert all(slot.group.is_empty() for slot in _at_level.slots.free)
    return found


@pytest.mark.parametrize("file", SINGLE, ids=lambda file: file.stem)
def test_alone(results: dict[Path, ToolResult], box: Box, file: Path) -> None:
    """The outcome is as its head says, and the jail answers the next call at once."""
    if "privilege" in file.name and box.host.identity.first_slot is None:
        pytest.skip("where there is one user to give, a program is user 0 of its own namespace already")
    check(file, results[file])
    assert box.out("print(1)") == "1\n"


@pytest.mark.parametrize("pair", AFTER, ids=lambda pair: pair[0].stem)
def test_after_each_other(box: Box, pair: list[Path]) -> None:
    """The second one finds nothing of the first in its slot."""
    for file in pair:
        check(file, box.do(box.jail.run(call(file), box.slots.free[0])))


@pytest.mark.parametrize("pair", BESIDE, ids=lambda pair: pair[0].stem)
def test_beside_each_other(box: Box, pair: list[Path]) -> None:
    """Neither notices the other."""
    for file, result in zip(pair, box.run_together(map(call, pair)), strict=True):
        check(file, result)


@pytest.mark.parametrize(
    "file",
    [file for file in FILES if "twice" in file.read_text(encoding="utf-8")],
    ids=lambda file: file.stem,
)
def test_twice(box: Box, file: Path) -> None:
    """Two runs draw different random numbers from every source."""
    lines = [re.findall(r"^rng.*", box.out(call(file).code), re.MULTILINE) for _ in range(2)]
    assert lines[0]
    for one, two in zip(*lines, strict=True):
        assert all(
            a != b for a, b in zip(one.split()[1:], two.split()[1:], strict=True) if re.search(r"\d", a)
        ), (one, two)
