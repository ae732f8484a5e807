"""Jails that many tests share. Each is started when the first test asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from .box import Box


def _box(preload: str) -> Iterator[Box]:
    with closing(Box(preload)) as box:
        yield box


def whole(box: Box) -> Iterator[Box]:
    """Whatever a test ran in it, a jail is whole afterwards and serves the next call."""
    yield box
    if box.jail.is_broken:
        box.renew()
        pytest.fail("the test broke the jail")


@pytest.fixture(scope="session")
def _standard() -> Iterator[Box]:
    yield from _box("standard")


@pytest.fixture
def box(_standard: Box) -> Iterator[Box]:
    """The lightest jail."""
    yield from whole(_standard)


@pytest.fixture(scope="session")
def numpy_box() -> Iterator[Box]:
    """A jail with numpy in it."""
    yield from _box("numpy")


@pytest.fixture(scope="session")
def sympy_box() -> Iterator[Box]:
    """A jail with sympy in it."""
    yield from _box("sympy")


@pytest.fixture(scope="session")
def data_box() -> Iterator[Box]:
    """The heaviest jail."""
    yield from _box("data")
