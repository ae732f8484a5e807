"""A submission that attacks its tests: it neither sees them nor makes them say what they would not."""

from __future__ import annotations

import pytest

from .conftest import Judge

#: Right in none of the tests below, whatever else it is.
FORGER = """
class Forger:
    def __init__(self, *args): pass
    def yes(self, *args, **named): return True
    def __getattr__(self, name): return self.yes
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = yes
    def zero(self, *args): return 0.0
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __abs__ = __truediv__ = __mod__ = zero
    __hash__ = lambda self: hash(4)
    __class__ = int
"""
FORGERS = {
    "Forger()": FORGER,
    "Forger(7)": FORGER.replace("class Forger:\n    def __init__(self, *args): pass", "class Forger(float):"),
}
#: Each way to ask whether f(2) is 4.
ASKED = [
    "assert f(2) == 4",
    "assert 4 == f(2)",
    "assert not f(2) != 4",
    "assert f(2) in [4]",
    "assert f(2) in {4}",
    "assert [f(2)] == [4] and (f(2),) == (4,) and {'a': f(2)} == {'a': 4}",
    "assert 4 in f(2)",
    "assert abs(f(2) - 4) < 1e-6",
    "assert abs(4 - f(2)) < 1e-6",
    "assert f(2) >= 4 and f(2) <= 4",
    "assert 3.9 < f(2) < 4.1",
    "assert f(2) - 4 == 0",
    "assert f(2) % 4 == 0 and f(2) > 3",
    "assert sorted([f(2), 4]) == [4, 4]",
    "import math\nassert math.isclose(f(2), 4)",
    "import numpy as np\nassert np.allclose(f(2), 4)",
    "import numpy as np\nnp.testing.assert_almost_equal(f(2), 4)",
    "import unittest\nunittest.TestCase().assertEqual(f(2), 4)",
    "import unittest\nunittest.TestCase().assertAlmostEqual(f(2), 4)",
    "assert f(2) is True",
    {"function": "f", "arguments": [2], "expected": 4},
    {"function": "f", "arguments": [2], "expected": [4]},
    {"function": "f", "arguments": [2], "expected": {"4": 4}},
]


@pytest.mark.parametrize("kind", ["Forger()", "Forger(7)"])
def test_an_object_that_is_equal_to_all(judged: Judge, kind: str) -> None:
    """However a test asks whether an answer is a plain value, an object that always says yes is not asked."""
    judgement = judged(code=f"{FORGERS[kind]}\ndef f(x): return {kind}", tests=ASKED, stop_early=False)
    passed = [asked for asked, test in zip(ASKED, judgement.tests, strict=True) if test.verdict == "accepted"]
    assert passed == []


def test_a_plain_value_is_told_from_it(judged: Judge) -> None:
    """The tests that an object cannot pass are passed by the right answer, where there is one."""
    judgement = judged(code="def f(x): return 4", tests=ASKED, stop_early=False)
    missed = [asked for asked, test in zip(ASKED, judgement.tests, strict=True) if test.verdict != "accepted"]
    assert missed == ["assert 4 in f(2)", "assert f(2) is True", *ASKED[-2:]]


EVERYWHERE = """
def everywhere(text):
    for fd in range(64):
        try: os.write(fd, text)
        except OSError: pass
    for name in ("/dev/stdout", "/dev/stderr", f"/proc/{os.getppid()}/fd/1", "/proc/1/fd/1", f"/proc/{os.getppid()}/mem"):
        try: open(name, "wb", buffering=0).write(text)
        except OSError: pass
"""
ATTACKS = {
    "exits while it loads": "sys.exit(0)",
    "leaves while it loads": "os._exit(0)",
    "exits": "def f(x): sys.exit(0)",
    "leaves": "def f(x): os._exit(0)",
    "leaves in a thread": "import threading\nthreading.Thread(target=os._exit, args=(0,)).start()\ndef f(x): time.sleep(9)",
    "leaves at exit": "import atexit\natexit.register(os.write, 1, b'AA')\ndef f(x): sys.exit(0)",
    "writes a verdict": EVERYWHERE + "everywhere(b'AA')\ndef f(x): everywhere(b'AA'); os._exit(0)",
    "writes verdicts all the time": EVERYWHERE
    + "import threading\ndef loop():\n    while True: everywhere(b'A')\nthreading.Thread(target=loop, daemon=True).start()\ndef f(x): time.sleep(0.1)",
    "prints one": "print('AA', flush=True)\nprint('AA', file=sys.__stdout__, flush=True)\ndef f(x): print('AA')",
    "kills the tests": "os.kill(os.getppid(), 9)\ndef f(x): pass",
    "kills them in a test": EVERYWHERE + "def f(x): everywhere(b'AA'); os.kill(os.getppid(), 9)",
    "ends them": "import signal\ndef f(x): os.kill(os.getppid(), signal.SIGTERM)\nf(0); time.sleep(5)",
    "interrupts them": "import signal\ndef f(x): os.kill(os.getppid(), signal.SIGINT); return 1",
    "stops them": "import signal\nos.kill(os.getppid(), signal.SIGSTOP)\ndef f(x): return 1",
    "stops itself": "import signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "kills all": "def f(x): os.kill(-1, 9)",
    "patches builtins": "import builtins\nfor name in ('abs', 'len', 'sorted', 'isinstance', 'all', 'compile', 'exec'): setattr(builtins, name, lambda *a, **k: True)\nbuiltins.AssertionError = KeyError\ndef f(x): return 1",
    "patches modules": "import json, operator, pickle, unittest, math, re\njson.load = json.loads = pickle.loads = lambda *a, **k: {'tests': []}\noperator.eq = math.isclose = re.fullmatch = lambda *a: True\ndef f(x): return 1",
    "names what tests name": "sorted = abs = len = all = any = isinstance = set = lambda *a, **k: True\ndef f(x): return 1",
    "brings a module": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\nnp = math\nnp.allclose = math.isclose\ndef f(x): return 1",
    "writes modules": "for name in ('math', 'numpy', 'unittest', 'json', 'sitecustomize', 'submission', 'main', 'tests'):\n    open(name + '.py', 'w').write('def __getattr__(name): return lambda *a, **k: True')\ndef f(x): return 1",
    "writes folders": "for name in ('math', 'numpy', 'unittest'):\n    os.makedirs(name); open(name + '/__init__.py', 'w').write('isclose = allclose = print')\ndef f(x): return 1",
    "patches our part of it": "import roc_harness as m\nm.Writer.bytes_of = lambda self, value: b'T'\nm._ACTIONS['eq'] = m.same = m.Tests.run = lambda *a: True\ndef f(x): return 1",
    "answers for itself": "import roc_harness as m, socket\nlink = [s for s in map(lambda fd: socket.socket(fileno=fd), range(3, 9)) if s][0]\ndef f(x): return 1",
    "limits the tests": "import resource\ndef f(x):\n    for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_DATA, resource.RLIMIT_STACK):\n        try: resource.prlimit(os.getppid(), limit, (0, 0))\n        except OSError: pass\n    return 1",
    "takes the memory": "def f(x): a = bytearray(1 << 31)",
    "raises what tests raise": "def f(x): raise AssertionError",
    "raises what is no error": "class Odd(BaseException):\n    def __str__(self): raise self\ndef f(x): raise Odd",
    "raises a lie": "class NoValueError(Exception): pass\nclass OverError(BaseException): pass\ndef f(x): raise (NoValueError if x else OverError)",
    "raises the end of all": "def f(x): raise StopIteration",
    "ends an iteration": "def f(x):\n    return\n    yield",
}
#: A message in place of each answer, as bytes that Python says.
MESSAGES = {
    "nothing": "b''",
    "no value": "b'?'",
    "too short": "b'i\\xff\\xff\\xff\\xff'",
    "something behind it": "b't\\3\\0\\0\\0TNl\\0\\0\\0\\0N'",
    "many of nothing": "b'l\\xff\\xff\\xff\\xff'",
    "very deep": "b't\\1\\0\\0\\0' * 100_000",
    "a key that is a list": "b'd\\1\\0\\0\\0l\\0\\0\\0\\0N'",
    "a kind that is none": "b'm\\xffN'",
    "made of something else": "b'm\\1N'",
    "an array of objects": "b'a' + w('|O') + w([1]) + w(b'12345678')",
    "an array of its own": "b'a' + w('<i8') + w([1 << 40]) + w(b'12345678')",
    "an array of nothing": "b'a' + w('<U0') + w([1 << 40]) + w(b'')",
    "an error that is none": "w((False, 'open', '/etc/passwd', ()))",
    "an error that is a group": "w((False, 'ExceptionGroup', '', ()))",
    "yes": "w(True)",
    "no answer": "w((1, 4, []))",
    "a lie about arguments": "w((True, 1, [(4,), (4,), (4,)]))",
}
TESTS = [
    "assert f(2) == 4",
    "import math, numpy, unittest\nassert math.isclose(f(3), 9) and numpy.allclose(f(3), 9)",
]


@pytest.mark.parametrize("name", ATTACKS)
def test_no_attack_is_accepted(judged: Judge, name: str) -> None:
    """Whatever a submission does to itself, to the folder, to descriptors or to the other process, no test is accepted."""
    code = f"import os, sys, time\n{ATTACKS[name]}"
    limits = {"wall_s": 2, "memory_bytes": 128 << 20}
    for stop_early in (True, False):
        judgement = judged(code=code, tests=TESTS, limits=limits, test_wall_s=1, stop_early=stop_early)
        assert judgement.passed == 0
        assert judgement.score == 0


@pytest.mark.parametrize("name", MESSAGES)
def test_no_message_is_more_than_an_answer(judged: Judge, name: str) -> None:
    """Bytes in place of an answer that are no answer end the submission; no test is accepted, and ours does not break."""
    code = f"""
import roc_harness as m
w = m.Writer(lambda value: 0).bytes_of
def f(x):
    m.send = lambda link, message, send=m.send: send(link, {MESSAGES[name]})
"""
    judgement = judged(code=code, tests=TESTS, stop_early=False, limits={"wall_s": 3})
    assert [test.verdict for test in judgement.tests] in (["runtime_error"] * 2, ["wrong_answer"] * 2)


@pytest.mark.parametrize(
    "code",
    [
        "def f(x): raise StopIteration",
        "class F:\n    def __getattr__(self, name): raise StopIteration\nf = F()",
    ],
)
def test_an_end_of_an_iteration_ends_none_of_the_tests(judged: Judge, code: str) -> None:
    """What a submission raises is not taken for the end of what a test goes through."""
    setup = "def check(x): return (f(x) if callable(f) else f.value) == x"
    tests = ["assert all(map(check, [1, 2]))", "assert not [x for x in map(check, [1, 2]) if not x]"]
    assert judged(code=code, setup=setup, tests=tests, stop_early=False).passed == 0


def test_no_array_lies_in_the_tests_memory(judged: Judge) -> None:
    """Arrays come by value: a submission cannot have numpy take one from a place in the memory of the tests."""
    code = """
import ctypes, roc_harness
class Array:
    __array_interface__ = {"shape": (8,), "typestr": "|u1", "data": (id(roc_harness.Tests), True), "version": 3}
def there(): return list(ctypes.string_at(id(roc_harness.Tests), 8))
f = Array
"""
    tests = ["import numpy as np\nassert np.array(f()).tolist() == there()"]
    assert judged(code=code, tests=tests).passed == 0


def test_a_swallowed_end_is_no_success(judged: Judge) -> None:
    """A test that takes any exception does not take the end of the submission for the one that it wants."""
    tests = ["try: f()\nexcept: pass\nelse: assert False"]
    assert judged(code="import os\ndef f(): os._exit(0)", tests=tests).verdict == "runtime_error"
    assert judged(code="def f(): raise ValueError", tests=tests).verdict == "accepted"


SEEKER = """
import gc, os, re, sys
def places():
    for name in ("/dev/stdin", "main.py", "submission.py", "/proc/self/environ", "/proc/self/fd/0"):
        yield lambda: open(name).read()
    yield sys.stdin.read
    for pid in {os.getppid(), *range(1, 50)}:
        for name in ("environ", "cmdline", "mem", "fd/0", "fd/1", "fd/3", "fd/4", "cwd/main.py", "stack", "auxv"):
            yield lambda: open(f"/proc/{pid}/{name}").read(1 << 16) if pid != os.getpid() else ""
    for fd in range(64):
        yield lambda: os.pread(fd, 1 << 16, 0).decode()
    yield lambda: repr([each for each in gc.get_objects() if type(each) in (dict, list, tuple)])
    frame = sys._getframe()
    while frame:
        yield lambda: repr((frame.f_locals, frame.f_globals))
        frame = frame.f_back
def f(x):
    for look in places():
        try: found = re.search("KEY-[0-9]{6}", look())
        except Exception: continue
        if found: return found[0]
f(0)
"""


@pytest.mark.parametrize(("argument", "verdict"), [("KEY-314159", "accepted"), ("", "wrong_answer")])
def test_no_test_is_seen(judged: Judge, argument: str, verdict: str) -> None:
    """Wherever a submission looks, it finds what its own calls are given, and nothing of what is expected."""
    tests = [f"assert f({argument!r}) == KNOWN", "assert f(0) == 'KEY-314159'"]
    judgement = judged(code=SEEKER, tests=tests, setup="KNOWN = 'KEY-314159'")
    assert judgement.tests[0].verdict == verdict, judgement
