"""The walls are tried in the jail that ships, at each level that has all of them; one jail for all tests of a level."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from sandbox.settings import JailSettings
from tests.sandbox.jail.box import Box
from tests.sandbox.jail.conftest import _standard, data_box, numpy_box, sympy_box, whole

__all__ = ["_standard", "box", "data_box", "numpy_box", "standard_box", "sympy_box"]


@pytest.fixture(scope="session", params=["namespaces", "strict"])
def _at_level(request: pytest.FixtureRequest) -> Iterator[Box]:
    with closing(Box(settings=JailSettings(level=request.param))) as made:
        yield made


@pytest.fixture
def box(_at_level: Box) -> Iterator[Box]:
    """The lightest jail, at one level after the other."""
    yield from whole(_at_level)


@pytest.fixture
def standard_box(_standard: Box) -> Iterator[Box]:
    """The lightest jail, at the level that is the default."""
    yield from whole(_standard)
