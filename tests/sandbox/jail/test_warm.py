"""Programs in a warm jail behave as in an interpreter of their own, though all that they find there is immortal."""

from __future__ import annotations

import ast
import textwrap

import pytest

from . import typical
from .box import Box

#: Runs a program here and in an interpreter that has just started, in the same jail, and compares what they print.
_BOTH = """
import contextlib, io, subprocess, sys
program = {program!r}
with contextlib.redirect_stdout(io.StringIO()) as here:
    exec(program, {{"__name__": "program"}})
alone = [sys.executable, "-s", "-c", "exec(" + repr(program) + ", {{'__name__': 'program'}})"]
there = subprocess.run(alone, stdout=subprocess.PIPE, text=True, check=True).stdout
print(here.getvalue() == there or (here.getvalue(), there))
print(there)
"""


def agrees(box: Box, program: str) -> str:
    """Run the program both ways; what it prints must be the same, and is returned."""
    verdict, _, printed = box.out(_BOTH.format(program=textwrap.dedent(program)), wall_s=60).partition("\n")
    assert verdict == "True"
    return printed


def box_of(request: pytest.FixtureRequest, fixture: str) -> Box:
    """The jail of that name."""
    box: Box = request.getfixturevalue(fixture)
    return box


BOXES = ["box", "numpy_box", "sympy_box", "data_box"]

_COUNTS = """
import json, sys, sysconfig
immortal = 2**32 - 1
warm = [json, json.loads, json.loads.__code__, json.loads.__code__.co_consts, json.decoder.JSONDecoder, sys.modules]
mine = [[], object(), type("Mine", (), {}), lambda: None, json.JSONDecoder()]
print(sys.version_info[:2] in ((3, 12), (3, 13)) and not sysconfig.get_config_var("Py_GIL_DISABLED"))
print([sys.getrefcount(each) == immortal for each in warm])
print([sys.getrefcount(each) < 100 for each in mine])
"""


@pytest.mark.parametrize("fixture", BOXES)
def test_what_is_warm_is_immortal(fixture: str, request: pytest.FixtureRequest) -> None:
    """Where the interpreter knows immortal objects all that is warm is one, and nothing that a program makes."""
    can, warm, mine = map(eval, box_of(request, fixture).out(_COUNTS).splitlines())
    assert warm == [can] * 6
    assert mine == [True] * 5


_TOGETHER = """
import bisect, collections, sys, types
starts = []
for line in open("/proc/self/maps"):
    starts.append(int(line.partition("-")[0], 16))
functions = [each for module in list(sys.modules.values()) for each in vars(module).values()
             if type(each) is types.FunctionType]
places = collections.Counter(bisect.bisect(starts, id(each)) for each in functions)
print(places.most_common(1)[0][1] / len(functions))
"""


def test_what_is_warm_lies_together(data_box: Box) -> None:
    """Of all libraries' functions few are outside of one mapping: those from before the forkserver could say so."""
    assert float(data_box.out(_TOGETHER)) > 0.8


#: What stands on the count of references, or changes what is warm.
_ON_OBJECTS = """
import collections, contextlib, copy, functools, gc, importlib, io, json, pickle, re, string, sys, threading, weakref

class Mine(collections.OrderedDict):
    pass
mine = Mine(a=1)
ref, died = weakref.ref(mine), []
weakref.finalize(mine, died.append, "finalized")
del mine
print(ref(), died)  # an own object dies with its last name, also of a warm class

def numbers():
    try:
        yield 1
    finally:
        print("closed")
kept = numbers(); next(kept); del kept
with contextlib.closing(numbers()) as left:
    next(left)

class Circle: pass
circle = Circle(); circle.me = circle; ref = weakref.ref(circle); del circle; gc.collect(); print(ref())
print(Mine in collections.OrderedDict.__subclasses__()); del Mine; gc.collect()
print([each.__name__ for each in collections.OrderedDict.__subclasses__() if each.__name__ == "Mine"])

before = json.dumps
importlib.reload(json); print(json.dumps is before, json.loads("[1]"))
del sys.modules["string"]; import string as another; print(another is string, another.digits)
saved = string.digits; string.digits = "other"; del string.digits; print(hasattr(string, "digits")); string.digits = saved
re.purge(); print(re.sub("a+", "b", "caat"), re.compile("(x)y").groups)
functools.reduce = None; importlib.reload(functools); print(functools.reduce(lambda a, b: a + b, [1, 2]))

words = [json.__doc__, json.decoder.__name__, string.ascii_letters, "Mine"]
print([sys.intern(word) == word for word in words], [sys.intern(str(word)) is sys.intern(word) for word in words])
holder = type(string.ascii_lowercase, (), {string.ascii_uppercase: 1})
setattr(holder, string.hexdigits, 2); print(getattr(holder, string.hexdigits), sorted(vars(holder))[:2])
text = string.digits
for _ in range(3): text += "x"
print(text, string.digits)
data = b"".__add__(json.__name__.encode()); data += b"!"; print(data)
print(pickle.loads(pickle.dumps(json.JSONDecoder)) is json.JSONDecoder, copy.deepcopy(json.JSONEncoder().__dict__))

@functools.lru_cache(maxsize=2)
def cached(x): return [x]
first = weakref.ref(type("Set", (set,), {})()); print(first(), cached(1) is cached(1), [cached(n) for n in range(4)])
print(cached.cache_info())

def work(): out.append(threading.current_thread() is threading.main_thread())
out = []; threads = [threading.Thread(target=work) for _ in range(4)]
[each.start() for each in threads]; [each.join() for each in threads]; print(out, threading.active_count())
try:
    json.loads("{")
except json.JSONDecodeError as exc:
    ref = weakref.ref(exc); print(exc, exc.__traceback__ is not None)
print(ref())
gc.unfreeze(); print(gc.get_freeze_count()); gc.collect(); gc.collect()
print(json.dumps({"a": (1, 2.5, None)}), io.StringIO("x").read(), re.findall("[0-9]+", "a1b22"))
"""

_ON_NUMPY = """
import gc, sys, weakref
import numpy as np
a = np.arange(6.0); b = a; a += 1; a *= 2; print(b, a is b, np.add(a, 1, out=a) is b)
big = np.ones(300_000); print((big + 1 + 1 + 1).sum(), (big * 2 - big).sum(), big.sum())  # temporaries are used again
a.resize(8, refcheck=False); print(a)
own = np.zeros(3); own.resize(5); print(own)
try:
    view = own[1:]; own.resize(9)
except ValueError as exc:
    print(exc)
ref = weakref.ref(np.ones(3)); print(ref())
base = np.arange(10); view = base[::2]; ref = weakref.ref(base); del base; print(ref() is view.base)
del view; print(ref())
kind = np.dtype([("x", "f8"), ("y", "i4", (2,))]); print(np.zeros(2, kind), np.dtype("f8") is np.dtype(float))
print(np.array(["a", "bc"]).astype("O"), np.char.upper(np.array(["x"])), np.array([1, None, "z"], object)[::-1])
with np.errstate(divide="raise"):
    try:
        np.float64(1) / 0
    except FloatingPointError as exc:
        print(exc)
np.random.seed(3); print(np.random.rand(2), np.random.default_rng(5).normal(size=2))
items = [np.float64(n) for n in range(1000)]; print(sum(items), np.sort(items)[::400], np.where(np.array(items) > 997))
print(np.ma.masked_array([1, 2], [0, 1]).sum(), np.vectorize(lambda x: x + 1)([1, 2]), np.einsum("i,i", [1, 2], [3, 4]))
gc.unfreeze(); gc.collect(); gc.collect(); print(np.linalg.inv(np.array([[2.0, 1], [1, 1]])), np.fft.fft([1, 0, 0, 0]))
"""

_ON_SYMPY = """
import gc
from sympy import *
from sympy.core.cache import clear_cache, print_cache
x, y = symbols("x y")
print(solve(x**2 - 2, x), simplify(sin(x)**2 + cos(x)**2), integrate(x * exp(x), x))
clear_cache(); print(solve([x + y - 3, x - y - 1], [x, y]), factor(x**3 - 1), limit(sin(x) / x, x, 0))
print(len({expand((x + n) ** 2) for n in range(1500)}))  # more than the caches hold
print(solve(x**2 - 2, x), Symbol("x") is x, Dummy("x") == Dummy("x"), Symbol("x", positive=True) == x)
print(series(exp(x), x, 0, 4), Matrix([[1, 2], [3, 4]]).det(), summation(y, (y, 1, 10)), N(pi, 30), diophantine(3*x + 2*y - 5))
class Own(Function):
    @classmethod
    def eval(cls, n):
        return n + 1 if n.is_Integer else None
print(Own(3), Own(x), Own(x).subs(x, 4), latex(Own(x)), lambdify(x, x**2 + 1)(3))
gc.unfreeze(); gc.collect(); gc.collect(); print(solve(x**3 - 6*x**2 + 11*x - 6, x), isprime(97), factorint(3600))
import mpmath
mpmath.mp.dps = 40; print(mpmath.zeta(3), mpmath.quad(lambda t: t, [0, 1]), mpmath.findroot(mpmath.sin, 3))
"""

_ON_DATA = """
import gc, warnings, weakref
import networkx as nx, numpy as np, pandas as pd
from scipy import optimize, stats
frame = pd.DataFrame({"a": [1, 2, 2], "b": [3.0, 4.0, 5.0], "c": list("xyz")})
part = frame["b"]; part.iloc[0] = 99; print(frame, part.tolist())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    frame["b"][0] = 1; frame["b"].replace(4.0, 5.0, inplace=True)
print([each.category.__name__ for each in caught], frame)
frame.loc[frame["a"] > 1, "b"] += 1; print(frame.groupby("a").sum(numeric_only=True), frame.merge(frame, on="a").shape)
print(frame.pivot_table(index="a", columns="c", values="b"), frame.describe().to_string(), frame.astype({"a": "float"}).dtypes)
ref = weakref.ref(frame); del frame, part; gc.collect(); print(ref())
print(optimize.fsolve(lambda v: v**2 - 2, 1.0).round(6), optimize.minimize(lambda v: (v[0] - 1) ** 2, [0.0]).x.round(3))
print(stats.norm.cdf(1.96), stats.linregress([1, 2, 3], [2, 4, 6]).slope, stats.norm(3).mean())
graph = nx.Graph([(1, 2), (2, 3)]); print(nx.shortest_path(graph, 1, 3), nx.is_tree(graph), sorted(graph.degree))
from math_verify import parse, verify
print(verify(parse("$\\\\frac{1}{2}$"), parse("$0.5$")), parse("$x^2$"))
gc.unfreeze(); gc.collect(); gc.collect(); print(pd.Series([3, 1]).sort_values().tolist(), pd.to_datetime("2024-02-01").day_name())
"""


@pytest.mark.parametrize(
    ("fixture", "program"),
    [
        *((fixture, _ON_OBJECTS) for fixture in BOXES),
        *((fixture, _ON_NUMPY) for fixture in BOXES[1:]),
        *((fixture, _ON_SYMPY) for fixture in BOXES[2:]),
        ("data_box", _ON_DATA),
    ],
)
def test_nothing_behaves_otherwise(fixture: str, program: str, request: pytest.FixtureRequest) -> None:
    """What dies does so in its time, what changes in place does, and caches forget and fill, as in any interpreter."""
    assert agrees(box_of(request, fixture), program).count("\n") > 5


_EXAMPLES = """
import doctest, importlib, warnings
warnings.simplefilter("ignore")
for name in {modules}:
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(importlib.import_module(name)):
        runner.run(test)
    assert runner.tries > 7
    assert not runner.failures
"""


@pytest.mark.parametrize(
    ("fixture", "modules"),
    [
        ("box", ["collections", "difflib", "statistics", "typing"]),
        ("numpy_box", ["numpy.lib._index_tricks_impl", "numpy.polynomial._polybase"]),
        ("sympy_box", ["sympy.core.numbers", "sympy.core.power", "sympy.ntheory.primetest", "mpmath.functions.functions"]),
        ("data_box", ["networkx.classes.graph", "networkx.algorithms.dag"]),
    ],
)  # fmt: skip
def test_the_libraries_own_examples(fixture: str, modules: list[str], request: pytest.FixtureRequest) -> None:
    """The examples in the documentation of libraries, where all of them hold, hold in a warm jail."""
    box_of(request, fixture).out(_EXAMPLES.format(modules=modules), wall_s=60)


#: Modules of the preloaded packages that a program still imports for itself when it wants them, and why.
NOT_WARM = {
    "numpy._typing": "of numpy.typing",
    "numpy.core": "the name of numpy._core until 2.0; using it warns",
    "numpy.ctypeslib": "arrays for C libraries, which the jail has none of",
    "numpy.f2py": "calls a Fortran compiler, which the jail has none of",
    "numpy.typing": "for type checkers",
    "scipy._lib._disjoint_set": "of scipy.cluster",
    "scipy.cluster": "rare",
    "scipy.datasets": "downloads",
    "scipy.differentiate": "rare",
    "scipy.fftpack": "the old form of scipy.fft",
    "scipy.io": "files of other programs",
    "scipy.odr": "rare",
    "scipy.signal": "rare for its 40 modules",
}

_LATE = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
before = set(sys.modules)
for root in {roots}:
    package = importlib.import_module(root)
    for name in {{*dir(package), *getattr(package, "__all__", ())}}:
        getattr(package, name, None)
for program in {programs}:
    exec(program, {{"__name__": "__main__"}})
print("late", sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize(
    ("fixture", "programs"),
    [
        ("box", [typical.STANDARD]),
        ("numpy_box", [typical.STANDARD, typical.NUMPY]),
        ("sympy_box", [typical.STANDARD, typical.NUMPY, typical.SYMPY]),
        ("data_box", [typical.STANDARD, typical.NUMPY, typical.SYMPY, typical.DATA]),
    ],
)
def test_nothing_is_imported_late(fixture: str, programs: list[str], request: pytest.FixtureRequest) -> None:
    """What programs typically use of the preloaded packages is warm, also what those load on first use."""
    box = box_of(request, fixture)
    roots = sorted({name.partition(".")[0] for name in box.jail.preload.modules})
    printed = box.out(_LATE.format(roots=roots, programs=programs), wall_s=60)
    late = ast.literal_eval(printed.rpartition("late ")[2])
    known = tuple(f"{name}." for name in NOT_WARM)
    assert [
        name for name in late if name.partition(".")[0] in roots and not f"{name}.".startswith(known)
    ] == []
