"""The walls are tried in the jail that ships, at each level that has all of them; one jail for all tests of a level."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox.settings import JailSettings
from tests.sandbox.jail.box import Box
from tests.sandbox.jail.conftest import box, data_box, numpy_box, sympy_box

__all__ = ["_standard", "box", "data_box", "numpy_box", "sympy_box"]


@pytest.fixture(scope="session", params=["namespaces", "strict"])
def _standard(request: pytest.FixtureRequest) -> Iterator[Box]:
    made = Box(settings=JailSettings(level=request.param))
    try:
        yield made
    finally:
        made.close()
