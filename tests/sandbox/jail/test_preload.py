"""Which forkserver a program is given, and that it finds there what it wants."""

from __future__ import annotations

import ast
import base64
import itertools
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.jail.preload import _HOME, PRELOADS, choose
from sandbox.jail.preload import _USE_MATH_VERIFY as GRADERS

from .box import Box


def wrapped(code: str) -> str:
    """The way in which rStar2-Agent's tools send a program."""
    return f'import base64\nexec(base64.b64decode("{base64.b64encode(code.encode()).decode()}".encode()).decode())\n'


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
    "from math_verify import parse": "sympy",
    "import numpyish": "standard",
    "from mynumpy import x": "standard",
    "from . import numpy": "standard",
    "important = 'sympy'": "standard",
    "import sympyplus, mynumpy": "standard",
    "": "standard",
    "if True:\n\timport\tnumpy": "numpy",
    "import os as o, numpy as np": "numpy",
    "import os, \\\n  numpy": "numpy",
    "from \\\n numpy \\\n import ones": "numpy",
    "from sympy . core import Basic": "sympy",
    "try: import pandas\nexcept ImportError: pass": "data",
    "np = __import__('numpy')": "numpy",
    'import importlib; sp = importlib.import_module("sympy.abc")': "sympy",
    "from importlib import import_module\nimport_module( 'scipy' )": "data",
    "__import__(name)  # numpy": "standard",
    "# import numpy\nx = 1  # from sympy import x": "standard",
    "'import numpy'; \"import numpy\"; r'import numpy'; b'import numpy'": "standard",
    '"""A docstring.\n\nimport numpy\n"""\nimport os': "standard",
    "'''it's\n\\'''\nimport sympy\n'''": "standard",
    "'a\\\nimport numpy'": "standard",
    "x = '\\''\nimport numpy": "numpy",
    "x = '#'; import numpy": "numpy",
    'x = ""; import numpy': "numpy",
    "yield_from = 1\nfrom os import path as numpy": "standard",
    "def f(): yield from numpy\nimport sympy": "sympy",
    "reimport = numpy = 1": "standard",
    "from ..numpy import x": "standard",
    "from .x import numpy": "standard",
    "import os\rimport numpy\r": "numpy",
    "numpy = 1": "standard",
    "'unfinished\nimport numpy": "numpy",
    "import scipy\nimport numpy": "data",
    "from\tscipy import stats": "data",
    wrapped("import numpy\nprint(numpy.e)"): "numpy",
    wrapped("import numpy") + wrapped("from sympy import x"): "sympy",
    "import scipy\n" + wrapped("import numpy"): "data",
    wrapped("print('import numpy')"): "standard",
    wrapped("# é\nimport numpy") + "b64decode('=')": "numpy",
    wrapped("import numpy # " + "x" * 99_999): "numpy",
    "b64decode('" + base64.b64encode(b"import numpy, sympy").decode()[:17]: "numpy",
    "b64decode('" + base64.b64encode(bytes(range(256))).decode() + "')": "standard",
    "decode('" + base64.b64encode(b"import numpy").decode() + "')": "standard",
}


@pytest.mark.parametrize(("code", "name"), CODES.items())
def test_choice(code: str, name: str) -> None:
    """The lightest forkserver that holds what the import statements name."""
    assert PRELOADS[choose(code)].name == name


#: A megabyte each, of what would make a careless pattern try the same text again and again.
HOSTILE = [
    *("import " * 150_000, "import " + "a," * 10**6, "import numpyy," * 70_000, "import " + " " * 10**6),
    *(("import " + " " * 3000) * 330, "import \\\n" * 120_000, "import" * 170_000, "import_module(" * 70_000),
    *("from a" * 170_000, "from a " * 150_000, "from a.from.a." * 70_000, "from " + "a." * 500_000),
    *("from" + " " * 10**6, ("from" + " " * 1000) * 1000, "from \\\n" * 150_000, "__import__(" * 90_000),
    *(("import_module(" + " " * 1000) * 1000, "__import__" * 10**5, "__import__('" * 90_000, "f" * 10**6),
    *(
        "b64decode('AAAAAAAA" * 50_000,
        "b64decode('" + "A" * 10**6,
        "b64decode(" + " " * 10**6,
        "b64decode('AAAAAAA" * 60_000,
    ),
    *("\t" * 10**6, "; " * 10**6, '"' * 10**6, "'''" * 333_333 + "'", '""a' * 333_333, "#\n" * 500_000),
    *("\\" * 10**6, '"\\' * 500_000, "'" + "\\'" * 500_000, '"""' + '\\"' * 500_000, '"""' + '""a' * 333_333),
]


@pytest.mark.parametrize("code", HOSTILE, ids=lambda code: repr(code[:20]))
def test_choice_takes_no_time(code: str) -> None:
    """No text makes the look at the imports slow: the worker does it on its loop."""
    assert choose(f"'numpy';{code}") == 0


def heaviest_import(code: str) -> int:
    """What the parser sees, which the worker must not ask."""
    names: list[str] = []
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Import():
                names += [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module), level=0):
                names.append(module)
            case ast.Call(
                func=ast.Name("__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(str(module)), *_],
            ):
                names.append(module)
    return max([0, *(_HOME.get(name.partition(".")[0], 0) for name in names)])


_MODULES = st.sampled_from(
    ["os", "numpy", "numpy.linalg", "sympy", "scipy", "numpyish", "mynumpy", "fromnumpy", "importlib"]
)
_SPACES = st.sampled_from([" ", "  ", "\t", " \\\n ", " \\\n\t"])
_PIECES = [
    "import numpy",
    "from sympy import x",
    "\n",
    "'",
    '"',
    "#",
    "\\",
    " ",
    ";",
    "f(",
    ")",
    "é",
    "__import__('scipy')",
]
_TEXTS = st.lists(st.sampled_from(_PIECES), max_size=6).map("".join)


def _imports(module: str, other: str, space: str) -> st.SearchStrategy[str]:
    return st.sampled_from(
        [
            f"import{space}{module}",
            f"import {module} as numpy,{space}{other}",
            f"import {other},{module}{space}as b , os",
            f"from{space}{module}{space}import{space}numpy",
            f"from {module} import (\n  numpy, # import numpy\n sympy as x,)",
            f"from .{module}{space}import {other.partition('.')[0]}",
            f"from . import {module.partition('.')[0]}",
            f"x = __import__({module!r})",
            f"import importlib ; importlib.import_module{space}( {module!r} )",
            f"numpy = {module!r}",
            f"x.from_{module}.import_ = 1 ; {module}_import = y",
        ]
    )


def _quoted(text: str) -> st.SearchStrategy[str]:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace('"', '\\"')
    one_line = escaped.replace("\n", "\\n")
    return st.sampled_from(
        [
            *(f"x = {prefix}{quote}{one_line}{quote}" for prefix in ("", "r", "u", "f") for quote in "'\""),
            *(f"{quote}{escaped}{quote}" for quote in ("'''", '"""')),
            *(f"x = {{}}[{quote}{one_line}{quote}] # {one_line}" for quote in "'\""),
            "pass # " + text.replace("\n", " "),
        ]
    )


_STATEMENTS = st.one_of(
    st.builds(_imports, _MODULES, _MODULES, _SPACES).flatmap(lambda each: each), _TEXTS.flatmap(_quoted)
)
_BLOCKS = st.sampled_from(
    [
        "{0}\n{1}\n",
        "x = 1; {0}\n{1}\n",
        "if x: {0}\n{1}\n",
        "try: {0}\nexcept E: pass\n{1}\n",
        "def f(a: int='#') -> None:\n  {0}\n  yield from numpy\n{1}\n",
        "lambda: (yield 'import numpy'); {0}\n{1}\n",
    ]
)


@given(
    st.lists(st.builds(str.format, _BLOCKS, _STATEMENTS, _STATEMENTS), min_size=1, max_size=4).map("".join)
)
def test_choice_agrees_with_the_parser(code: str) -> None:
    """Whatever stands in strings and comments, the choice is that of one who reads the program properly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes
        assert choose(code) == heaviest_import(code)


def test_each_holds_what_the_lighter_ones_hold() -> None:
    """A call may always run in a heavier forkserver than it needs; only a grade is dearer there."""
    for lighter, heavier in itertools.pairwise(PRELOADS):
        assert set(lighter.modules) < set(heavier.modules)
        assert heavier.warm_up.startswith(lighter.warm_up.removesuffix(GRADERS))


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
    assert box.out(_COLD.format(source=box.jail.preload.warm_up), wall_s=60) == "[]\n1\n"


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
