"""The walls are tried in the jail that ships, started once for all of them."""

from __future__ import annotations

from tests.sandbox.jail.conftest import _standard, box, data_box, numpy_box, sympy_box

__all__ = ["_standard", "box", "data_box", "numpy_box", "sympy_box"]
