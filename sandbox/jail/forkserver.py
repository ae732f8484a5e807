"""The forkserver: a warm interpreter inside the jail that forks one child per call.

Theory of operation. nsjail starts this file as PID 1 of the jail with the control socket as descriptor 3; at level
`process` the worker does, and `confine` puts this process behind walls before it imports anything. One JSON message
from the worker says what to load; everything else is loaded, used once and frozen here, before the first fork, so that
a program finds it warm. Then `fork_serve` (fork.c, where the protocol is written down) takes over and no Python runs
here any more, until the worker has gone. In each child `fork_serve` returns, behind all walls, and `run_program` goes
on with what descriptor 3 holds now: the call's code and files.

Rules for this file:
1. Standard library only: it runs under the runtime's interpreter, which has none of our packages.
2. The forkserver itself never holds code, input or output of a call.
3. Nothing here is a wall. A program that takes over everything in this process has gained nothing.
"""

from __future__ import annotations
import __future__

import ast
import atexit
import builtins
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import io
import json
import operator
import os
import random
import resource
import signal
import socket
import stat
import struct
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import Any, ClassVar

CONTROL = 3  # in the forkserver
PAYLOAD = 3  # in the child
#: The runtime's folder; empty where it is our root as well.
ROOT = os.path.dirname(os.path.dirname(__file__)).rstrip("/")
MAIN = "/tmp/main.py"  # at level `process`, in the folder that the call was given
STREAMS = (sys.stdout, sys.stderr)  # whatever a program puts in their place
IN_CHILD = 1
#: Characters kept of an exception's type, of its message, and of the line that it came by.
NOTED = (200, 1000, 500)
#: What is kept for that, and behind it for the files that are wanted of a program, beside a mark for each.
NOTE_BYTES = 8192
FETCHED_BYTES = 1 << 20
NOT_THERE, TOO_LARGE = 0, -1
FUTURE_FLAGS = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": f"{ROOT}/python/bin:/usr/bin:/bin",
    "PYTHONPATH": f"{ROOT}/python/site",
    "PYTHONUTF8": "1",
    # One BLAS thread: a thread pool in the forkserver would make fork unsafe, and calls share the cores anyway.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

#: Versions of Python in which an immortal object is what heap.c makes it, where they have the global lock.
HAS_IMMORTALS = ((3, 12), (3, 13))

#: Limits that are the same for every call, so that children inherit them for nothing. fork.c sets the others.
LIMITS = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_MEMLOCK: 64 * 1024,
    resource.RLIMIT_MSGQUEUE: 0,
    resource.RLIMIT_STACK: 64 * 1024 * 1024,  # deep recursion of C code ends as RecursionError more often
}


class _Filter(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    @classmethod
    def of(cls, program: bytes) -> _Filter:
        return cls(len(program) // 8, program)


class _Files(ctypes.Structure):
    """struct files of landlock.h."""

    _fields_ = [
        ("abi", ctypes.c_int),
        ("scratch", ctypes.c_int),
        ("proc", ctypes.c_int),
        ("readable", ctypes.c_int * 16),
        ("devices", ctypes.c_int * 8),
    ]


class _Setup(ctypes.Structure):
    """struct setup of fork.c."""

    _fields_ = [
        ("control", ctypes.c_int),
        ("init_exe", ctypes.c_int),
        ("user_namespaces", ctypes.c_int),
        ("loopback", ctypes.c_int),
        ("guardian_exe", ctypes.c_int),
        ("files", _Files),
        ("program_filter", _Filter),
    ]


def main() -> None:
    """Load, freeze, serve; come back once in every child."""
    control = socket.socket(fileno=CONTROL)
    config = json.loads(control.recv(1 << 20))
    control.detach()

    heap = ctypes.PyDLL(f"{ROOT}/jail/libheap.so")
    if heap.keep_together():
        raise MemoryError
    # A PyDLL keeps the interpreter lock, which the fork protocol of CPython wants.
    fork = ctypes.PyDLL(f"{ROOT}/jail/libfork.so")
    setup = _Setup(
        control=CONTROL,
        init_exe=os.open(f"{ROOT}/jail/init", os.O_PATH | os.O_CLOEXEC),
        user_namespaces=config["user_namespaces"],
        loopback=config["loopback"],
        program_filter=_Filter.of(bytes.fromhex(config["program_filter"])),
    )
    os.environ.clear()
    os.environ.update(ENVIRONMENT | config["environment"])
    if config["files"]:
        confine(fork, setup, config["files"])
    importlib.import_module("roc_harness")  # beside this file: a program that judges begins there
    settle(config["files"]["scratch"] if config["files"] else "/tmp")
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # what was printed before a kill is there
    warm_up(config["modules"], config["warm_up"])
    lock_devices()

    for limit, value in LIMITS.items():
        resource.setrlimit(limit, (value, value))
    failed = fork.fork_filter(ctypes.byref(_Filter.of(bytes.fromhex(config["forkserver_filter"]))))
    if failed:
        raise OSError(-failed, os.strerror(-failed))
    del config, control
    if threading.active_count() != 1:
        raise RuntimeError("a preloaded module started a thread; forking would be unsafe")
    leave_note = fork.fork_note
    leave_note.argtypes = (ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t)
    freeze(heap)
    outcome = fork.fork_serve(ctypes.byref(setup))
    if outcome == IN_CHILD:
        run_program(leave_note)
    if outcome < 0:
        raise OSError(-outcome, os.strerror(-outcome))
    os._exit(0)  # the worker has gone, and nobody needs what a tidy end would tidy


def confine(fork: ctypes.PyDLL, setup: _Setup, files: dict[str, Any]) -> None:
    """Level `process`: open nothing but these files from here on, and keep no privilege but those a call takes."""

    def handles(names: list[str]) -> Iterator[int]:
        for name in names:
            yield os.open(name, os.O_PATH | os.O_CLOEXEC)
        yield -1

    os.chdir(files["scratch"])
    os.environ["TMPDIR"] = files["scratch"]
    os.environ["LD_LIBRARY_PATH"] = f"{ROOT}/python/lib"  # for a program's own interpreters
    setup.guardian_exe = os.open(f"{ROOT}/jail/guardian", os.O_PATH | os.O_CLOEXEC)
    setup.files.abi = files["abi"]
    setup.files.scratch, setup.files.proc, _ = handles([files["scratch"], "/proc"])
    for places, names in ((setup.files.readable, files["readable"]), (setup.files.devices, files["devices"])):
        for place, handle in enumerate(handles(names)):
            places[place] = handle
    failed = fork.fork_confine(ctypes.byref(setup))
    if failed:
        raise OSError(-failed, os.strerror(-failed))


def settle(folder: str) -> None:
    """Have a folder for a script's own: at the head of the path, and where its files go."""
    global MAIN  # noqa: PLW0603 - a process has one
    MAIN = f"{folder}/main.py"
    sys.path[0] = folder
    sys.argv = [MAIN]
    os.environ["HOME"] = folder


def warm_up(modules: list[str], source: str) -> None:
    """Import, then use each library once: what a library builds on first use is then built for every child."""
    for name in modules:
        importlib.import_module(name)
    exec(compile(source, "<warm-up>", "exec"), {"__name__": "warm_up"})  # preload.py's text


def freeze(heap: ctypes.PyDLL) -> None:
    """Let children look at what is warm without a write, which would copy its page; heap.c says how."""
    gc.collect()
    can_be_immortal = sys.version_info[:2] in HAS_IMMORTALS and "t" not in sys.abiflags
    if can_be_immortal and heap.make_immortal(ctypes.py_object(gc.get_objects())):
        raise MemoryError
    gc.freeze()  # else the first collection in a child touches every page of the heap
    gc.disable()


def lock_devices() -> None:
    """Take the meaning from locks on the files that two calls can open for writing.

    With a reader's lock of ours on each, a writer's is always refused and a reader's never, whatever others hold.
    """
    for name in ("null", "zero", "full", "random", "urandom"):
        device = os.open(f"/dev/{name}", os.O_RDONLY | os.O_CLOEXEC)
        fcntl.fcntl(device, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))


# ---- the child ----


def run_program(leave_note: Callable[[int, bytes, int], object]) -> None:
    """Run the call in this process as `python main.py` would, and exit as it would. Never returns."""
    status, program = 1, os.getpid()
    try:
        gc.enable()
        if (folder := os.getcwd()) != sys.path[0]:
            settle(folder)
            os.environ["TMPDIR"] = tempfile.tempdir = folder
        main_module = sys.modules["__main__"] = fresh_main()
        wanted: list[str] = []
        failure, code = attempt(main_module.__dict__, wanted)
        if failure is not None and os.getpid() == program:  # and no fork of it
            with contextlib.suppress(BaseException):  # parts of it are the program's own, and do anything
                record = noted(failure, code)
                leave_note(0, record, len(record))
        status, was_interrupted = conclude(failure)
        del failure  # whose traceback holds what `finish` is to let go
        status = finish(status, main_module.__dict__)
        if wanted and os.getpid() == program:
            with contextlib.suppress(BaseException):  # the same
                leave_files(wanted, leave_note)
        if was_interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(status)


def fresh_main() -> types.ModuleType:
    """A module with the names that a script finds at its start."""
    module = types.ModuleType("__main__")
    if sys.version_info < (3, 14):
        module.__annotations__ = {}
    module.__dict__["__builtins__"] = builtins
    module.__file__ = MAIN
    module.__loader__ = SourceFileLoader("__main__", MAIN)
    module.__dict__["__cached__"] = None
    return module


def attempt(namespace: dict[str, object], wanted: list[str]) -> tuple[BaseException | None, str]:
    """Read the payload and run it; what it raised is its outcome, and comes with its code.

    The names of the files that are wanted of it are added to `wanted`.
    """
    code = ""
    try:
        code, files, echo, seed = read_payload(wanted)
        fresh_randomness(seed)
        write_files(code, files)
        del files
        execute(code, namespace, echo=echo)
    except BaseException as exc:  # noqa: BLE001 - whatever the program raised is its outcome
        return exc, code
    return None, code


def read_payload(wanted: list[str]) -> tuple[str, list[tuple[str, bytes]], bool, int | None]:
    """Code, files, the echo flag and the seed, in the form that `streams.py` packs. Adds to the files wanted."""
    size = os.fstat(PAYLOAD).st_size
    data = memoryview(os.pread(PAYLOAD, size, 0))
    os.close(PAYLOAD)
    echo, seed, code_length, count, wanted_length = struct.unpack_from("=IqIII", data)
    offset = struct.calcsize("=IqIII")
    code = str(data[offset : offset + code_length], "utf-8")
    offset += code_length
    files = []
    for _ in range(count):
        name_length, length = struct.unpack_from("=II", data, offset)
        offset += 8
        name = str(data[offset : offset + name_length], "utf-8")
        offset += name_length
        files.append((name, bytes(data[offset : offset + length])))
        offset += length
    if wanted_length:
        wanted += str(data[offset : offset + wanted_length], "utf-8").split("\0")
    return code.removeprefix("\ufeff"), files, bool(echo), None if seed < 0 else seed


def fresh_randomness(seed: int | None) -> None:
    """What fork copied and no hook renews; with a seed, what starts from that.

    `random` has a hook, and `ssl` sees that the pid is another.
    """
    if seed is not None:
        sys.meta_path.insert(0, SeededAtImport(seed))
        random.seed(seed)
    seed_numpy(seed)
    seed_sympy(seed)
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


def seed_numpy(seed: int | None) -> None:
    """Its global generator, where it is imported."""
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(int.from_bytes(os.urandom(4), "little") if seed is None else seed)


def seed_sympy(seed: int | None) -> None:
    """Its generators, where it is imported."""
    if sympy_random := sys.modules.get("sympy.core.random"):
        sympy_random.rng.seed(seed)
        sympy_random._assumptions_rng.seed(seed)
    if sympy_symbol := sys.modules.get("sympy.core.symbol"):
        # Two dummies of two programs that meet, by a pickle, are not to be the same symbol.
        sympy_symbol.Dummy._prng.seed(seed)
        sympy_symbol.Dummy._base_dummy_index = sympy_symbol.Dummy._prng.randint(10**6, 9 * 10**6)


class SeededAtImport:
    """Seeds a library of the runtime when a program imports it that found it not warm; part of the path of imports."""

    LIBRARIES: ClassVar = {"numpy.random": seed_numpy, "sympy": seed_sympy}

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """As `importlib` asks; None lets it look further."""
        if name not in self.LIBRARIES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None or not (spec.origin or "").startswith(f"{ROOT}/python/site/"):
            return None
        load = spec.loader.exec_module

        def load_and_seed(module: types.ModuleType) -> None:
            load(module)
            self.LIBRARIES[name](self.seed)

        spec.loader.exec_module = load_and_seed  # type: ignore[method-assign]
        return spec


def write_files(code: str, files: list[tuple[str, bytes]]) -> None:
    """The program as a file, for tracebacks, `inspect` and spawned processes; then the caller's files."""
    for name, content in [("main.py", code.encode()), *files]:
        if folder := os.path.dirname(name):
            os.makedirs(folder, exist_ok=True)
        with open(name, "wb") as file:
            file.write(content)


def execute(code: str, namespace: dict[str, object], *, echo: bool) -> None:
    """Run the code; with `echo`, show the value of an expression on its last line."""
    if not echo:
        exec(compile(code, MAIN, "exec", dont_inherit=True), namespace)
        return
    tree: ast.Module = compile(code, MAIN, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)  # type: ignore[assignment]
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or is_silenced(code, last):
        exec(compile(tree, MAIN, "exec", dont_inherit=True), namespace)
        return
    tree.body.pop()
    body = compile(tree, MAIN, "exec", dont_inherit=True)
    # "single" shows the value through sys.displayhook.
    tail = compile(ast.Interactive([last]), MAIN, "single", body.co_flags & FUTURE_FLAGS, dont_inherit=True)
    exec(body, namespace)
    exec(tail, namespace)


def is_silenced(code: str, last: ast.Expr) -> bool:
    """True when a semicolon follows the last expression: as in a notebook, its value is then not wanted."""
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    # The parser counts bytes, and lines as these two characters end them. No text can follow, only ) ; and comments.
    line, *rest = (
        code.encode().replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[last.end_lineno - 1 :]
    )
    return any(b";" in each.partition(b"#")[0] for each in (line[last.end_col_offset :], *rest))


def exit_status(code: object) -> int:
    """The status of `sys.exit(code)`, as the interpreter gives it."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF  # a C long, or -1
    print(code, file=sys.stderr)
    return 1


def conclude(failure: BaseException | None) -> tuple[int, bool]:
    """The exit status, and whether Ctrl-C is what ended the program: an interpreter then dies of that signal."""
    if failure is None:
        return 0, False
    # Kept until `finish`, as the interpreter keeps it: its traceback holds the program's frames.
    sys.last_value = failure
    return report(failure), type(failure) is KeyboardInterrupt


def report(failure: BaseException) -> int:
    """Show an exception as the interpreter does, through the program's hook if it set one; the exit status."""
    if isinstance(failure, SystemExit):
        return exit_status(failure.code)
    hook = getattr(sys, "excepthook", None)
    if hook is None:
        print("sys.excepthook is missing", file=sys.stderr)
        show(failure)
        return 1
    try:
        hook(type(failure), failure, without_our_frames(failure))
    except SystemExit as exc:
        return exit_status(exc.code)
    except BaseException as exc:  # noqa: BLE001 - the program's own hook may raise anything
        failed_hook = exc
    else:
        return 1
    print("Error in sys.excepthook:", file=sys.stderr)
    show(failed_hook)
    print("\nOriginal exception was:", file=sys.stderr)
    show(failure)
    return 1


def noted(failure: BaseException, code: str) -> bytes:
    """What the worker is told of an exception, in the form that `note.py` reads. Empty for an exit."""
    if isinstance(failure, SystemExit):
        return b""
    kind = type(failure)
    is_known = kind.__module__ in {"__main__", "builtins"}
    name = kind.__qualname__ if is_known else f"{kind.__module__}.{kind.__qualname__}"
    try:
        message = str(failure)
    except BaseException:  # noqa: BLE001 - the program's own, and what a traceback says then
        message = "<exception str() failed>"
    lines = code.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    if not 0 < (line := line_of(failure)) <= len(lines):
        line = 0
    told = zip((name, message, lines[line - 1].rstrip()), NOTED, strict=True)
    texts = [text[:most].encode("utf-8", "replace") for text, most in told]
    return struct.pack("=I3H", line, *map(len, texts)) + b"".join(texts)


def leave_files(names: list[str], leave_note: Callable[[int, bytes, int], object]) -> None:
    """Give the worker these files, in the form that `note.py` reads, as long as there is room for them."""
    at, room = NOTE_BYTES, FETCHED_BYTES
    for name in names:
        content, left = read_file(os.path.join(os.path.dirname(MAIN), name), room), b""
        mark = NOT_THERE
        if content is not None:
            mark, left = (1 + len(content), content) if len(content) <= room else (TOO_LARGE, b"")
        record = struct.pack("=i", mark) + left
        leave_note(at, record, len(record))
        at += len(record)
        room -= len(left)


def read_file(path: str, most: int) -> bytes | None:
    """One byte more than `most` at most; None where there is no regular file that opens."""
    try:
        # A pipe would let us wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with open(descriptor, "rb") as file:
        return file.read(most + 1)


def line_of(failure: BaseException) -> int:
    """The last line of the program's own text that an exception came by; 0 where it came by none."""
    if isinstance(failure, SyntaxError) and failure.filename == MAIN:
        return failure.lineno or 0
    line, traceback = 0, failure.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == MAIN:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def show(failure: BaseException) -> None:
    """Print an exception as the interpreter does where the program has no say."""
    sys.__excepthook__(type(failure), failure, without_our_frames(failure))


def without_our_frames(failure: BaseException) -> types.TracebackType | None:
    """The traceback from where the program's own frames begin."""
    traceback = failure.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    failure.__traceback__ = traceback
    return traceback


def finish(status: int, namespace: dict[str, object]) -> int:
    """What the interpreter does at its end, short of tearing down the preloaded modules."""
    threading._shutdown()  # type: ignore[attr-defined] # what Py_Finalize calls
    atexit._run_exitfuncs()
    flushed = flush_streams()
    sys.last_value = None
    for name in [name for name in namespace if name != "__builtins__"]:
        namespace[name] = None  # runs the `__del__` of what the program leaves behind
    gc.collect()  # and of what it left in circles; the frozen heap has no part in it
    sys.stdout, sys.stderr = STREAMS  # what a program put in their place is flushed as it goes
    for stream in STREAMS:
        with contextlib.suppress(ValueError, OSError):  # closed or detached by the program, which it may
            stream.flush()
    return status if flushed else 120


def flush_streams() -> bool:
    """Flush what the program made of its streams. False, as for the interpreter, when one would not."""
    flushed = True
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name, None)
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException as exc:  # noqa: BLE001 - it may be an object of the program's own
            flushed = False
            if name == "stdout":
                named = "on flushing sys.stdout:" if sys.version_info >= (3, 13) else f"in: {stream!r}"
                print("Exception ignored", named, file=sys.stderr)
                show(exc)
    return flushed


if __name__ == "__main__":
    main()
