"""What each forkserver holds warm, and which one a program wants.

A fork costs what the forkserver has loaded (1.6 ms of CPU for the standard library, 3.4 with everything), and an import
in the child costs more (100 ms for numpy, 350 for sympy). So there are several forkservers, and a look at the code's
imports chooses one. A wrong guess is only slower: the child then imports for itself.
"""

from __future__ import annotations

import re
from binascii import a2b_base64
from dataclasses import dataclass

#: Modules of the standard library that models use. Each costs every fork a little, so the list is short.
_STANDARD = (
    "abc", "argparse", "array", "ast", "base64", "bisect", "calendar", "cmath", "collections",
    "collections.abc", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "inspect", "io", "itertools", "json", "linecache",
    "locale", "math", "numbers", "operator", "os", "pathlib", "pprint", "queue", "random", "re",
    "shutil", "statistics", "string", "struct", "subprocess", "sys", "tempfile", "textwrap",
    "threading", "time", "traceback", "types", "typing", "unicodedata", "uuid", "warnings",
)  # fmt: skip

_NUMPY = (
    "numpy", "numpy.char", "numpy.fft", "numpy.linalg", "numpy.ma", "numpy.polynomial", "numpy.random", "numpy.rec",
    "numpy.strings", "numpy.testing",
)  # fmt: skip

_SYMPY = (
    "math_verify", "mpmath", "sympy", "sympy.abc", "sympy.ntheory", "sympy.plotting", "sympy.solvers.diophantine",
)  # fmt: skip

_DATA = (
    "networkx", "pandas", "pylatexenc.latex2text", "scipy", "scipy.integrate", "scipy.interpolate",
    "scipy.linalg", "scipy.optimize", "scipy.sparse", "scipy.spatial", "scipy.special", "scipy.stats",
)  # fmt: skip

# A first `solve` costs 200 ms even when sympy is imported: caches, lazy tables, assumptions. Each kind of work once.
_USE_STANDARD = """
import datetime, decimal, json, random, re, tempfile, traceback, linecache
json.loads(json.dumps({"a": [1, 2.5, None]})); re.compile(r"(\\d+)[a-z]*").match("12ab")
with decimal.localcontext():  # which keeps flags of what happened in it
    decimal.Decimal(1) / 3
datetime.datetime.now().strftime("%A %B"); f"{3.14159:.2f} {10**6:,}"
try:
    1 / 0
except ZeroDivisionError:
    traceback.format_exc()
linecache.clearcache()
tempfile.gettempdir()
"""

_USE_NUMPY = """
import numpy as np
a = np.arange(12.0).reshape(3, 4) + 1
np.linalg.solve(a @ a.T + np.eye(3), np.ones(3)); np.linalg.det(np.eye(3)); np.linalg.eigh(np.eye(2))
np.linalg.inv(np.eye(2)); np.linalg.svd(a); np.random.default_rng(1).normal(size=3); np.fft.fft(a[0])
np.sort(a, axis=None); np.roots([1, -3, 2]); repr(a); str(a.mean(axis=0)); np.cumsum(a); np.where(a > 3, a, 0)
np.polyfit([1, 2, 3], [1, 4, 9], 2); np.unique(a); np.random.seed(1)
"""

_USE_SYMPY = """
import sympy as sp
from sympy.parsing.sympy_parser import parse_expr
x, y = sp.symbols("x y"); n = sp.symbols("n", integer=True, positive=True)
sp.solve(x**2 - 2, x); sp.solve([x + y - 3, x - y - 1], [x, y]); sp.simplify(sp.sin(x)**2 + sp.cos(x)**2)
sp.expand((x + 1)**5); sp.factor(x**2 - 1); sp.diff(sp.sin(x) * x, x); sp.integrate(sp.exp(x) * x, x)
sp.integrate(x**2, (x, 0, 1)); sp.limit(sp.sin(x) / x, x, 0); sp.series(sp.exp(x), x, 0, 3); sp.summation(n, (n, 1, 10))
sp.Matrix([[1, 2], [3, 4]]).inv(); sp.Matrix([[2, 0], [0, 3]]).eigenvals(); sp.factorint(360); sp.isprime(97)
sp.Rational(1, 3) + sp.sqrt(2); sp.N(sp.pi, 20); sp.nsimplify(0.5); str(sp.sqrt(8)); repr(x); sp.latex(x / y)
sp.pretty(x**2 / y); parse_expr("x + 1"); sp.sympify("2*x"); sp.solveset(x**2 - 1, x, sp.S.Reals); sp.divisors(12)
sp.lambdify(x, x**2)(2); sp.gcd(12, 18); sp.together(1 / x + 1 / y); sp.binomial(5, 2); sp.floor(sp.Rational(7, 2))
sp.ask(sp.Q.prime(7)); sp.refine(sp.Abs(x), sp.Q.positive(x)); sp.satisfiable(sp.And(x > 1, x < 2))
sp.Sum(sp.KroneckerDelta(n, 2), (n, 1, 3)).doit(); sp.Matrix([[1, 2], [3, 4]]).LUsolve(sp.Matrix([1, 2]))
sp.Eq(x, 1); sp.Piecewise((x, x > 0), (0, True)); sp.solve(x**3 - x, x); sp.cancel((x**2 - 1) / (x - 1))
import mpmath
mpmath.mp.dps = 30; mpmath.zeta(2); mpmath.mp.dps = 15
"""

# Graders ask math-verify. Its parser learns each form that it meets, which costs up to 100 ms the first time: so many
# forms, two a pair, as 1.5 s of CPU at each start of a jail can buy. What is not taken is learned, too.
_USE_MATH_VERIFY = r"""
import math_verify
from latex2sympy2_extended import NormalizationConfig, normalize_latex
from math_verify.parser import parse_latex_cached
normal = NormalizationConfig(basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none")
for pair in r'''
12 & 13 ; 1,234 & -1234.5 ; 0.25 & \frac{1}{4} ; 3/7 & \frac{35}{82} ; 50\% & 0.5 ; -\frac{7}{12} & -0.583
2\frac{1}{3} & 7/3 ; 12\sqrt{3} & \sqrt{12} ; 3\sqrt{2}+1 & \sqrt[3]{18}+1 ; \frac{2+\sqrt{5}}{12} & \frac{\sqrt{5}}{12}
\frac{\pi}{4} & \frac{3}{4}\pi ; x^2+15x+16 & (x+12)(x+3) ; n(n+1)/2 & \frac{n(n+1)}{2} ; (1,2) & (12,35)
[0,1) & [12,25) ; (-\infty,1]\cup[2,\infty) & (-\infty,1] ; \{1,2\} & 12, 35 ; y=2x+1 & 12+35x ; x=5 & 5
\sin^2 x & 1-\cos^2 x ; \log_2 8 & \ln 3 ; 2^{12} & 4^{35/2} ; \frac{x+12}{25} & \frac{x}{2}+\frac{1}{3}
\begin{pmatrix}1\\12\end{pmatrix} & \begin{pmatrix}1&2\\3&4\end{pmatrix} ; 5\text{ cm} & 90^\circ ; {12} & {x+1}
'''.replace(" ; ", "\n").splitlines():
    parsed = []
    for text in pair.split(" & "):
        try:
            parsed.append(parse_latex_cached(normalize_latex(text, normal)))
        except Exception:
            pass
    if len(parsed) == 2:
        math_verify.verify(*parsed, timeout_seconds=0)
parse_latex_cached.cache_clear()
math_verify.verify(math_verify.parse("$1/2$"), math_verify.parse("The answer is 0.5."))
"""

_USE_DATA = """
import networkx as nx, pandas as pd, numpy as np
from scipy import integrate, optimize, stats
from pylatexenc.latex2text import LatexNodes2Text
optimize.fsolve(lambda v: v**2 - 2, 1.0); optimize.minimize(lambda v: (v[0] - 1)**2, [0.0])
optimize.linprog([1.0], bounds=[(0, 1)]); integrate.quad(lambda v: v, 0, 1); stats.norm.cdf(1.0)
frame = pd.DataFrame({"a": [1, 2, 2], "b": [3.0, 4.0, 5.0]}); frame.groupby("a").sum().to_string(); frame.describe()
frame.to_dict("records"); frame.to_csv(); frame.to_html(); frame.melt(id_vars="a"); frame.stack()
pd.get_dummies(frame["a"])
nx.shortest_path(nx.path_graph(4), 0, 3)
LatexNodes2Text().latex_to_text(r"\\alpha")
"""


@dataclass(frozen=True, slots=True)
class Preload:
    """What one kind of forkserver loads."""

    name: str
    modules: tuple[str, ...]
    warm_up: str


#: From light to heavy; each holds all that the ones before it hold, but for the forms that only graders meet.
PRELOADS = (
    Preload("standard", _STANDARD, _USE_STANDARD),
    Preload("numpy", _STANDARD + _NUMPY, _USE_STANDARD + _USE_NUMPY),
    Preload("sympy", _STANDARD + _NUMPY + _SYMPY, _USE_STANDARD + _USE_NUMPY + _USE_SYMPY + _USE_MATH_VERIFY),
    Preload(
        "data",
        _STANDARD + _NUMPY + _SYMPY + _DATA,
        _USE_STANDARD + _USE_NUMPY + _USE_SYMPY + _USE_DATA,
    ),
)

#: A top-level name of a third-party library -> the lightest preload (by position) that holds it.
_HOME = {"numpy": 1, "sympy": 2, "mpmath": 2, "math_verify": 2, "latex2sympy2_extended": 2} | dict.fromkeys(
    ("scipy", "pandas", "networkx", "pylatexenc"), 3
)

#: What rStar2-Agent's reward programs import stands on math-verify (sandbox/grading/fused_compute_score.py).
_HOME |= dict.fromkeys(("fused_compute_score", "recipe"), _HOME["math_verify"])

_KNOWN = "|".join(_HOME)
_ANY_KNOWN = re.compile(_KNOWN)
_KNOWN_IN_LIST = re.compile(rf"(?:^|,)(?:\s|\\)*+({_KNOWN})(?!\w)")

# One pass over the text, which is a stranger's: no parser sees it, nothing is tried twice (each repetition is
# possessive or bounded), and each alternative begins with a letter, so that the engine leaps to the next such. Strings
# and comments are matched so as to be skipped; `import` and `from` are keywords then wherever they are words.
_SPACE = r"(?:[ \t\f]|\\\r?\n)*+"
_DOTTED = rf"(?:{_SPACE}\.{_SPACE}(?:(?!import(?!\w))\w++)?+)"
_CALLED_WITH = rf"""{_SPACE}\(\s*+["']{{1,3}}+(\w++)"""
_IMPORT = re.compile(
    r'"""(?:[^"\\]++|\\.|"(?!""))*+(?:""")?+'
    r"|'''(?:[^'\\]++|\\.|'(?!''))*+(?:''')?+"
    r'|"(?:[^"\\\r\n]++|\\.)*+"?+'
    r"|'(?:[^'\\\r\n]++|\\.)*+'?+"
    r"|#[^\r\n]*+"
    # A relative import has no name before its first dot.
    rf"|from(?<!\wfrom)(?!\w){_SPACE}(\w*+){_DOTTED}{{0,20}}+{_SPACE}import(?!\w)"
    r"|import(?<!\wimport)(?!\w)((?:[\w., \t\f]|\\\r?\n){0,4000}+)"
    rf"|import_module{_CALLED_WITH}"
    rf"|__import__{_CALLED_WITH}",
    re.DOTALL,
)


#: Characters of a program that are looked at: all of most, and of a hostile one what takes 20 ms of the worker's loop.
SCANNED = 65536


#: A program that others wrap, as rStar2-Agent's tools do: in base64, for which a name of this kind is called.
_WRAPPED = re.compile(r"""b64decode\(\s{0,9}+["']([A-Za-z0-9+/]{8,}+)""")


def choose(code: str) -> int:
    """Position in PRELOADS of the lightest forkserver that holds what the code, and code wrapped in it, imports."""
    code = code[:SCANNED]
    wrapped = _WRAPPED.findall(code) if "b64decode" in code else []
    return max(_choose(code), _choose("\n".join(map(_unwrap, wrapped))))


def _unwrap(text: str) -> str:
    whole = (
        text[:-1] if len(text) % 4 == 1 else text
    )  # one more character holds no byte, and may be all of a cut
    return a2b_base64(whole + "=" * (-len(whole) % 4)).decode(errors="replace")


def _choose(code: str) -> int:
    if not _ANY_KNOWN.search(code):
        return 0
    best = 0
    for origin, names, called, built_in in _IMPORT.findall(code):
        if names:
            best = max(best, *(_HOME[name] for name in _KNOWN_IN_LIST.findall(names)), 0)
        elif name := origin or called or built_in:
            best = max(best, _HOME.get(name, 0))
    return best
