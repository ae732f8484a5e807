"""What people expect of "run this Python". Where it can be, the judge is the interpreter itself, on the same program."""

from __future__ import annotations

import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.calls import Base64File

from .box import Box


@dataclass(frozen=True)
class Outcome:
    """How a program ended and what it wrote."""

    stdout: str
    stderr: str
    code: int  # negative: the signal


def default_signals() -> None:
    """What a shell gives a program, whatever started us: nohup ignores SIGHUP, and its children would."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)


def plain_python(box: Box, folder: Path, code: str, stdin: str) -> Outcome:
    """The program under the runtime's interpreter, without a jail."""
    (folder / "main.py").write_text(code, encoding="utf-8", newline="")
    root = str(box.host.root)
    done = subprocess.run(
        [f"{root}/python/bin/python3", "-s", "-B", folder / "main.py"],
        input=stdin.encode(),
        capture_output=True,
        env={
            "PYTHONPATH": f"{root}/python/site",
            "PYTHONUTF8": "1",
            "LANG": "C.UTF-8",
            "LD_LIBRARY_PATH": f"{root}/python/lib",
        },
        cwd=folder,
        timeout=20,
        check=False,
        preexec_fn=default_signals,
    )
    out, err = (
        stream.decode("utf-8", "replace").replace(str(folder), "/tmp").replace(root, "")
        for stream in (done.stdout, done.stderr)
    )
    return Outcome(out, err, done.returncode)


def jailed(box: Box, code: str, stdin: str) -> Outcome:
    """The same in the jail."""
    result = box.run(code, stdin=stdin)
    assert result.status == ("signaled" if result.signal else "error" if result.exit_code else "ok")
    return Outcome(result.stdout, result.stderr, -result.signal if result.signal else result.exit_code or 0)


#: What may differ: addresses, thread numbers, and how often a repeated line was left out.
_VARIES = re.compile(r"0x[0-9a-f]+|\d+ more times|\d+\.\d{3}s|thread \d{5,}")


def same(outcome: Outcome) -> Outcome:
    """The outcome without what differs from run to run."""
    return Outcome(_VARIES.sub("~", outcome.stdout), _VARIES.sub("~", outcome.stderr), outcome.code)


PROGRAMS = {
    # output
    "nothing": "",
    "only a comment": "# nothing here",
    "a line": "print('hello')",
    "no newline at the end": "print('a', end='')",
    "both streams": "import sys\nprint('out')\nprint('err', file=sys.stderr)",
    "before an exception": "print('there', end='')\n1 / 0",
    "before a signal": "import os\nprint('there', flush=True)\nos.kill(os.getpid(), 15)",
    "before os._exit": "import os, sys\nsys.stdout.write('lost, as with any Python')\nos._exit(7)",
    "surrogates": "print('\\udcff')",
    "encodings": "import sys\nprint([(s.encoding, s.isatty(), s.fileno()) for s in (sys.stdin, sys.stdout, sys.stderr)])",
    "stdout closed": "import sys\nprint('a')\nsys.stdout.close()",
    "stdout is None": "import sys\nsys.stdout = None\nprint('nowhere')",
    "stdout replaced": "import io, sys\nprint('kept', end='')\nsys.stdout = io.StringIO()\nprint('caught')",
    "stdout without flush": "import sys\nclass Odd:\n    write = lambda self, text: len(text)\nsys.stdout = Odd()\nprint('x')",
    "stderr closed": "import sys\nsys.stderr.close()",
    "stdout redirected": "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as text:\n    print(1)\nprint(repr(text.getvalue()))",
    "own text wrapper": "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'utf-8')\nprint('é', end='')",
    "own file object on 1": "out = open(1, 'w', closefd=False)\nout.write('buffered')",
    "files of the streams": "for name in ('stdout', 'stderr'):\n    with open('/dev/' + name, 'w') as file:\n        file.write(name)",
    "bytes": "import sys\nsys.stdout.buffer.write(b'ok\\xff\\xfe\\n')\nsys.stdout.flush()",
    # input
    "input to the end": "try:\n    while True:\n        print(repr(input()))\nexcept EOFError:\n    print('end')",
    "input with prompt": "name = input('name? ')\nprint(name)",
    "input after the end": "input(); input(); input(); input()",
    "stdin.read": "import sys\nprint(repr(sys.stdin.read()))",
    "stdin lines": "import sys\nprint([line for line in sys.stdin])",
    "open(0)": "print(repr(open(0).read()))",
    "open /dev/stdin": "print(repr(open('/dev/stdin').read()))",
    "os.read": "import os\nprint(os.read(0, 5))",
    "stdin given to a child": "import subprocess\nprint(subprocess.run(['cat'], capture_output=True).stdout)",
    # the end
    "exit": "exit(4)",
    "quit": "quit()",
    "sys.exit in try": "import sys\ntry:\n    sys.exit(3)\nfinally:\n    print('finally')",
    "sys.exit with more than a status": "import sys\nsys.exit(3 << 8 | 5)",
    "sys.exit subclass": "class Stop(SystemExit):\n    pass\nraise Stop(9)",
    "sys.exit in a thread": "import sys, threading\nthreading.Thread(target=lambda: sys.exit(5)).start()",
    "keyboard interrupt": "print('a', end='')\nraise KeyboardInterrupt",
    "SIGINT to itself": "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('never')",
    "SIGKILL": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "abort": "import os\nos.abort()",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "alarm": "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\nsignal.pause()",
    "signal handler": "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *_: print('handled'))\nos.kill(os.getpid(), signal.SIGUSR1)",
    "broken pipe is an error": "import os\nr, w = os.pipe()\nos.close(r)\nos.write(w, b'x')",
    # hooks
    "excepthook": "import sys\nsys.excepthook = lambda kind, value, tb: print('hook', kind.__name__, value, tb.tb_lineno)\n\n1 / 0",
    "excepthook that fails": "import sys\ndef hook(*_):\n    raise ValueError('in the hook')\nsys.excepthook = hook\nprint('kept', end='')\n1 / 0",
    "excepthook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(5)\n1 / 0",
    "excepthook deleted": "import sys\ndel sys.excepthook\nprint('kept', end='')\n1 / 0",
    "atexit in order": "import atexit\natexit.register(print, 'first registered')\natexit.register(print, 'second')\nprint('main')",
    "atexit after an exception": "import atexit\natexit.register(print, 'still', end='')\n1 / 0",
    "atexit that fails": "import atexit\ndef fail():\n    raise ValueError('late')\natexit.register(print, 'the other')\natexit.register(fail)",
    "atexit that exits": "import atexit, sys\natexit.register(lambda: sys.exit(3))",
    "atexit with a partial line": "import atexit\natexit.register(print, 'end', end='')",
    "__del__ of a global": "class Noisy:\n    def __del__(self):\n        print('deleted')\nnoisy = Noisy()\nprint('main')",
    "__del__ in a circle": "class Noisy:\n    def __del__(self):\n        print('deleted')\nnoisy = Noisy()\nnoisy.itself = noisy\ndel noisy\nprint('main')",
    "__del__ that fails": "class Noisy:\n    def __del__(self):\n        raise ValueError('in del')\nnoisy = Noisy()\ndel noisy",
    "__del__ after an exception": "class Noisy:\n    def __del__(self):\n        print('deleted')\ndef work():\n    noisy = Noisy()\n    1 / 0\nwork()",
    "thread outlives main": "import threading, time\ndef late():\n    time.sleep(0.05)\n    print('late')\nthreading.Thread(target=late).start()\nprint('main')",
    "daemon thread does not": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\nprint('main')",
    # tracebacks
    "nested functions": "def outer():\n    def inner():\n        return {}['missing']\n    return inner()\n\nprint('x')\nouter()",
    "raise from": "def work():\n    try:\n        int('a')\n    except ValueError as exc:\n        raise KeyError('b') from exc\nwork()",
    "raise in except": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    undefined",
    "raise from None": "try:\n    1 / 0\nexcept ZeroDivisionError:\n    raise ValueError('clean') from None",
    "exception group": "raise ExceptionGroup('two', [ValueError(1), TypeError('x')])",
    "note": "exc = ValueError(1)\nexc.add_note('a note')\nraise exc",
    "exception in a thread": "import threading\ndef work():\n    1 / 0\nthread = threading.Thread(target=work, name='mine')\nthread.start()\nthread.join()",
    "recursion": "def down():\n    down()\n\ndown()",
    "in a library": "import json\njson.loads('{')",
    "in exec": "exec('a = 1\\nb = 1 / 0')",
    "in a comprehension": "print([1 / n for n in (1, 0)])",
    "in a decorator": "def twice(function):\n    return lambda: (function(), function())\n\n@twice\ndef work():\n    raise OSError(5, 'odd')\n\nwork()",
    "in a lambda": "f = lambda x: x.attribute\nf(3)",
    "multi-line expression": "a = 1\nvalue = (\n    a +\n    a /\n    0\n)",
    "assert": "x = 3\nassert x == 4, f'{x} is not 4'",
    "exception without str": "class Odd(Exception):\n    def __str__(self):\n        raise ValueError\nraise Odd",
    "name suggestion": "number = 1\nprint(nubmer)",
    "printed traceback": "import traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()",
    "logged traceback": "import logging\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    logging.exception('it failed')",
    "not an exception": "raise 42",
    "a class": "raise ValueError",
    "warning": "import warnings\n\nwarnings.warn('careful')",
    "deprecated escape": "print('\\d')",
    "unawaited": "async def work():\n    pass\nwork()",
    # syntax
    "syntax error": "x = 1\ny = = 2",
    "indentation error": "if True:\nprint(1)",
    "tabs and spaces": "if True:\n\tprint(1)\n        print(2)",
    "unclosed": "print((1, 2)\n\nx = 1",
    "unclosed text": "x = '''abc",
    "python 2": "print 'hello'",
    "return outside": "return 1",
    "await outside": "import asyncio\nawait asyncio.sleep(0)",
    "late future": "x = 1\nfrom __future__ import annotations",
    "future": "'''doc'''\nfrom __future__ import annotations\ndef f(x: undefined) -> undefined: ...\nprint(f.__annotations__, __doc__)",
    "our own futures stay ours": "def f(x: int) -> 1 + 1: ...\nprint(f.__annotations__)",
    "unicode names": "größe = 3\nπ = 3.14\nprint(größe * π, '日本語', '🎉')",
    "byte order mark": "\ufeffprint('with a mark')",
    "coding cookie": "# -*- coding: utf-8 -*-\nprint('é')\n1 / 0  # é",
    "crlf": "x = 1\r\nif x:\r\n    print('yes')\r\n1 / 0\r\n",
    "form feed": "x = 1\n\f\nprint(x)",
    "no newline": "if True: print(1)",
    "long line": "x = [" + "1, " * 50_000 + "]\nprint(len(x))",
    "deep brackets": "x = " + "(" * 300 + "1" + ")" * 300,
    "many digits": "print(int('9' * 5000))",
    "line continuation": "x = 1 + \\\n    2\nprint(x)",
    # names and introspection
    "guard": "if __name__ == '__main__':\n    print('main')",
    "module names": "print(__name__, __file__, __doc__, __package__, __spec__, type(__builtins__), sorted(globals()))",
    "argv": "import sys\nprint(sys.argv)",
    "main module": "import __main__, sys\nx = 5\nprint(__main__.x, sys.modules['__main__'] is __main__)",
    "getsource": "import inspect\ndef f(a):\n    # a comment\n    return a\nprint(inspect.getsource(f), inspect.getsourcefile(f))",
    "getsource of the module": "import inspect, sys\nprint(inspect.getsource(sys.modules[__name__]))",
    "pickle": "import pickle\nclass Thing:\n    pass\nprint(type(pickle.loads(pickle.dumps(Thing()))) is Thing, Thing.__module__)",
    "dataclass hints": "import dataclasses, typing\n@dataclasses.dataclass\nclass Point:\n    x: int\nprint(typing.get_type_hints(Point), Point(1))",
    "file name of the code": "import sys\nprint(sys._getframe().f_code.co_filename)",
    "reload of main": "import importlib\nprint(importlib.import_module('__main__').__name__)",
    "import of itself": "import main\nprint(main.__name__)",
    "argparse": "import argparse\nargparse.ArgumentParser().add_argument('--n', type=int)\nargparse.ArgumentParser().parse_args(['--bad'])",
    "unittest": "import unittest\nclass T(unittest.TestCase):\n    def test_it(self):\n        self.assertEqual(1, 2)\nif __name__ == '__main__':\n    unittest.main()",
    "doctest": "def f():\n    '''\n    >>> f()\n    2\n    '''\n    return 1\nimport doctest\ndoctest.testmod()",
    # what the jail gives
    "fork": "import os\npid = os.fork()\nif pid == 0:\n    print('child', flush=True)\n    os._exit(3)\nprint(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
    "forked child that returns": "import os\nif os.fork() == 0:\n    raise SystemExit(0)\nos.wait()\nprint('parent')",
    "pool": "import multiprocessing as mp\ndef square(n):\n    return n * n\nif __name__ == '__main__':\n    with mp.get_context('fork').Pool(2) as pool:\n        print(pool.map(square, range(5)))",
    "spawned pool": "import multiprocessing as mp\ndef square(n):\n    return n * n\nif __name__ == '__main__':\n    with mp.get_context('spawn').Pool(2) as pool:\n        print(pool.map(square, range(5)))",
    "process with queue": "import multiprocessing as mp\ndef work(queue):\n    queue.put(6 * 7)\nif __name__ == '__main__':\n    queue = mp.Queue()\n    process = mp.Process(target=work, args=(queue,))\n    process.start()\n    print(queue.get())\n    process.join()\n    print(process.exitcode)",
    "process that fails": "import multiprocessing as mp\ndef work():\n    raise ValueError('in the child')\nif __name__ == '__main__':\n    process = mp.Process(target=work, name='mine')\n    process.start()\n    process.join()\n    print(process.exitcode)",
    "shared memory": "from multiprocessing import Value, Process, Lock\ndef add(value):\n    for _ in range(50):\n        with value.get_lock():\n            value.value += 1\nif __name__ == '__main__':\n    value = Value('i', 0)\n    many = [Process(target=add, args=(value,)) for _ in range(3)]\n    [p.start() for p in many]; [p.join() for p in many]\n    print(value.value)",
    "process pool executor": "from concurrent.futures import ProcessPoolExecutor\nif __name__ == '__main__':\n    with ProcessPoolExecutor(2) as pool:\n        print(list(pool.map(abs, [-1, 2])))",
    "threads": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n    print(sum(pool.map(lambda n: n * n, range(100))))",
    "asyncio": "import asyncio\nasync def work(n):\n    await asyncio.sleep(0.01)\n    return n\nasync def main():\n    print(await asyncio.gather(*map(work, range(5))))\nasyncio.run(main())",
    "asyncio subprocess": "import asyncio\nasync def main():\n    process = await asyncio.create_subprocess_exec('echo', 'hi', stdout=asyncio.subprocess.PIPE)\n    print(await process.communicate(), process.returncode)\nasyncio.run(main())",
    "asyncio in a thread": "import asyncio\nprint(asyncio.run(asyncio.to_thread(sum, [1, 2])))",
    "asyncio exception": "import asyncio\nasync def main():\n    raise ValueError('inside')\nasyncio.run(main())",
    "subprocess": "import subprocess\nprint(subprocess.run('echo out; echo err >&2; exit 3', shell=True, capture_output=True, text=True))",
    "subprocess of python": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True, check=True).stdout)",
    "subprocess to devnull": "import subprocess\nprint(subprocess.run(['ls', '/missing'], stderr=subprocess.DEVNULL).returncode > 0)",
    "subprocess timeout": "import subprocess\ntry:\n    subprocess.run(['sleep', '5'], timeout=0.1)\nexcept subprocess.TimeoutExpired as exc:\n    print(exc.cmd)",
    "os.system": "import os\nprint(os.system('exit 2'), os.popen('echo popen').read())",
    "output of a child in order": "import subprocess, sys\nprint('before', flush=True)\nsubprocess.run(['echo', 'child'])\nprint('after')",
    "exec": "import os\nos.execvp('echo', ['echo', 'replaced'])",
    "sqlite": "import sqlite3\ndb = sqlite3.connect('my.db')\ndb.execute('create table t (x)')\nwith db:\n    db.executemany('insert into t values (?)', [(1,), (2,)])\nprint(db.execute('select sum(x) from t').fetchone(), sqlite3.connect('my.db').execute('select count(*) from t').fetchone())",
    "tempfile": "import tempfile\nwith tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile('w+', dir=folder) as file:\n    file.write('x')\n    file.seek(0)\n    print(file.read(), tempfile.gettempdir())",
    "zoneinfo": "import datetime, zoneinfo\nprint(datetime.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo('Europe/Paris')).astimezone(zoneinfo.ZoneInfo('Asia/Tokyo')))",
    "decimal": "from decimal import Decimal, getcontext\ngetcontext().prec = 50\nprint(Decimal(2).sqrt())",
    "locale": "import locale\nprint(locale.getlocale(), f'{1234567:n}', locale.getpreferredencoding())",
    "context is fresh": "import decimal\nprint(decimal.getcontext())",
    "recursion limit": "import sys\nprint(sys.getrecursionlimit())\nsys.setrecursionlimit(20000)\ndef depth(n):\n    return n and depth(n - 1)\nprint(depth(15000))",
    "garbage collector": "import gc\nprint(gc.isenabled(), gc.get_threshold())",
    "flags": "import sys, warnings\nprint(sys.flags, len(warnings.filters), sys.gettrace(), sys.getswitchinterval(), sys.version_info, sys.platform)",
    "signals are at their defaults": "import signal\nprint([(n.name, signal.getsignal(n)) for n in sorted(signal.valid_signals()) if isinstance(n, signal.Signals)], signal.pthread_sigmask(signal.SIG_BLOCK, []))",
    "no such package": "import matplotlib.pyplot as plt",
    "no such module": "from os import nothing",
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_the_interpreter_does(box: Box, tmp_path: Path, name: str) -> None:
    """Output, errors and exit status of a program are those that the interpreter itself gives."""
    stdin = "first\nsecond é\n3"
    assert same(jailed(box, PROGRAMS[name], stdin)) == same(
        plain_python(box, tmp_path, PROGRAMS[name], stdin)
    )


def test_an_exit_status_that_c_cannot_hold(box: Box) -> None:
    """It is 255, as it is for the interpreter, which complains of itself in passing."""
    assert box.run("import sys\nsys.exit(1 << 64)").exit_code == 255


class TestOutput:
    """What a program printed is there, however it ended."""

    def test_lines_before_a_time_limit(self, box: Box) -> None:
        """At the time limit every finished line is there, of both streams, as on a terminal."""
        result = box.run(
            "import sys, time\nprint('a line')\nprint('half', end='')\nprint('err', file=sys.stderr)\n"
            "time.sleep(60)",
            wall_s=0.3,
        )
        assert (result.status, result.stdout, result.stderr) == ("timeout", "a line\n", "err\n")

    def test_lines_before_a_signal(self, box: Box) -> None:
        """What was printed line by line is there when the program is killed at once."""
        result = box.run(
            "import os, signal\nfor n in range(3): print(n)\nos.kill(os.getpid(), signal.SIGKILL)"
        )
        assert (result.status, result.stdout) == ("signaled", "0\n1\n2\n")

    def test_much_output_and_a_crash(self, box: Box) -> None:
        """Output that fills the pipes many times over is complete when the program then dies."""
        code = "import sys\nfor n in range(20_000):\n    print(n)\n    print(n, file=sys.stderr)\nraise SystemExit('end')"
        result = box.run(code, output_bytes=1 << 20)
        numbers = "".join(f"{n}\n" for n in range(20_000))
        assert (result.stdout, result.stderr, result.exit_code) == (numbers, numbers + "end\n", 1)

    def test_output_of_a_background_child_that_outlives_the_program(self, box: Box) -> None:
        """The program's end is the end: a child that holds stdout open delays nothing."""
        result = box.run("import subprocess\nsubprocess.Popen(['sleep', '60'])\nprint('done')")
        assert (result.status, result.stdout) == ("ok", "done\n")
        assert result.usage.wall_s < 2

    def test_bytes_that_are_no_text(self, box: Box) -> None:
        """What is not UTF-8 is replaced, and is no error."""
        result = box.run("import os\nos.write(1, b'a\\xff\\xc3\\n')\nos.write(2, b'\\x00\\xed\\xa0\\x80')")
        assert (result.status, result.stdout, result.stderr) == ("ok", "a\ufffd\ufffd\n", "\0" + "\ufffd" * 3)


ECHOES = {
    "1 + 1": "2\n",
    "x = 5\nx": "5\n",
    "'text'": "'text'\n",
    "'é'": "'é'\n",
    "None": "",
    "x = 5": "",
    "1;": "",
    "(1) ;": "",
    "1; 2": "2\n",
    "1 # why; not": "1\n",
    "1; # silent": "",
    "';'": "';'\n",
    "print(1)": "1\n",
    "print(1)\n2": "1\n2\n",
    "[n for n in (\n    1, 2)\n]\n\n# the end\n": "[1, 2]\n",
    "'''a\n;'''": "'a\\n;'\n",
    "if True:\n    7": "",
    "def f():\n    return 1\nf()": "1\n",
    "'''only a docstring'''": "'only a docstring'\n",
    "from __future__ import annotations\ndef f(x: y): ...\nf.__annotations__": "{'x': 'y'}\n",
    "1\r\n2 ;\r\n": "",
    "'é' ;": "",
    "": "",
    "# nothing": "",
    "import sys\nsys.displayhook = lambda value: print('hook', value)\n3": "hook 3\n",
    "_ = 4\n1\n": "1\n",
    "(walrus := 3)": "3\n",
    "__name__, __file__": "('__main__', '/tmp/main.py')\n",
}


class TestEcho:
    """`echo_last_value`: what a notebook shows."""

    @pytest.mark.parametrize(("code", "shown"), ECHOES.items())
    def test_shows(self, box: Box, code: str, shown: str) -> None:
        """The value of an expression on the last line, unless it is None or a semicolon follows."""
        assert box.out(code, echo=True) == shown

    @pytest.mark.parametrize("code", [code for code in ECHOES if "print" not in code])
    def test_shows_nothing_unasked(self, box: Box, code: str) -> None:
        """Without the flag a value is not shown."""
        assert box.out(code) == ""

    @pytest.mark.parametrize(
        "code", ["x = 1\nx / 0", "def f():\n    raise KeyError(1)\n\nf()", "x = = 2", "a\nb c"]
    )
    def test_errors_are_the_same(self, box: Box, code: str) -> None:
        """A traceback does not tell whether the flag was set."""
        assert box.run(code, echo=True).stderr == box.run(code).stderr != ""

    def test_a_value_that_cannot_be_shown(self, box: Box) -> None:
        """An error in `__repr__` is the program's error."""
        code = "class Odd:\n    def __repr__(self):\n        raise ValueError('no')\nOdd()"
        result = box.run(code, echo=True)
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "ValueError: no")
        assert "forkserver" not in result.stderr


class TestFiles:
    """What lies in the working directory."""

    def test_files_and_folders(self, box: Box) -> None:
        """Files are where their names say, with their bytes, and helper modules can be imported."""
        files = {
            "data.txt": "über\n",
            "deep/er/numbers.bin": Base64File(base64=b"/wD+"),  # FF 00 FE
            "helper.py": "def twice(x):\n    return 2 * x\n",
            "package/__init__.py": "",
            "package/part.py": "from helper import twice\nvalue = twice(21)\n",
        }
        code = (
            "import os\nfrom package.part import value\nprint(value, os.getcwd(), sorted(os.listdir()))\n"
            "print(open('data.txt').read(), open('deep/er/numbers.bin', 'rb').read())\n"
            "open('data.txt', 'a').write('mine too')"
        )
        listed = ["data.txt", "deep", "helper.py", "main.py", "package"]
        assert box.out(code, files=files) == f"42 /tmp {listed}\nüber\n b'\\xff\\x00\\xfe'\n"

    def test_an_error_in_a_helper(self, box: Box) -> None:
        """A traceback through a given file shows its lines."""
        result = box.run("import helper", files={"helper.py": "x = 1\nx / 0  # here\n"})
        assert 'File "/tmp/helper.py", line 2, in <module>\n    x / 0  # here' in result.stderr

    def test_nothing_of_an_earlier_call(self, box: Box) -> None:
        """What a call left in every place that it can write is gone for the next one in its slot."""
        box.out("import os\nfor folder in ('/tmp', '/dev/shm'):\n    open(f'{folder}/left', 'w').write('x')")
        assert box.out("import os\nprint(os.listdir('/tmp'), os.listdir('/dev/shm'))") == "['main.py'] []\n"

    def test_more_than_the_scratch_folder_holds(self, box: Box) -> None:
        """Files that do not fit are the call's own error, and the next call is well."""
        result = box.run("print(1)", files={f"{n}/{'x/' * 200}f": "" for n in range(12)})
        assert (result.status, result.stderr.splitlines()[-1][:31]) == (
            "error",
            "OSError: [Errno 28] No space le",
        )
        assert "forkserver" not in result.stderr
        assert box.out("print(1)") == "1\n"


class TestLibraries:
    """What models import."""

    def test_a_started_interpreter_has_the_packages(self, box: Box) -> None:
        """A Python started by the program finds the same libraries."""
        code = (
            "import subprocess, sys\n"
            "command = [sys.executable, '-c', 'import numpy; print(numpy.arange(3))']\n"
            "print(subprocess.run(command, capture_output=True, text=True, check=True).stdout)"
        )
        assert box.out(code) == "[0 1 2]\n\n"

    def test_packages_that_are_not_warm(self, box: Box) -> None:
        """The lightest jail runs everything; what is not warm is imported."""
        assert box.out("import sympy\nprint(sympy.factorint(84))", wall_s=20) == "{2: 2, 3: 1, 7: 1}\n"

    def test_numpy_in_a_pool(self, numpy_box: Box) -> None:
        """Processes that a program forks can use what is warm."""
        code = (
            "import multiprocessing as mp, numpy as np\nif __name__ == '__main__':\n"
            "    with mp.Pool(2) as pool:\n        print([int(n) for n in pool.map(np.sum, [[1, 2], [3]])])"
        )
        assert numpy_box.out(code) == "[3, 3]\n"

    def test_a_large_product(self, numpy_box: Box) -> None:
        """A product that a linear algebra library would spread over threads comes out right."""
        assert (
            numpy_box.out("import numpy as np\na = np.ones((300, 300))\nprint((a @ a).sum())")
            == "27000000.0\n"
        )


@pytest.mark.xfail(
    strict=True, reason="the forkserver's frames lie below the program's, and Python can walk them"
)
def test_stack_walkers_see_only_the_program(box: Box) -> None:
    """`inspect.stack()` ends at the program's first frame."""
    assert box.out("import inspect\nprint(len(inspect.stack()))") == "1\n"
