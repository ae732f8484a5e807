"""The forkserver: a warm interpreter inside the jail that forks one child per call.

Theory of operation. nsjail starts this file as PID 1 of the jail with the control socket as descriptor 3. One JSON
message from the worker says what to load; everything else is loaded, used once and frozen here, before the first
fork, so that a program finds it warm. Then `fork_serve` (fork.c, where the protocol is written down) takes over and
no Python runs here any more, until the worker has gone. In each child `fork_serve` returns, behind all walls, and
`run_program` goes on with what descriptor 3 holds now: the call's code and files.

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
import ctypes
import functools
import gc
import importlib
import io
import json
import operator
import os
import resource
import signal
import socket
import struct
import sys
import threading
import types

CONTROL = 3  # in the forkserver
PAYLOAD = 3  # in the child
MAIN = "/tmp/main.py"
IN_CHILD = 1
FUTURE_FLAGS = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/python/bin:/usr/bin:/bin",
    "PYTHONPATH": "/python/site",
    "PYTHONUTF8": "1",
    # One BLAS thread: a thread pool in the forkserver would make fork unsafe, and calls share the cores anyway.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

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


class _Setup(ctypes.Structure):
    """struct setup of fork.c."""

    _fields_ = [("control", ctypes.c_int), ("init_exe", ctypes.c_int), ("program_filter", _Filter)]


def main() -> None:
    """Load, freeze, serve; come back once in every child."""
    control = socket.socket(fileno=CONTROL)
    config = json.loads(control.recv(1 << 20))
    control.detach()

    os.environ.clear()
    os.environ.update(ENVIRONMENT)
    sys.path[0] = "/tmp"  # where a script's own folder stands; until now ours
    sys.argv = [MAIN]
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # what was printed before a kill is there
    warm_up(config["modules"], config["warm_up"])

    for limit, value in LIMITS.items():
        resource.setrlimit(limit, (value, value))
    # A PyDLL keeps the interpreter lock, which the fork protocol of CPython wants.
    fork = ctypes.PyDLL("/jail/libfork.so")
    setup = _Setup(
        CONTROL,
        os.open("/jail/init", os.O_PATH | os.O_CLOEXEC),
        _Filter.of(bytes.fromhex(config["program_filter"])),
    )
    failed = fork.fork_filter(ctypes.byref(_Filter.of(bytes.fromhex(config["forkserver_filter"]))))
    if failed:
        raise OSError(-failed, os.strerror(-failed))
    del config, control
    if threading.active_count() != 1:
        raise RuntimeError("a preloaded module started a thread; forking would be unsafe")
    gc.collect()
    gc.freeze()  # else the first collection in a child touches, and so copies, every page of the heap
    gc.disable()
    outcome = fork.fork_serve(ctypes.byref(setup))
    if outcome == IN_CHILD:
        run_program()
    if outcome < 0:
        raise OSError(-outcome, os.strerror(-outcome))


def warm_up(modules: list[str], source: str) -> None:
    """Import, then use each library once: what a library builds on first use is then built for every child."""
    for name in modules:
        importlib.import_module(name)
    exec(compile(source, "<warm-up>", "exec"), {"__name__": "warm_up"})  # preload.py's text


# ---- the child ----


def run_program() -> None:
    """Run the call in this process as `python main.py` would, and exit as it would. Never returns."""
    code, files, echo = read_payload()
    gc.enable()
    fresh_randomness()
    main_module = types.ModuleType("__main__")
    main_module.__file__ = MAIN
    main_module.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main_module
    status = 1
    try:
        try:
            write_files(code, files)
            del files
            execute(code, main_module.__dict__, echo=echo)
            status = 0
        except SystemExit as exc:
            status = exit_status(exc.code)
        except KeyboardInterrupt:
            report_exception()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
            status = 130
        except BaseException:  # noqa: BLE001 - whatever the program raised is its outcome
            report_exception()
            status = 1
        status = finish(status, main_module.__dict__)
    finally:
        os._exit(status)


def read_payload() -> tuple[str, list[tuple[str, bytes]], bool]:
    """Code, files and the echo flag, in the form that `jail.py` packs."""
    size = os.fstat(PAYLOAD).st_size
    data = memoryview(os.pread(PAYLOAD, size, 0))
    os.close(PAYLOAD)
    echo, code_length, count = struct.unpack_from("=III", data)
    offset = 12
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
    return code.removeprefix("\ufeff"), files, bool(echo)


def fresh_randomness() -> None:
    """What fork copied and no hook renews. `random` has a hook, and `ssl` sees that the pid is another."""
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
    if process := sys.modules.get("multiprocessing.process"):
        process.current_process().authkey = os.urandom(32)


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
    if not isinstance(last, ast.Expr) or code.rstrip().endswith(";"):
        exec(compile(tree, MAIN, "exec", dont_inherit=True), namespace)
        return
    tree.body.pop()
    body = compile(tree, MAIN, "exec", dont_inherit=True)
    # "single" shows the value through sys.displayhook.
    tail = compile(ast.Interactive([last]), MAIN, "single", body.co_flags & FUTURE_FLAGS, dont_inherit=True)
    exec(body, namespace)
    exec(tail, namespace)


def exit_status(code: object) -> int:
    """The status of `sys.exit(code)`, as the interpreter gives it."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def report_exception() -> None:
    """Print the traceback without our own frames, through the program's hook if it set one."""
    kind, value, traceback = sys.exc_info()
    assert kind is not None
    assert value is not None
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.excepthook(kind, value.with_traceback(traceback), traceback)


def finish(status: int, namespace: dict[str, object]) -> int:
    """What the interpreter does at its end, short of tearing down the preloaded modules."""
    threading._shutdown()  # type: ignore[attr-defined] # what Py_Finalize calls
    atexit._run_exitfuncs()
    for name in [name for name in namespace if name != "__builtins__"]:
        namespace[name] = None  # runs the `__del__` of what the program leaves behind
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed or replaced by the program
            status = status or 120
    return status


if __name__ == "__main__":
    main()
