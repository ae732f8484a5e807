"""Small programs that want much: of the compiler, of numbers, of patterns, of the interpreter's own stack and ends."""

from __future__ import annotations

import pytest

from sandbox.calls import MIB, ToolResult
from tests.sandbox.jail.box import Box, program

from .conftest import standard_box as box  # limits are no matter of the level

__all__ = ["box"]

#: Name -> program, and how it may end.
BOMBS = {
    "parentheses": ("eval('(' * 5000 + ')' * 5000)", "error"),
    "signs": ("eval('-' * 1_000_000 + '1')", "error signaled memory_limit"),
    "lambdas": ("eval('lambda:' * 200_000 + '1')", "error signaled memory_limit"),
    "attributes": ("eval('a' + '.b' * 300_000)", "error signaled memory_limit"),
    "sums": ("eval('+'.join(['1'] * 1_000_000))", "ok error signaled memory_limit"),
    "f-strings": ("eval('f\\'' + '{' * 3000)", "error"),
    "blocks": ("exec('\\n'.join(' ' * n + 'if 1:' for n in range(200)))", "error"),
    "statements": ("exec('x = 1\\n' * 3_000_000)", "ok timeout memory_limit"),
    "constants": ("exec('x = ' + '9' * 5_000_000)", "error output_limit"),
    "folded power": ("exec('x = 10 ** 10 ** 10')", "timeout memory_limit error"),
    "folded string": ("exec('x = ((\"a\" * 4000) * 4000) * 4000')", "memory_limit error timeout"),
    "power": ("x = 7 ** 7 ** 12", "timeout memory_limit error"),
    "factorial": ("import math\nmath.factorial(10 ** 8)", "timeout memory_limit"),
    "digits": ("import sys\nsys.set_int_max_str_digits(0)\nstr(1 << 300_000_000)", "timeout memory_limit"),
    "shift": ("1 << (1 << 40)", "error memory_limit"),
    "format": ("f'{1:{10 ** 11}}'", "error memory_limit"),
    "list": ("[0] * 10 ** 11", "error memory_limit"),
    "pattern": ("import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", "timeout"),
    "nested pattern": ("import re\nre.compile('(' * 50_000 + ')' * 50_000)", "error output_limit signaled memory_limit"),
    "repeated pattern": ("import re\nre.compile('(?:' * 6 + 'a{1000}' + '){1000}' * 6)", "ok error timeout memory_limit"),
    "pickle": ("import pickle\npickle.loads(b'\\x80\\x04\\x8e' + (1 << 40).to_bytes(8, 'little') + b'x.')", "error memory_limit"),
    "pickle that runs": ("import pickle\nclass A:\n    def __reduce__(self): return eval, ('9 ** 9 ** 9',)\npickle.loads(pickle.dumps(A()))", "timeout memory_limit"),
    "nested json": ("import json\njson.loads('[' * 1_000_000)", "error"),
    "laughs": ("import xml.etree.ElementTree as e\ne.fromstring('<!DOCTYPE a [<!ENTITY a \"lol\">' + ''.join(f'<!ENTITY {chr(98 + n)} \"' + f'&{chr(97 + n)};' * 10 + '\">' for n in range(9)) + ']><a>&j;</a>')", "error timeout memory_limit"),
    "inflated": ("import zlib\nsmall = zlib.compress(bytes(1 << 26))\nkept = []\nwhile True: kept.append(zlib.decompress(small))", "memory_limit timeout"),
    "recursion": ("import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()", "error signaled memory_limit timeout"),
    "recursion in C": ("import sys, functools\nsys.setrecursionlimit(10 ** 9)\nf = int\nfor _ in range(10 ** 6): f = functools.partial(f)\nf()", "ok error signaled memory_limit"),
    "recursive repr": ("class A(Exception):\n    def __repr__(self): return repr(self)\n    __str__ = __repr__\nraise A", "error"),
    "deep list": ("x = []\nfor _ in range(1_000_000): x = [x]\nprint(repr(x)[:0])", "error signaled"),
    "deep end": ("x = None\nfor _ in range(1_000_000): x = [x]", "ok"),
    "chained exceptions": ("last = None\nfor _ in range(20_000):\n    new = ValueError()\n    new.__context__ = last\n    last = new\nraise last", "error output_limit"),
    "grouped exceptions": ("e = ValueError()\nfor _ in range(60): e = ExceptionGroup('', [e, e])\nraise e", "error output_limit timeout memory_limit"),
    "long message": ("raise ValueError('x' * 50_000_000)", "output_limit memory_limit"),
    "long traceback": ("import sys\nsys.setrecursionlimit(10 ** 6)\ndef f(n): n and g(n - 1) or 1 / 0\ndef g(n): n and f(n - 1) or 1 / 0\nf(5000)", "error output_limit"),
    "long names": ("import os\nos.execv('/bin/true', ['x' * 100_000] * 1000)", "error"),
    "huge environment": ("import os, subprocess\nsubprocess.run(['true'], env={str(n): 'x' * 1000 for n in range(100_000)})", "error memory_limit"),
    "dead ends": ("import os\nfor n in range(45): os.symlink(f'/tmp/{n + 1}' + '/.' * 1000, f'/tmp/{n}')\nwhile True:\n    try: os.stat('/tmp/0')\n    except OSError: pass", "timeout"),
    "odd files": ("import os\nos.symlink('/dev/zero', 'a'); os.truncate(os.open('b', 66), 60 << 20); os.mkdir('c', 0); os.symlink('.', 'd')\nfor n in range(500): os.link('b', f'{n}' * 60)\nopen(b'\\xff\\n\\0'[:2], 'w')", "ok"),
    "streams of others": ("import os\nfor fd in range(3): os.dup2(os.open('/dev/zero', os.O_RDWR), fd)\nos.closerange(0, 256)\nraise ValueError", "error"),
    "no builtins": ("import builtins\nfor name in [*vars(builtins)]: delattr(builtins, name)", "error"),
    "no modules": ("import sys\nsys.modules.clear()\nsys.stdout = sys.stderr = None\nraise ValueError", "error"),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(_standard: Box) -> dict[str, ToolResult]:
    """All of them, four at a time."""
    found: dict[str, ToolResult] = {}
    names = list(BOMBS)
    for start in range(0, len(names), 4):
        group = names[start : start + 4]
        calls = [
            program(BOMBS[name][0], wall_s=2, cpu_s=2, processes=16, memory_bytes=128 * MIB) for name in group
        ]
        found |= zip(group, _standard.run_together(calls), strict=True)
    return found


@pytest.mark.parametrize("name", BOMBS)
def test_bomb(results: dict[str, ToolResult], box: Box, name: str) -> None:
    """It ends by itself or at a limit, with a verdict that can be sent on, and the next call is well."""
    result = results[name]
    assert result.status in {*BOMBS[name][1].split(), "timeout"}, result  # on a busy machine all may end so
    assert type(result).model_validate_json(result.model_dump_json()) == result
    assert box.out("print(1)") == "1\n"
