"""Functions against tests, in a real jail: what honest submissions and honest tests can do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sandbox.errors import InvalidCall

from .conftest import Judge

HUMAN_EVAL = """
METADATA = {'author': 'x'}
def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0], 0.3) == True
    assert candidate(numbers=[1.0, 2.0], threshold=0.5) is False
"""
CLOSE = """
from typing import List
def close(numbers: List[float], threshold: float) -> bool:
    return any(abs(a - b) < threshold for i, a in enumerate(numbers) for b in numbers[:i])
"""
NODE = """
class Node:
    count = 0
    def __init__(self, value, next=None):
        self.value, self.next = value, next
        Node.count += 1
    def __eq__(self, other): return self.value == other.value
    def __add__(self, other): return Node(self.value + other.value)
    def __lt__(self, other): return self.value < other.value
    def __len__(self): return 1 + (len(self.next) if self.next else 0)
    def __iter__(self):
        yield self.value
        if self.next: yield from self.next
    def __getitem__(self, at): return list(self)[at]
    def __str__(self): return f"<{self.value}>"
def last(node): return last(node.next) if node.next else node.value
"""
RETURNS = """
import array, collections, datetime, decimal, enum, fractions
class Colour(enum.IntEnum): RED = 1
Point = collections.namedtuple("Point", "x y")
class Words(list): pass
def f(name): return {
    "none": None, "big": 10**5000, "minus": -129, "float": 0.1, "complex": 1 + 2j, "text": "\\ud800é", "bytes": b"a",
    "ints": list(range(-5, 20)), "floats": [0.5] * 20, "bools": [True] * 20, "huge": [10**30] * 20,
    "nested": ({"a": [(1, {2, 3})]}, frozenset("x"), bytearray(b"b")), "counter": collections.Counter("aab"),
    "default": collections.defaultdict(list, a=[1]), "deque": collections.deque([1, 2]), "range": range(3),
    "ordered": collections.OrderedDict(a=1), "fraction": fractions.Fraction(1, 3), "decimal": decimal.Decimal("1.10"),
    "date": datetime.date(2024, 2, 29), "time": datetime.datetime(2024, 2, 29, 1, 2, 3, 4),
    "delta": datetime.timedelta(days=1), "colour": Colour.RED, "point": Point(1, 2), "words": Words("ab"),
    "generator": (n * n for n in range(3)), "keys": {1: 2}.keys(),
}[name]
"""

ACCEPTED: list[tuple[str, str, list[Any], dict[str, Any]]] = [
    ("HumanEval's way", CLOSE, ["check(close)"], {"setup": HUMAN_EVAL}),
    ("MBPP's way", "def f(s): return s[::-1]", ["assert f('ab') == 'ba'", "assert f('') == ''"], {}),
    (
        "a call and what it returns",
        "class Solution:\n    def add(self, a, b): return (a + b, {1: a})",
        [{"function": "add", "arguments": [1, 2], "expected": [3, {"1": 1}]}],
        {},
    ),
    (
        "numbers with a tolerance",
        "def f(): return [1/3, 2, (0.5,)]",
        [{"function": "f", "expected": [0.3333333, 2, [0.5]]}],
        {"tolerance": {}},
    ),
    ("what JSON has no word for", "def f(x): return {'a': [x, -x]}", [{"function": "f", "arguments": [math.inf], "expected": {"a": [math.inf, -math.inf]}}, {"function": "f", "arguments": [math.nan], "expected": {"a": [math.nan] * 2}}], {}),
    ("whole numbers of any length", "def f(x): return x + 1", [{"function": "f", "arguments": [10**100], "expected": 10**100 + 1}], {}),
    ("an argument is changed in place", "def f(x, y): x.sort(); y['a'] = 1", ["x, y = [2, 1], {}\nf(x, y)\nassert (x, y) == ([1, 2], {'a': 1})"], {}),
    ("arguments by name", "def f(self, action): action.append(self)", ["x = []\nf(self=1, action=x)\nassert x == [1]"], {}),
    ("what is raised is raised here", "def f(): raise UnicodeError('no')", ["try: f()\nexcept ValueError as e: assert str(e) == 'no'\nelse: assert 0"], {}),
    ("what it was made of", "class E(ValueError):\n    def __init__(self, n): self.n = n\n    def __str__(self): return f'bad {self.n}'\ndef g(): raise E(3)\ndef h(): return {}['k']", [
        "try: h()\nexcept KeyError as e: assert str(e) == \"'k'\" and e.args == ('k',)",
        "try: g()\nexcept ValueError as e: assert str(e) == 'bad 3'",
    ], {}),
    ("a builtin's name", "def sum(a, b): return a - b", ["assert sum(3, 2) == 1"], {"names": ["sum"]}),
    ("modules without an import", "def f(): return 0.1 + 0.2", ["assert math.isclose(f(), 0.3)", "assert np.allclose([f()], [0.3])"], {}),
    ("names of the tests' own", "def f(): return 1", ["x = f()", "def g(): return x + f()", "assert g() == 2", "assert [x for _ in 'ab'] == [1, 1]"], {}),
    ("the submission is no script", "if __name__ == '__main__': raise SystemExit\ndef f(): return __name__", ["assert f() == 'submission'"], {}),
    ("files of the task", "import more\ndef f(): return more.x + open('data').read()", ["assert f() == '12'"], {"files": {"more.py": "x = '1'", "data": "2"}}),
    ("processes of its own", "import multiprocessing as m\ndef g(x): return x * x\ndef f(how):\n    with m.get_context(how).Pool(2) as pool: return pool.map(g, [1, 2])", ["assert f('fork') == [1, 4]", "assert f('spawn') == [1, 4]"], {}),
    ("a test that prints", "def f(): return 1", ["print('W', flush=True)\nassert f() == 1", "import os\nos.write(1, b'W')"], {}),
    ("generators", "def f():\n    yield 1\n    yield 2", ["assert list(f()) == [1, 2]", "assert next(f()) == 1", "assert 2 in f()", "assert sum(f()) == 3"], {}),
    ("objects", NODE, [
        "a = Node(1, Node(2))\nassert (a.value, a.next.value, a.next.next, last(a)) == (1, 2, None, 2)",
        "a.next.next = Node(3)\nassert last(a) == 3 and len(a) == 3 and list(a) == [1, 2, 3] and a[1] == 2",
        "assert Node(1) == Node(1) and Node(1) != Node(2) and Node(1) < Node(2) and (Node(1) + Node(2)).value == 3",
        "assert str(a) == '<1>' and f'{a}' == '<1>' and isinstance(a, Node) and bool(a)",
        "assert Node.count == 12",
        "del a.value\nassert not hasattr(a, 'value')",
    ], {}),
    ("an object among plain values", NODE, ["x = {'a': [Node(7)]}\nassert x['a'][0].value == 7"], {}),
    ("every kind of value", RETURNS, [
        "import collections, datetime, decimal, fractions",
        "assert f('none') is None and f('big') == 10**5000 and f('minus') == -129 and f('float') == 0.1",
        "assert f('complex') == 1 + 2j and f('text') == '\\ud800é' and f('bytes') == b'a'",
        "assert f('ints') == [*range(-5, 20)] and f('floats') == [0.5] * 20 and f('huge') == [10**30] * 20",
        "assert f('bools') == [True] * 20 and type(f('bools')[0]) is bool",
        "assert f('nested') == ({'a': [(1, {2, 3})]}, frozenset('x'), bytearray(b'b'))",
        "assert f('counter') == {'a': 2, 'b': 1} and f('counter').most_common(1) == [('a', 2)]",
        "assert f('default') == {'a': [1]} and f('deque') == collections.deque([1, 2]) and f('range') == range(3)",
        "assert f('ordered') == {'a': 1} and f('fraction') == fractions.Fraction(1, 3)",
        "assert f('decimal') == decimal.Decimal('1.1') and f('date') == datetime.date(2024, 2, 29)",
        "assert f('time') == datetime.datetime(2024, 2, 29, 1, 2, 3, 4) and f('delta').days == 1",
        "assert f('colour') == 1 and f('colour').name == 'RED' and f('colour') + 1 == 2 and f('colour') < 2",
        "assert f('point') == (1, 2) and f('point').x == 1 and f('point')[1] == 2 and len(f('point')) == 2",
        "assert f('words') == ['a', 'b'] and isinstance(f('words'), list) and 'a' in f('words')",
        "assert list(f('generator')) == [0, 1, 4] and list(f('keys')) == [1]",
    ], {}),
    ("arrays", "import numpy as np\ndef f(x): return x * 2, x.sum(), np.array(['a']), np.array([None])", [
        "import numpy as np\na, b, c, d = f(np.arange(4).reshape(2, 2))",
        "assert a.tolist() == [[0, 2], [4, 6]] and a.dtype == int and b == 6 and c[0] == 'a' and d[0] is None",
    ], {}),
]  # fmt: skip


@pytest.mark.parametrize("case", ACCEPTED, ids=lambda case: case[0])
def test_accepted(judged: Judge, case: tuple[str, str, list[Any], dict[str, Any]]) -> None:
    """These submissions pass these tests."""
    _, code, tests, fields = case
    judgement = judged(code=code, tests=tests, **fields)
    assert judgement.verdict == "accepted", judgement
    assert (judgement.passed, judgement.score) == (len(tests), 1.0)


BAD = [
    ("def f(): return 2", ["assert f() == 1"], {}, ["wrong_answer"]),
    ("def f(): return 2", [{"function": "f", "expected": 1}], {}, ["wrong_answer"]),
    ("def f(): return True", [{"function": "f", "expected": 1}], {}, ["wrong_answer"]),
    ("def f(): return '1'", [{"function": "f", "expected": 1}], {}, ["wrong_answer"]),
    ("def f(): return 1000001", [{"function": "f", "expected": 1000000}], {"tolerance": {}}, ["wrong_answer"]),
    ("def f(): return [1, 2]", [{"function": "f", "expected": [1]}], {}, ["wrong_answer"]),
    ("def f(): return {'a': 1, 'b': 2}", [{"function": "f", "expected": {"a": 1}}], {}, ["wrong_answer"]),
    ("def f(): return None", [{"function": "f", "expected": math.nan}], {}, ["wrong_answer"]),
    ("def f(): return object()", [{"function": "f", "expected": None}], {}, ["wrong_answer"]),
    ("def f(): return 1 / 0", ["assert f() == 1"], {}, ["runtime_error"]),
    ("def f(): assert False", ["assert f() == 1"], {}, ["runtime_error"]),
    ("def g(): pass", ["assert f() == 1"], {}, ["runtime_error"]),
    ("def g(): pass", [{"function": "f", "expected": 1}], {}, ["runtime_error"]),
    ("syntax error", ["assert True"], {}, ["runtime_error"]),
    ("def f(): return None", ["assert f()[0] == 1"], {}, ["runtime_error"]),
    ("def f(): return 1", ["assert f( == 1"], {}, ["checker_error"]),
    ("def f(x): return 1", ["f(lambda: 1)"], {}, ["checker_error"]),
    ("class A: pass", ["class B(A): pass\nB()"], {}, ["checker_error"]),
    ("def f(): return 1", ["assert f() == 1"], {"setup": "def"}, ["checker_error"]),
    ("def f(): return 1", ["assert f() == 1"], {"setup": "g()"}, ["runtime_error"]),
    ("def f(n): return n", ["assert f(1)", "assert f(0)", "assert f(1)"], {}, ["accepted", "wrong_answer", "skipped"]),
    (
        "def f(n): return 1 / n",
        ["assert f(0)", "assert f(1)", "assert f(0) == 1"],
        {"stop_early": False},
        ["runtime_error", "accepted", "runtime_error"],
    ),
    (
        "def f(n):\n    while n: pass",
        ["f(0)", "f(1)", "f(0)"],
        {"stop_early": False, "test_wall_s": 0.3},
        ["accepted", "time_limit", "time_limit"],
    ),
    ("while True: pass", ["f()"], {"test_wall_s": 0.3}, ["time_limit"]),
    ("def f(n):\n    while n: pass", ["f(0)", "f(1)", "f(0)"], {"limits": {"wall_s": 0.5}}, ["accepted", "time_limit", "skipped"]),
    ("def f(): return bytearray(1 << 30)", ["f()"], {"limits": {"memory_bytes": 64 << 20}}, ["memory_limit"]),
    ("def f(): print('x' * 100_000)", ["f()"], {}, ["output_limit"]),
    ("def f():\n    while True: yield 1", ["list(f())"], {"test_wall_s": 0.3}, ["time_limit"]),
]  # fmt: skip


@pytest.mark.parametrize(("code", "tests", "fields", "verdicts"), BAD)
def test_not_accepted(
    judged: Judge, code: str, tests: list[Any], fields: dict[str, Any], verdicts: list[str]
) -> None:
    """These are not accepted, for these reasons; without a score where the test itself is broken."""
    judgement = judged(code=code, tests=tests, **fields)
    assert [test.verdict for test in judgement.tests] == verdicts
    assert (judgement.score is None) == ("checker_error" in verdicts)


def test_what_it_prints_is_shown(judged: Judge) -> None:
    """Both streams of a submission, and why a test failed, are the judgement's stderr."""
    code = "import sys\ndef f(): print('one'); print('two', file=sys.stderr); return 2"
    judgement = judged(code=code, tests=["assert f() == 1, 'three'"])
    assert judgement.stderr == "one\ntwo\ntest 0: AssertionError: three\n"


def test_what_is_no_text_is_no_test(judged: Judge) -> None:
    """Half of a surrogate pair among arguments, which Python can hold and UTF-8 cannot, makes the task invalid."""
    with pytest.raises(InvalidCall, match=r"^tests: "):
        judged(code="", tests=[{"function": "f", "arguments": ["\ud800"], "expected": None}])
