"""Which forkserver a program is given, and that it finds there what it wants."""

from __future__ import annotations

import itertools

import pytest

from sandbox.jail.preload import PRELOADS, choose

from .box import Box

CODES = {
    "print(1)": "standard",
    "import os, sys\nimport json": "standard",
    "import numpy": "numpy",
    "import numpy as np": "numpy",
    "import os, numpy as np": "numpy",
    "from numpy.linalg import inv": "numpy",
    "import numpy.linalg as la": "numpy",
    "def f():\n    import sympy\n": "sympy",
    "x = 1; import sympy": "sympy",
    "if True: import mpmath": "sympy",
    "from sympy import (\n    symbols,\n    solve,\n)": "sympy",
    "import numpy\nfrom scipy.optimize import minimize": "data",
    "import pandas as pd": "data",
    "import networkx": "data",
    "from math_verify import parse": "data",
    "import numpyish": "standard",
    "from mynumpy import x": "standard",
    "from . import numpy": "standard",
    "important = 'sympy'": "standard",
    "import sympyplus, mynumpy": "standard",
    "": "standard",
    "\timport\tnumpy": "numpy",
    "from\tscipy import stats": "data",
}


@pytest.mark.parametrize(("code", "name"), CODES.items())
def test_choice(code: str, name: str) -> None:
    """The lightest forkserver that holds what the import statements name."""
    assert PRELOADS[choose(code)].name == name


@pytest.mark.parametrize(
    "code", ["import " * 10**5, "from a" * 10**5, "import " + "a," * 10**6, "\t" * 10**6, "; " * 10**6]
)
def test_choice_takes_no_time(code: str) -> None:
    """No text makes the look at the imports slow: the worker does it on its loop."""
    assert choose(code) == 0


def test_each_holds_what_the_lighter_ones_hold() -> None:
    """A call may always run in a heavier forkserver than it needs."""
    for lighter, heavier in itertools.pairwise(PRELOADS):
        assert set(lighter.modules) < set(heavier.modules)
        assert heavier.warm_up.startswith(lighter.warm_up)


#: Runs each warm-up again in a program: what it imports then was not warm.
_COLD = """
import sys
before = set(sys.modules)
exec({source!r}, {{"__name__": "again"}})
cold = sorted(set(sys.modules) - before)
print(cold)
print(sys.modules["threading"].active_count())
"""


@pytest.mark.parametrize("fixture", ["box", "numpy_box", "sympy_box", "data_box"])
def test_nothing_is_imported_twice(fixture: str, request: pytest.FixtureRequest) -> None:
    """What the warm-up uses is there in every child, and no library has started a thread."""
    box: Box = request.getfixturevalue(fixture)
    assert box.out(_COLD.format(source=box.jail.preload.warm_up)) == "[]\n1\n"


#: What the warm-up must not leave behind, as a program sees it, and the same in an interpreter of its own.
_TRACES = """
import subprocess, sys
look = '''
import decimal, locale, sys, warnings
print(decimal.getcontext(), locale.setlocale(locale.LC_ALL), sys.getrecursionlimit(), sys.argv[1:])
import {modules}
{more}
'''
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()) as here:
    exec(look, {{"__name__": "look"}})
there = subprocess.run([sys.executable, "-s", "-c", look], capture_output=True, text=True, check=True).stdout
assert here.getvalue() == there, (here.getvalue(), there)
"""

_NUMPY_TRACES = "print(numpy.geterr(), numpy.get_printoptions(), numpy.array([1 / 3]))"
_SYMPY_TRACES = (
    "x = sympy.Symbol('x'); print(mpmath.mp, sympy.solve(x**4 - x - 1, x))\n"
    "print(sympy.srepr(x), sympy.pretty(1 / x), sympy.integrate(1 / (x**3 + 1), x))"
)
_DATA_TRACES = (
    "import pandas.testing; print(pandas.options.display.max_rows, pandas.options.mode.copy_on_write)\n"
    "print(pandas.DataFrame({'a': [1.5]}))"
)


@pytest.mark.parametrize(
    ("fixture", "modules", "more"),
    [
        ("box", "math", "print([str(each) for each in warnings.filters], sys.get_int_max_str_digits())"),
        ("numpy_box", "numpy", _NUMPY_TRACES),
        ("sympy_box", "sympy, mpmath", _SYMPY_TRACES),
        ("data_box", "pandas", _DATA_TRACES),
    ],
)
def test_the_warm_up_leaves_no_trace(
    fixture: str, modules: str, more: str, request: pytest.FixtureRequest
) -> None:
    """Settings and counters of the libraries are as in an interpreter that has just started."""
    box: Box = request.getfixturevalue(fixture)
    box.out(_TRACES.format(modules=modules, more=more), wall_s=20)


@pytest.mark.parametrize(
    ("fixture", "expression"),
    [
        ("box", "__import__('random').random()"),
        ("box", "__import__('uuid').uuid4()"),
        ("box", "__import__('uuid').uuid1()"),
        ("box", "__import__('secrets').token_hex(4)"),
        ("box", "__import__('os').urandom(4)"),
        ("box", "__import__('tempfile').mktemp()"),
        ("box", "__import__('multiprocessing').current_process().authkey"),
        ("numpy_box", "__import__('numpy').random.rand()"),
        ("numpy_box", "__import__('numpy').random.default_rng().random()"),
        ("sympy_box", "__import__('sympy').randprime(1, 10**9)"),
        ("sympy_box", "__import__('sympy.core.random', fromlist=['x']).random()"),
        ("sympy_box", "__import__('mpmath').rand()"),
        ("data_box", "__import__('scipy.stats', fromlist=['x']).norm.rvs()"),
        ("data_box", "__import__('networkx').gnp_random_graph(30, 0.5).edges"),
        ("data_box", "__import__('pandas').Series(range(10**6)).sample(3).tolist()"),
    ],
)
def test_no_two_calls_draw_the_same(fixture: str, expression: str, request: pytest.FixtureRequest) -> None:
    """Every source of randomness that a forkserver holds is fresh in each call."""
    box: Box = request.getfixturevalue(fixture)
    draws = [box.out(f"print(bytes(str({expression}), 'utf-8'))") for _ in range(3)]
    assert len(set(draws)) == 3
