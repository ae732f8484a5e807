"""The self-test of a worker's start notices when a wall is not there."""

from __future__ import annotations

import struct

import pytest

from sandbox.errors import JailError
from sandbox.jail import selftest
from sandbox.jail.selftest import WALLS, check_walls

from .box import Box

ALLOW_ALL = struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF_0000)


def test_all_stand(box: Box) -> None:
    """On this host every wall stands."""
    box.do(check_walls(box.jail, box.slots.free[0]))


def test_no_filter() -> None:
    """Filters that allow everything are noticed, and the message says where to look."""
    box = Box(slots=1, filters={"none": (ALLOW_ALL, ALLOW_ALL)})
    try:
        with pytest.raises(JailError, match=r"missing: system call filter \(look at CONFIG_SECCOMP_FILTER"):
            box.do(check_walls(box.jail, box.slots.free[0]))
    finally:
        box.close()


def test_every_wall_has_a_remedy() -> None:
    """Each wall that the program tries is named in the table of remedies, and the other way round."""
    assert all(f'"{wall}":' in selftest._PROGRAM for wall in WALLS)
