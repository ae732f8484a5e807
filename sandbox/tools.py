"""Tools for language models: their schemas, the call that a model's tool call asks for, and what the model sees of it.

    tools = schemas("python_code_with_standard_io")         # into the prompt, or the request of an OpenAI-like API
    call = to_call(name, arguments)                         # raises BadToolCall, whose text is for the model
    text = render(await client.run(call))                   # the tool's answer

The names and arguments are those that models know: rStar2-Agent's (arXiv 2508.20722 has
`execute_python_code_with_standard_io`, its code the other two), and `python` of gpt-oss and many others. Each shows the
value of an expression on the last line, as a notebook does. Nothing here keeps a state: what a notebook's earlier cells
made is made again for the next (`earlier`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, Unpack

from pydantic import JsonValue, TypeAdapter, ValidationError

from sandbox.calls import MIB, CallStatus, ToolCall, ToolResult
from sandbox.cells import make_call, replay_call
from sandbox.client import CallFields
from sandbox.errors import BadToolCall

Schema: TypeAlias = dict[str, JsonValue]

_CODE = (
    "The Python program, as text. What it prints is what you see; so is the value of a last-line expression."
)
_WITH_INPUT = (
    "Run a Python program and see what it prints. Each run starts afresh: nothing is left of earlier ones."
)
_INPUT = "What the program reads from standard input, as by input(). An empty text if it reads nothing."
_CELL = "Run a cell of Python in a notebook and see what it prints. What the cells before it defined is still there."
_PYTHON = "Run a Python program and see what it prints and the value of an expression on its last line."


def _schema(name: str, description: str, **arguments: str) -> Schema:
    properties: dict[str, JsonValue] = {
        argument: {"type": "string", "description": text} for argument, text in arguments.items()
    }
    parameters: dict[str, JsonValue] = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    function: dict[str, JsonValue] = {
        "name": name,
        "description": description,
        "parameters": parameters,
    }
    return {"type": "function", "function": function}


#: The arguments of each tool. `input` is asked for, and may be missing.
_ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "python_code_with_standard_io": {"code": _CODE, "input": _INPUT},
    "execute_python_code_with_standard_io": {"code": _CODE, "input": _INPUT},
    "jupyter_code": {"code": _CODE},
    "python": {"code": _CODE},
}
_DESCRIPTIONS = {"jupyter_code": _CELL, "python": _PYTHON}

#: The names of all tools.
TOOLS = tuple(_ARGUMENTS)

#: Of each stream, so that a print in a loop does not fill a model's context.
SHOWN_BYTES = 8192

_OBJECT = TypeAdapter(dict[str, JsonValue])


def schemas(*names: str) -> list[Schema]:
    """The schemas of these tools, or of all, as OpenAI's API and chat templates take them. Raises KeyError."""
    return [
        _schema(name, _DESCRIPTIONS.get(name, _WITH_INPUT), **_ARGUMENTS[name]) for name in names or TOOLS
    ]


def to_call(
    name: str,
    arguments: object,
    *,
    earlier: Iterable[str] = (),
    offered: Sequence[str] = TOOLS,
    **fields: Unpack[CallFields],
) -> ToolCall:
    """The call that a model asks for by the name of a tool and its arguments, an object or the JSON text of one.

    `earlier` are the cells that `jupyter_code` ran before this one, in order; other tools do not look at them.
    `offered` are the tools that the model was told of. `fields` are those of the call that are not the model's to
    choose: its id, limits, priority. Raises BadToolCall, whose text the model should see, whatever the model wrote;
    InvalidCall if one of `fields` is wrong.
    """
    if name not in offered or name not in _ARGUMENTS:
        raise _bad(f"there is no tool named {_quoted(name)}; there is {_listed(offered)}")
    texts = _texts(name, arguments)
    code = texts["code"]
    if name == "jupyter_code":
        return replay_call(list(earlier), code, **fields)
    call: CallFields = {"stdin": texts.get("input", ""), "echo_last_value": True, **fields}
    return make_call(code, call)


def render(result: ToolResult, *, max_bytes: int = SHOWN_BYTES) -> str:
    """What the model sees of a result, in the words of rStar2-Agent's public code.

    At most `max_bytes` of each stream are shown, half of them from its end. A fault of the service is not the program's
    failure, and no model should learn from it: raises its error, QueueTimeout or InternalError, as the client does.
    """
    if (error := result.to_error()) is not None:
        raise error
    stdout = shown(result.stdout, result.stdout_tail, result.stdout_bytes, max_bytes)
    stderr = shown(result.stderr, result.stderr_tail, result.stderr_bytes, max_bytes)
    parts = ["Tool call success"] if result.status is CallStatus.OK else _failure(_reason(result))
    parts += [f"stdout: {stdout}"] if stdout else []
    parts += [f"stderr: {stderr}"] if stderr else []
    if result.status is CallStatus.OK and not stdout and not stderr:
        parts.append("note: nothing was printed; print() what you want to see")
    return "\n".join([*parts, f"execution time: {result.usage.wall_s:.2f}s"])


def shown(head: str, tail: str, written_bytes: int, most: int) -> str:
    """A stream in at most so many bytes, and in place of what is missing how much that is.

    `tail` is the end of one whose middle the service has left out, `written_bytes` all that the program wrote.
    """
    first, final = _ends(head.encode(), tail.encode(), most)
    shown_bytes = len(first.encode()) + len(final.encode())
    # Bytes that are no UTF-8 take more room as text than the program wrote.
    whole_bytes = max(written_bytes, len(head.encode()) + len(tail.encode()))
    if whole_bytes == shown_bytes:
        return (first + final).removesuffix("\n")
    note = f"… {whole_bytes - shown_bytes:,} of {whole_bytes:,} bytes left out …"
    return "\n".join(filter(None, [first.removesuffix("\n"), note, final.removesuffix("\n")]))


def _ends(head: bytes, tail: bytes, most: int) -> tuple[str, str]:
    """The beginning and the end of a stream, in so many bytes together. A character is not cut."""
    if not tail and len(head) <= most:
        return head.decode(), ""
    last = most // 2
    first, end = head[: most - last], tail or head[most - last :]
    return first.decode(errors="ignore"), end[max(0, len(end) - last) :].decode(errors="ignore")


def _failure(reason: str) -> list[str]:
    return ["Tool call failure", f"reason: {reason}"]


def _reason(result: ToolResult) -> str:
    used = result.usage
    match result.status:
        case CallStatus.TIMEOUT:
            times = f"{used.wall_s:.1f} s, of which it computed {used.cpu_s:.1f} s"
            return f"timeout: the program was stopped after {times}"
        case CallStatus.MEMORY_LIMIT:
            at_peak = f" at {used.memory_peak_bytes / MIB:,.0f} MiB" if used.memory_peak_bytes else ""
            return f"memory limit: the program took too much memory and was stopped{at_peak}"
        case CallStatus.OUTPUT_LIMIT:
            return (
                f"output limit: the program was stopped after it had printed {_written_bytes(result):,} bytes"
            )
        case CallStatus.SIGNALED:
            return f"the program was ended by signal {_signal_name(result.signal or 0)}"
        case _:
            return f"the program failed with exit code {result.exit_code}"


def _written_bytes(result: ToolResult) -> int:
    """To the stream that was too long."""
    stdout = max(result.stdout_bytes, len(result.stdout.encode()) + len(result.stdout_tail.encode()))
    stderr = max(result.stderr_bytes, len(result.stderr.encode()) + len(result.stderr_tail.encode()))
    return stdout if result.stdout_truncated else stderr


def _signal_name(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:  # one of the real-time signals, which have no name
        return str(number)


def _texts(name: str, arguments: object) -> dict[str, str]:
    """The arguments of a tool. Raises BadToolCall."""
    given = _read(arguments)
    wanted = _ARGUMENTS[name]
    if unknown := [argument for argument in given if argument not in wanted]:
        raise _bad(f"{name} has no argument {_quoted(unknown[0])}; it has {_listed([*wanted])}")
    if "code" not in given:
        raise _bad(f"{name} needs the argument 'code', the program as text")
    for argument, value in given.items():
        if not isinstance(value, str):
            raise _bad(
                f"the argument {argument!r} of {name} must be a text, and is {_KINDS.get(type(value), 'none')}"
            )
        if not _is_text(value):
            raise _bad(
                f"the argument {argument!r} of {name} holds half of a surrogate pair, which is no text"
            )
    return {argument: str(value) for argument, value in given.items()}


_KINDS: Mapping[type, str] = {
    dict: "an object",
    list: "a list",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _read(arguments: object) -> dict[str, JsonValue]:
    try:
        if isinstance(arguments, str | bytes):
            return _OBJECT.validate_json(arguments)
        return _OBJECT.validate_python(arguments, strict=True)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
        what = first["msg"] if first["type"] == "json_invalid" else "they must be one JSON object"
        raise _bad(f"the arguments cannot be read: {what}") from exc


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad(reason: str) -> BadToolCall:
    return BadToolCall("\n".join(_failure(reason)))


def _quoted(name: object) -> str:
    return repr(str(name)[:100].encode(errors="replace").decode())


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
