"""Runs tests against a submission that must neither see nor forge them. The program of a call, inside of the jail.

Theory of operation. This process forks the submission's before it reads the tests, which come on stdin; the other one
has no descriptor of that, nor of our stdout, and no way into our memory: programs of a call are not dumpable, and the
filter refuses to trace or to read one another. The tests run here. A name that they do not define themselves is looked
up over there, and a call of what was found sends the arguments and gets a value back. Plain values come by value, in
the form of `Writer` and `Reader`, which makes nothing but plain values of whatever bytes come. All else comes as a
`Handle`, which asks again for each thing that is wanted of it. Only we say what is equal to a plain value.

For each test one letter goes to stdout: A accepted, W an assertion of the test failed, R something was raised, T the
time was up, E the test itself is broken. What the submission prints goes to stderr, and so do our notes.

Who may die: when the submission's process does, or says what is no message, each test from there on is an R. When it
kills or stops us, the call does not end well, and what was not judged is not accepted. Whatever it does to itself
(patched builtins, other messages on our pipe, exits, threads) changes only its own answers.

Standard library only: it runs under the jail's interpreter, which has none of our packages. It lies in the runtime as
`roc_harness.py`, and forkservers have it warm.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import datetime
import decimal
import fractions
import functools
import importlib
import json
import math
import operator
import os
import re
import signal
import socket
import struct
import sys
import time
import types
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SUBMISSION = "submission.py"
LONGEST_MESSAGE = 64 * 1024 * 1024
SEQUENCES: Mapping[type, bytes] = {list: b"l", tuple: b"t", set: b"e", frozenset: b"z"}
OF_SEQUENCE = {tag: kind for kind, tag in SEQUENCES.items()}
#: Types that come as arguments for the type, by place in this list. The arguments are plain.
MADE: Mapping[type, Callable[[Any], tuple[Any, ...]]] = {
    complex: lambda value: (value.real, value.imag),
    range: lambda value: (value.start, value.stop, value.step),
    collections.deque: lambda value: (list(value),),
    collections.OrderedDict: lambda value: (list(value.items()),),
    collections.Counter: lambda value: (dict(value),),
    decimal.Decimal: lambda value: (str(value),),
    fractions.Fraction: lambda value: (value.numerator, value.denominator),
    datetime.date: lambda value: (value.year, value.month, value.day),
    datetime.datetime: lambda value: (*value.timetuple()[:6], value.microsecond),
    datetime.timedelta: lambda value: (value.days, value.seconds, value.microseconds),
}
MADE_TYPES = list(MADE)
#: Of these types a subclass comes as a handle with its plain value.
BASES: Mapping[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    list: lambda value: [*list.__iter__(value)],
    tuple: lambda value: (*tuple.__iter__(value),),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: {*set.__iter__(value)},
    frozenset: lambda value: frozenset([*frozenset.__iter__(value)]),
}
#: Arrays of these kinds are bytes: booleans, numbers, texts, times.
ARRAY_TYPE = re.compile(r"[<>|=]?[biufcSUmM][0-9]{1,6}(\[[0-9]{0,6}[a-zA-Z]{1,2}\])?")
EXCEPTIONS = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, BaseExceptionGroup)
}
#: What tests call modules without importing them.
MODULES = {name: name for name in sys.stdlib_module_names} | {"np": "numpy", "numpy": "numpy"}


class NoValueError(TypeError):
    """An argument that is no plain value and nothing of the submission's."""


class BadMessageError(ValueError):
    """Bytes that are no message."""


class OverError(BaseException):
    """The submission's process is no more, or its time is up. No test's `except Exception` takes it."""


# ---- values as bytes ----


_TO_BYTES: Mapping[type, tuple[bytes, Callable[[Any], bytes]]] = {
    int: (b"i", lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)),
    str: (b"s", lambda value: value.encode("utf-8", "surrogatepass")),
    bytes: (b"b", bytes),
    bytearray: (b"B", bytes),
}


class Writer:
    """Makes bytes of a value. `number` gives the number of what is not plain."""

    def __init__(self, number: Callable[[Any], int]) -> None:
        self._number = number
        self._parts: list[bytes] = []

    def bytes_of(self, value: Any) -> bytes:
        """The whole of a value."""
        self._parts = []
        self._put(value)
        return b"".join(self._parts)

    def _put(self, value: Any) -> None:
        kind = type(value)
        if value is None or kind is bool:
            self._parts.append({None: b"N", True: b"T", False: b"F"}[value])
        elif kind is float:
            self._parts.append(struct.pack("<cd", b"f", value))
        elif kind in _TO_BYTES:
            tag, to_bytes = _TO_BYTES[kind]
            self._put_bytes(tag, to_bytes(value))
        elif kind in SEQUENCES:
            self._put_sequence(kind, value)
        elif kind is dict or kind is collections.defaultdict:
            self._parts.append(struct.pack("<cI", b"d", len(value)))
            for pair in list(value.items()):
                self._put(pair[0])
                self._put(pair[1])
        elif kind in MADE and getattr(value, "tzinfo", None) is None:
            self._parts.append(struct.pack("<cB", b"m", MADE_TYPES.index(kind)))
            self._put(MADE[kind](value))
        elif not self._put_array(value):
            self._put_handle(value)

    def _put_bytes(self, tag: bytes, content: bytes) -> None:
        self._parts.append(struct.pack("<cI", tag, len(content)))
        self._parts.append(content)

    def _put_sequence(self, kind: type, value: Any) -> None:
        items = list(value)
        kinds = {*map(type, items)} if kind is list and len(items) > 8 else set()
        if kinds in ({int}, {float}):
            with contextlib.suppress(OverflowError):
                tag, code = (b"Q", "q") if kinds == {int} else (b"D", "d")
                self._put_bytes(tag, array(code, items).tobytes())
                return
        self._parts.append(struct.pack("<cI", SEQUENCES[kind], len(items)))
        for item in items:
            self._put(item)

    def _put_array(self, value: Any) -> bool:
        numpy = sys.modules.get("numpy")
        if numpy is None or type(value).__module__ != "numpy":
            return False
        is_array = type(value) is numpy.ndarray
        if not is_array and not isinstance(value, numpy.generic):
            return False
        whole = numpy.asarray(value)
        if not ARRAY_TYPE.fullmatch(whole.dtype.str):
            return False
        self._parts.append(b"a" if is_array else b"g")
        for part in (whole.dtype.str, list(whole.shape), whole.tobytes()):
            self._put(part)
        return True

    def _put_handle(self, value: Any) -> None:
        self._parts.append(struct.pack("<cI", b"h", self._number(value)))
        base = (
            None if type(value) is Handle else next((base for base in BASES if isinstance(value, base)), None)
        )
        self._put((BASES[base](value),) if base else None)


class Reader:
    """Makes a value of bytes. Raises BadMessageError, or what a value raises that cannot be.

    `made` makes something of the number, and the plain value, of what is not plain.
    """

    def __init__(self, data: bytes, made: Callable[[int, Any], Any]) -> None:
        self._data = data
        self._at = 0
        self._made = made

    def whole(self) -> Any:
        """The one value that the bytes are."""
        value = self._get()
        if self._at != len(self._data):
            raise BadMessageError("something is behind the value")
        return value

    def _take(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._data):
            raise BadMessageError("it ends inside of a value")
        return self._data[start : self._at]

    def _count(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _get(self) -> Any:  # noqa: PLR0911 - one for each kind of value
        tag = self._take(1)
        if plain := _PLAIN.get(tag):
            return plain[0]
        if tag == b"f":
            return struct.unpack("<d", self._take(8))[0]
        if read := _OF_BYTES.get(tag):
            return read(self._take(self._count()))
        if kind := OF_SEQUENCE.get(tag):
            return kind([self._get() for _ in range(self._count())])
        if tag == b"d":
            return {self._get(): self._get() for _ in range(self._count())}
        if tag == b"m":
            kind = MADE_TYPES[self._take(1)[0]]
            return kind(*self._get())
        if tag in {b"a", b"g"}:
            return self._array(is_array=tag == b"a")
        if tag == b"h":
            number = self._count()
            return self._made(number, self._get())
        raise BadMessageError("no value begins like this")

    def _array(self, *, is_array: bool) -> Any:
        kind, shape, content = self._get(), self._get(), self._get()
        if not (type(kind) is str and ARRAY_TYPE.fullmatch(kind) and type(content) is bytes):
            raise BadMessageError("no array is like this")
        numpy = importlib.import_module("numpy")
        whole = numpy.frombuffer(content, kind).reshape(shape).copy()
        return whole if is_array else whole[()]


def _numbers(code: str, content: bytes) -> list[Any]:
    numbers = array(code)
    numbers.frombytes(content)
    return numbers.tolist()


_PLAIN = {b"N": (None,), b"T": (True,), b"F": (False,)}
_OF_BYTES: Mapping[bytes, Callable[[bytes], Any]] = {
    b"i": lambda content: int.from_bytes(content, "little", signed=True),
    b"s": lambda content: content.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"B": bytearray,
    b"Q": functools.partial(_numbers, "q"),
    b"D": functools.partial(_numbers, "d"),
}


def send(link: socket.socket, message: bytes) -> None:
    """Send one message: its length, then itself."""
    link.sendall(struct.pack("<I", len(message)) + message)


def receive(link: socket.socket) -> bytes:
    """One message. Raises EOFError, or BadMessageError for one that is too long."""
    [length] = struct.unpack("<I", _receive_all(link, 4))
    if length > LONGEST_MESSAGE:
        raise BadMessageError("too long")
    return _receive_all(link, length)


def _receive_all(link: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = link.recv(min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# ---- the submission's process ----


def serve_submission(link: socket.socket) -> None:
    """Run the submission, then do what is asked of it, until nobody asks. Never returns."""
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        Submission(link).serve()
    finally:
        os._exit(1)


class Submission:
    """The submission's names, and the objects that the tests have handles of."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._module = types.ModuleType("submission")
        self._writer = Writer(self._number)
        self._actions = {**_ACTIONS, "global": lambda name: self._module.__dict__[name]}

    def serve(self) -> None:
        """Answer one question after the other."""
        self._answer(self._load)
        while True:
            action, args, named = Reader(receive(self._link), self._object).whole()
            self._answer(functools.partial(self._do, action, args, named))

    def _load(self) -> tuple[Any, list[Any]]:
        path = os.path.join(sys.path[0], SUBMISSION)
        with open(path, encoding="utf-8", newline="") as file:
            code = file.read().removeprefix("\ufeff")
        self._module.__file__ = path
        sys.modules["submission"] = self._module
        exec(compile(code, path, "exec", dont_inherit=True), self._module.__dict__)
        return None, []

    def _do(self, action: str, args: list[Any], named: dict[str, Any]) -> tuple[Any, list[Any]]:
        """What came of it, and for each argument that it changed (value,), else None."""
        if action != "call":
            return self._actions[action](*args), []
        given = [*args, *named.values()]
        before = [self._writer.bytes_of(arg) if type(arg) in _CHANGEABLE else None for arg in given]
        value = args[0](*args[1:], **named)
        changed = [
            (arg,) if old is not None and self._writer.bytes_of(arg) != old else None
            for arg, old in zip(given, before, strict=True)
        ]
        return value, changed

    def _answer(self, do: Callable[[], tuple[Any, list[Any]]]) -> None:
        try:
            value, changed = do()
            message = self._writer.bytes_of((True, value, changed))
        except BaseException as exc:  # noqa: BLE001 - whatever it raised is its answer
            known = next(kind.__name__ for kind in type(exc).__mro__ if kind in EXCEPTIONS.values())
            message = self._writer.bytes_of((False, known, text_of(exc), args_of(exc)))
        send(self._link, message)

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._numbers[id(value)]

    def _object(self, number: int, _: Any) -> Any:
        return self._objects[number]


def text_of(exc: BaseException) -> str:
    """What an exception says, as far as it can say it."""
    try:
        return str(exc)[:1000]
    except BaseException:  # noqa: BLE001 - it may be of a class of the submission's
        return ""


def args_of(exc: BaseException) -> tuple[Any, ...]:
    """What it was made of, where that is a few plain values."""
    args = tuple(vars(BaseException)["args"].__get__(exc))
    return args if len(args) <= _MOST_ARGS and {*map(type, args)} <= _ARGS else ()


_MOST_ARGS = 8
_ARGS = {str, int, float, bool, bytes, type(None)}
_CHANGEABLE = {list, dict, set, bytearray, collections.deque}
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor")
_ORDERS = ("lt", "le", "gt", "ge")
_UNARY: Mapping[str, Callable[[Any], Any]] = {
    "abs": abs, "bool": bool, "float": float, "int": int, "index": operator.index, "invert": operator.invert,
    "len": len, "neg": operator.neg, "pos": operator.pos, "repr": repr, "str": str, "trunc": math.trunc,
}  # fmt: skip
_ACTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*_OPERATORS, *_ORDERS, "eq")},
    **_UNARY,
    "delattr": delattr, "delitem": operator.delitem, "format": format, "getattr": getattr,
    "getitem": operator.getitem, "isinstance": isinstance, "iter": iter, "next": next, "round": round,
    "setattr": setattr, "setitem": operator.setitem,
}  # fmt: skip


# ---- the tests' process ----


class Link:
    """Asks the submission's process. The first thing that goes wrong is the end of it."""

    def __init__(self, pid: int, link: socket.socket) -> None:
        self._pid = pid
        self._link = link
        self._writer = Writer(self._number)
        self.until = math.inf
        #: The letter of each test from now on, when it is over.
        self.over = ""
        #: What was raised over there last, and here again.
        self.raised: BaseException | None = None

    def ask(self, action: str, /, *args: Any, **named: Any) -> Any:
        """What is answered. Raises what is raised there, and OverError."""
        if self.over:
            raise OverError
        message = self._writer.bytes_of((action, list(args), named))
        self._within(lambda: send(self._link, message))
        try:
            return self.answer((*args, *named.values()))
        except (StopIteration, StopAsyncIteration) as exc:
            if action == "next":
                raise
            # `all(map(check, cases))` would end with it, and be true.
            raise RuntimeError("the submission raised the end of an iteration") from exc

    def answer(self, args: tuple[Any, ...] = ()) -> Any:
        """The next answer. What it changed in arguments is changed in them here."""
        message = self._within(lambda: Reader(receive(self._link), self._handle).whole())
        match message:
            case (True, value, list(changes)) if len(changes) <= len(args):
                for arg, change in zip(args, changes, strict=False):
                    if type(change) is tuple and len(change) == 1 and type(change[0]) is type(arg):
                        _replace(arg, change[0])
                return value
            case (False, str(name), str(text), tuple(made_of)) if name in EXCEPTIONS:
                self.raised = raised_as(EXCEPTIONS[name], text, made_of)
                raise self.raised
            case _:
                self.end("R")
                raise OverError

    def _within(self, work: Callable[[], Any]) -> Any:
        """Do this before the time is up."""
        left_s = self.until - time.monotonic()
        try:
            self._link.settimeout(None if left_s == math.inf else max(left_s, 1e-6))
            done = work()
        except TimeoutError as exc:
            self.end("T")
            raise OverError from exc
        except NoValueError:
            raise
        except Exception as exc:
            self.end("R")
            raise OverError from exc
        if time.monotonic() > self.until:  # each read had all of the time, and there may have been many
            self.end("T")
            raise OverError
        return done

    def end(self, letter: str) -> None:
        """End the submission's process."""
        self.over = self.over or letter
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _handle(self, number: int, base: Any) -> Handle:
        return Handle(self, number, base)

    @staticmethod
    def _number(value: Any) -> int:
        if type(value) is not Handle:
            raise NoValueError(f"a {type(value).__name__} cannot be handed to the submission")
        return number_of(value)


def raised_as(kind: type[BaseException], text: str, args: tuple[Any, ...]) -> BaseException:
    """An exception of this kind that says this, and is made of the same where that says the same."""
    if type(args) is tuple and {*map(type, args)} <= _ARGS:
        raised = kind.__new__(kind, *args)
        raised.args = args
        if text_of(raised) == text:
            return raised
    raised = kind.__new__(kind, text)
    raised.args = (text,)
    return raised


def _replace(old: Any, new: Any) -> None:
    if type(old) in {list, bytearray}:
        old[:] = new
    elif type(old) in _CHANGEABLE:
        old.clear()
        (old.extend if type(old) is collections.deque else old.update)(new)


class Handle:
    """Something of the submission's. Where it is a subclass of a plain type, its plain value is known as well.

    Nothing here tells the submission what its object is compared with: an object that knew could say that it is just
    that. So with a plain value it has no operators, unless its own plain value has.
    """

    __slots__ = ("__base", "__link", "__number")

    def __init__(self, link: Link, number: int, base: Any) -> None:
        if type(link) is not Link:
            raise NoValueError("a class of the submission's cannot be inherited from")
        for name, value in (("link", link), ("number", number), ("base", base)):
            object.__setattr__(self, f"_Handle__{name}", value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array_"):
            raise AttributeError(name)  # numpy asks by these where in our memory an array lies
        return self.__link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__link.ask("setattr", self, name, value)

    def __delattr__(self, name: str) -> None:
        self.__link.ask("delattr", self, name)

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        return self.__link.ask("call", self, *args, **named)

    def __getitem__(self, key: Any) -> Any:
        return self.__link.ask("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__link.ask("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self.__link.ask("delitem", self, key)

    def __iter__(self) -> Iterator[Any]:
        if base := base_of(self):
            return iter(base[0])
        return self.__items(self.__link.ask("iter", self))

    def __items(self, iterator: Any) -> Iterator[Any]:
        with contextlib.suppress(StopIteration):
            while True:
                yield self.__link.ask("next", iterator)

    def __next__(self) -> Any:
        return self.__link.ask("next", self)

    def __contains__(self, value: Any) -> bool:
        return any(value is item or value == item for item in self)

    def __eq__(self, other: object) -> bool:
        mine, others = base_of(self), base_of(other)
        if mine and others:
            return bool(mine[0] == others[0])
        return type(other) is Handle and self.__link.ask("eq", self, other) is True

    def __hash__(self) -> int:
        base = base_of(self)
        return hash(base[0]) if base else number_of(self)

    def __instancecheck__(self, value: Any) -> bool:
        return self.__link.ask("isinstance", value, self) is True

    def __format__(self, form: str) -> str:
        base = base_of(self)
        return format(base[0], form) if base else str(self.__link.ask("format", self, form))

    def __round__(self, *digits: int) -> Any:
        base = base_of(self)
        return round(base[0], *digits) if base else self.__link.ask("round", self, *digits)

    @property
    def __class__(self) -> Any:
        base = base_of(self)
        return type(base[0]) if base else Handle

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        raise TypeError("an object of the submission's keeps its class")

    def __unary(self, action: str) -> Any:
        if (base := base_of(self)) and action not in {"str", "repr"}:
            return _UNARY[action](base[0])
        return self.__link.ask(action, self)

    def __binary(self, action: str, other: Any, *, is_turned: bool = False) -> Any:
        mine, others = base_of(self), base_of(other)
        if mine and others:
            sides = (others[0], mine[0]) if is_turned else (mine[0], others[0])
            return _ACTIONS[action](*sides)
        if type(other) is not Handle:
            return NotImplemented
        return self.__link.ask(action, self, other)


def _add_operators() -> None:
    def unary(name: str) -> None:
        setattr(Handle, f"__{name}__", lambda self: self._Handle__unary(name))

    def binary(name: str) -> None:
        word = name.rstrip("_")
        setattr(Handle, f"__{word}__", lambda self, other: self._Handle__binary(name, other))
        if name in _OPERATORS:
            turned = lambda self, other: self._Handle__binary(name, other, is_turned=True)  # noqa: E731
            setattr(Handle, f"__r{word}__", turned)

    for name in _UNARY:
        unary(name)
    for name in (*_OPERATORS, *_ORDERS):
        binary(name)


_add_operators()


def number_of(handle: Handle) -> int:
    """Which object of the submission's process it is."""
    number: int = object.__getattribute__(handle, "_Handle__number")
    return number


def base_of(value: object) -> tuple[Any] | None:
    """The plain value that it is or has; None where it has none."""
    if type(value) is not Handle:
        return (value,)
    base = object.__getattribute__(value, "_Handle__base")
    return base if type(base) is tuple and len(base) == 1 else None


class Names(dict[str, Any]):
    """The tests' own names; what is not among them is a builtin, a module of ours, or the submission's."""

    def __init__(self, link: Link, own: list[str], modules: set[str]) -> None:
        super().__init__(__name__="tests", __builtins__=builtins)
        self._link = link
        self._own = own
        self._modules = modules

    def __missing__(self, name: str) -> Any:
        """Raise KeyError for what is nobody's, or a builtin."""
        if name not in self._own:
            if hasattr(builtins, name):
                raise KeyError(name)
            if name in self._modules:
                return importlib.import_module(MODULES[name])
        return self._link.ask("global", name)


def modules_of(text: str) -> set[str]:
    """Names of modules that a test takes something from. A module of ours cannot be the submission's."""
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    except _NO_PYTHON:
        return set()
    return {node.value.id for node in nodes if isinstance(node.value, ast.Name)} & MODULES.keys()


_NO_PYTHON = (SyntaxError, ValueError, RecursionError, MemoryError)


class Tests:
    """The tests of a task, and what they say."""

    def __init__(self, task: dict[str, Any], link: Link) -> None:
        self._task = task
        self._link = link
        #: Why tests were not accepted. They can quote what is expected, so the submission's end comes first.
        self.notes = ""
        texts = [text for text in (task["setup"], *task["tests"]) if isinstance(text, str)]
        self._names = Names(link, task["names"], {name for text in texts for name in modules_of(text)})

    def run(self, verdicts: int) -> None:
        """Write a letter for each to this descriptor."""
        before = self._letter("setup", self._set_up)
        for number, test in enumerate(self._task["tests"]):
            letter = (
                before
                if before != "A"
                else self._letter(f"test {number}", functools.partial(self._try, test))
            )
            os.write(verdicts, letter.encode())
            if letter != "A" and self._task["stop_early"]:
                return

    def _set_up(self) -> None:
        self._link.answer()  # that the submission is loaded
        self._exec(self._task["setup"])

    def _letter(self, name: str, test: Callable[[], object]) -> str:
        self._link.until = time.monotonic() + (self._task["test_wall_s"] or math.inf)
        letter, note = _outcome(test, self._link)
        letter = self._link.over or letter
        if letter != "A":
            self.notes += f"{name}: {note or letter}\n"
        return letter

    def _try(self, test: str | dict[str, Any]) -> None:
        if isinstance(test, str):
            self._exec(test)
            return
        value = self._function(test["function"])(*test["arguments"])
        if not same(value, test["expected"], self._task["tolerance"]):
            raise AssertionError("it returned something else")

    def _exec(self, text: str) -> None:
        try:
            code = compile(text, "tests", "exec", dont_inherit=True)
        except _NO_PYTHON as exc:
            raise NoValueError(f"the test is no Python: {exc}") from exc
        exec(code, self._names)

    def _function(self, name: str) -> Any:
        try:
            return self._link.ask("global", name)
        except KeyError:
            return getattr(self._link.ask("global", "Solution")(), name)


def _outcome(test: Callable[[], object], link: Link) -> tuple[str, str]:
    """The letter of a test, and a note."""
    try:
        test()
    except NoValueError as exc:
        return "E", text_of(exc)
    except AssertionError as exc:
        return "R" if exc is link.raised else "W", f"AssertionError: {text_of(exc)}"
    except BaseException as exc:  # noqa: BLE001 - a test may raise anything
        return "R", f"{type(exc).__name__}: {text_of(exc)}"
    return "A", ""


def same(value: Any, expected: Any, tolerance: dict[str, float] | None) -> bool:
    """Whether a value is what JSON says. A tuple is as good as a list, and keys are texts there."""
    value = base_of(value)
    return value is not None and _same(value[0], expected, tolerance)


def _same(value: Any, expected: Any, tolerance: dict[str, float] | None) -> bool:
    if type(value).__module__ == "numpy":
        value = value.tolist()
    if isinstance(expected, list):
        return (
            type(value) in {list, tuple, collections.deque}
            and len(value) == len(expected)
            and all(same(item, wanted, tolerance) for item, wanted in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        keyed = {key if type(key) is str else json.dumps(key): item for key, item in value.items()}
        return len(keyed) == len(value) == len(expected) and all(
            name in keyed and same(keyed[name], wanted, tolerance) for name, wanted in expected.items()
        )
    if type(value) in _NUMBERS and type(expected) in {int, float}:
        return _near(value, expected, tolerance)
    return bool(type(value) is type(expected) and value == expected)


_NUMBERS = {int, float, decimal.Decimal, fractions.Fraction}


def _near(value: Any, expected: float, tolerance: dict[str, float] | None) -> bool:
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return True
    if tolerance is None or type(value) is type(expected) is int:
        return False
    near, wanted = float(value), float(expected)
    if math.isinf(near) or math.isinf(wanted):
        return False
    return abs(near - wanted) <= tolerance["absolute"] + tolerance["relative"] * abs(wanted)


def main() -> None:
    """Fork, read, run, and leave nobody behind."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        serve_submission(theirs)
    theirs.close()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    del sys.path[0]
    sys.set_int_max_str_digits(0)
    verdicts = os.dup(1)
    os.dup2(2, 1)  # a test may print
    link = Link(pid, ours)
    tests = Tests(json.load(sys.stdin), link)
    tests.run(verdicts)
    link.end("R")
    os.waitpid(pid, 0)
    print(tests.notes, end="", file=sys.stderr, flush=True)
    os._exit(0)
