"""The self-test of a worker's start notices when a wall is not there, and claims what SECURITY.md does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from sandbox.errors import JailError
from sandbox.jail.cgroups import GroupUsage
from sandbox.jail.host import process_lack
from sandbox.jail.selftest import WALLS, check_walls, try_level, walls_that_hold
from sandbox.settings import JailSettings, Level

from .box import Box

ALLOW_ALL = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF_0000)
SECURITY = Path(__file__).parents[3] / "SECURITY.md"
LEVELS: tuple[Level, ...] = get_args(Level)


@contextlib.contextmanager
def opened(level: Level = "namespaces", **box: Any) -> Iterator[Box]:
    """A jail of one slot."""
    if level == "process" and (
        lack := process_lack(JailSettings().runtime / "root", is_root=os.geteuid() == 0)
    ):
        pytest.skip(f"not at this level: {lack[0]}")
    with contextlib.closing(Box(slots=1, settings=JailSettings(level=level), **box)) as made:
        yield made


def table() -> dict[str, list[str]]:
    """The table of walls by level in SECURITY.md: for each wall the levels that have a `yes`."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in SECURITY.read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [^|]+ \|( (yes|no) \|)+$", line)
    ]
    return {
        name: [level for level, cell in zip(LEVELS, cells, strict=True) if cell == "yes"]
        for name, *cells in rows
    }


def test_the_table_for_readers_is_the_list_that_is_tried() -> None:
    """Each wall stands in SECURITY.md with the levels that claim it, in the order of the self-test."""
    assert list(table().items()) == [(wall.name, list(wall.levels)) for wall in WALLS]


@pytest.mark.parametrize("level", LEVELS)
def test_what_holds_is_what_the_table_says(level: Level) -> None:
    """At each level the self-test finds all that is claimed, and nothing that the table denies."""
    with opened(level) as box:
        found = box.do(walls_that_hold(box.jail, box.slots.free[0]))
    assert found == {name for name, levels in table().items() if level in levels}


def test_no_filter() -> None:
    """Filters that allow everything are noticed, and the message says where to look."""
    with opened(filters={"none": (ALLOW_ALL, ALLOW_ALL)}) as made, pytest.raises(JailError) as caught:
        made.do(check_walls(made.jail, made.slots.free[0]))
    assert "missing: system call filter (look at CONFIG_SECCOMP_FILTER in the kernel)" in caught.value.message
    assert "kernel channels (look at policy.seccomp)" in caught.value.message


def test_a_user_namespace_that_all_share(box: Box) -> None:
    """A jail that is said to be strict and is not is refused, with the one wall that is missing."""
    box.jail.host = dataclasses.replace(box.host, level="strict")
    with pytest.raises(JailError, match=r"missing: own user namespace \(look at [^,]+$"):
        box.do(check_walls(box.jail, box.slots.free[0]))
    box.jail.host = box.host


class Unbounded:
    """A group that bounds and counts nothing."""

    enter_fds = ()
    needs_pids = False

    def begin(self, memory_bytes: int, processes: int) -> None:
        """Set nothing."""

    def exceeded(self, cpu_s: float) -> None:
        """Nothing ever is."""

    def end(self) -> GroupUsage:
        """Nothing was used."""
        return GroupUsage(0, 0, 0)

    def is_empty(self) -> bool:
        """As far as it knows."""
        return True

    def close(self) -> None:
        """Nothing is there to remove."""


def test_memory_that_nobody_counts(box: Box) -> None:
    """The limits are tried as well: a group that does not bound is found out."""
    slot = dataclasses.replace(box.slots.free[0], group=Unbounded())
    with pytest.raises(JailError, match=r"missing: bounded memory \(look at"):
        box.do(check_walls(box.jail, slot))


async def test_what_the_doctor_shows() -> None:
    """Each wall of the level on a line of its own."""
    checks = await try_level(JailSettings())
    assert [(check.name, check.ok) for check in checks] == [
        (wall.name, True) for wall in WALLS if "namespaces" in wall.levels
    ]


async def test_the_doctor_without_a_jail(tmp_path: Path) -> None:
    """Where none can be opened, that is what it says."""
    (check,) = await try_level(JailSettings(runtime=tmp_path))
    assert (check.name, check.ok) == ("self-test", False)
    assert str(tmp_path) in check.found
