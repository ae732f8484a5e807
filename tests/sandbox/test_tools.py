"""What a model is told of its tools, what its calls become, and what it sees."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.calls import CallStatus, Limits, ToolCall, ToolResult, Usage
from sandbox.errors import BadToolCall, InternalError, InvalidCall, QueueTimeout
from sandbox.tools import TOOLS, render, schemas, shown, to_call

CODE = {"code": "print(1)"}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("python_code_with_standard_io", ["code", "input"]),
        ("execute_python_code_with_standard_io", ["code", "input"]),
        ("jupyter_code", ["code"]),
        ("python", ["code"]),
    ],
)
def test_a_schema_is_what_an_openai_request_takes(name: str, arguments: list[str]) -> None:
    """A schema names the tool, and each argument as a text that is required."""
    [schema] = schemas(name)
    assert schema["type"] == "function"
    function: Any = schema["function"]
    assert function.keys() == {"name", "description", "parameters"}
    assert function["name"] == name
    parameters = function["parameters"]
    assert parameters.keys() == {"type", "properties", "required", "additionalProperties"}
    assert (parameters["type"], parameters["additionalProperties"]) == ("object", False)
    assert [*parameters["properties"]] == parameters["required"] == arguments
    for argument in parameters["properties"].values():
        assert argument.keys() == {"type", "description"}
        assert argument["type"] == "string"


def test_schemas_are_new_each_time() -> None:
    """A caller may change a schema, and the next caller gets it as it was."""
    [mine] = schemas("python")
    mine.clear()
    assert schemas("python") != [mine]
    assert json.loads(json.dumps(schemas())) == schemas(*TOOLS)


@pytest.mark.parametrize(
    ("name", "arguments", "stdin"),
    [
        ("python_code_with_standard_io", {**CODE, "input": "3\n"}, "3\n"),
        ("execute_python_code_with_standard_io", {**CODE, "input": ""}, ""),
        ("python_code_with_standard_io", CODE, ""),
        ("jupyter_code", CODE, ""),
        ("python", CODE, ""),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_call_is_what_the_model_asked_for(
    name: str, arguments: dict[str, str], stdin: str, as_json: bool
) -> None:
    """Code and input go where the program finds them, from an object as from its JSON; the last value is shown."""
    limits = Limits(wall_s=3)
    call = to_call(name, json.dumps(arguments) if as_json else arguments, id="a", limits=limits)
    assert call == ToolCall(id="a", code="print(1)", stdin=stdin, limits=limits, echo_last_value=True)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("pyhton", CODE, f"there is no tool named 'pyhton'; there is {', '.join(TOOLS)}"),
        ("python", '{"code": "1"', "the arguments cannot be read: Invalid JSON: EOF while parsing an object"),
        ("python", "print(1)", "the arguments cannot be read: Invalid JSON: expected value"),
        ("python", '"print(1)"', "the arguments cannot be read: they must be one JSON object"),
        ("python", None, "the arguments cannot be read: they must be one JSON object"),
        ("python", {}, "python needs the argument 'code', the program as text"),
        ("python", {"cod": "1"}, "python has no argument 'cod'; it has code"),
        ("python", {**CODE, "input": ""}, "python has no argument 'input'; it has code"),
        ("python", {"code": 1}, "the argument 'code' of python must be a text, and is a number"),
        ("python", {"code": None}, "the argument 'code' of python must be a text, and is null"),
        ("python", {"code": ["1"]}, "the argument 'code' of python must be a text, and is a list"),
        ("python", {"code": "\ud800"}, "the argument 'code' of python holds half of a surrogate pair"),
    ],
)
def test_a_bad_call_says_what_to_do_better(name: str, arguments: object, reason: str) -> None:
    """What is wrong is said in one sentence, in the form of a tool's answer."""
    with pytest.raises(BadToolCall) as caught:
        to_call(name, arguments)
    assert str(caught.value).startswith(f"Tool call failure\nreason: {reason}")


def test_a_tool_that_was_not_offered_is_none() -> None:
    """A model is not told of tools that it does not have."""
    with pytest.raises(BadToolCall, match=r"no tool named 'python'; there is jupyter_code$"):
        to_call("python", CODE, offered=["jupyter_code"])


def test_a_field_of_the_call_is_no_mistake_of_the_model() -> None:
    """Who passes a wrong limit gets another error than a model's."""
    with pytest.raises(InvalidCall) as caught:
        to_call("python", CODE, deadline_s=-1)
    assert not isinstance(caught.value, BadToolCall)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_LIKELY = st.dictionaries(st.sampled_from(["code", "input", "Code", ""]), _JSON | st.text(), max_size=3)


@given(
    name=st.sampled_from(TOOLS) | st.text() | _JSON,
    arguments=_JSON | _LIKELY | st.text() | st.binary() | _LIKELY.map(json.dumps),
)
def test_nothing_that_a_model_writes_is_a_crash(name: Any, arguments: object) -> None:
    """Whatever a model writes is a call that can be sent, or one error whose text can be shown to it."""
    outcome = _call_or_text(name, arguments)
    if isinstance(outcome, ToolCall):
        assert ToolCall.model_validate_json(outcome.model_dump_json()) == outcome
    else:
        assert outcome.encode().startswith(b"Tool call failure\nreason: ")


def _call_or_text(name: Any, arguments: object) -> ToolCall | str:
    try:
        return to_call(name, arguments)
    except BadToolCall as exc:
        return exc.message


@pytest.mark.parametrize(
    "arguments", ["[" * 100_000, '{"code": ' + "1" * 10_000 + "}", '{"code": "\\ud800"}']
)
def test_hard_json_is_a_bad_call(arguments: str) -> None:
    """Nesting without end, a number of many digits and half a surrogate pair are mistakes like others."""
    with pytest.raises(BadToolCall):
        to_call("python", arguments)


def _result(status: CallStatus = CallStatus.OK, **fields: Any) -> ToolResult:
    usage = Usage(wall_s=1.234, cpu_s=0.5, memory_peak_bytes=512 << 20)
    return ToolResult.model_validate({"id": "a", "status": status, "usage": usage, **fields})


_NOTE = "note: nothing was printed; print() what you want to see"
_TOO_LONG = "reason: timeout: the program was stopped after 1.2 s, of which it computed 0.5 s"
_TOO_LARGE = "reason: memory limit: the program took too much memory and was stopped at 512 MiB"
_TOO_MUCH = "reason: output limit: the program was stopped after it had printed 4 bytes"


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (_result(stdout="3\n"), ["stdout: 3"]),
        (_result(stdout="3\n4", stderr="hm\n"), ["stdout: 3\n4", "stderr: hm"]),
        (_result(), [_NOTE]),
        (
            _result(CallStatus.ERROR, exit_code=3, stderr="no\n"),
            ["reason: the program failed with exit code 3", "stderr: no"],
        ),
        (_result(CallStatus.SIGNALED, signal=11), ["reason: the program was ended by signal 11 (SIGSEGV)"]),
        (_result(CallStatus.SIGNALED, signal=40), ["reason: the program was ended by signal 40"]),
        (_result(CallStatus.TIMEOUT, stdout="so far"), [_TOO_LONG, "stdout: so far"]),
        (_result(CallStatus.MEMORY_LIMIT), [_TOO_LARGE]),
        (
            _result(CallStatus.OUTPUT_LIMIT, stdout="1234", stdout_truncated=True),
            [_TOO_MUCH, "stdout: 1234"],
        ),
        (
            _result(CallStatus.OUTPUT_LIMIT, stdout="1", stderr="1234", stderr_truncated=True),
            [_TOO_MUCH, "stdout: 1", "stderr: 1234"],
        ),
    ],
    ids=lambda value: value.status if isinstance(value, ToolResult) else "",
)
def test_the_model_sees_what_came_of_it(result: ToolResult, lines: list[str]) -> None:
    """Verdicts are told in the words of rStar2's code, and a limit by its name and its number."""
    first = "Tool call success" if result.status is CallStatus.OK else "Tool call failure"
    assert render(result).split("\n") == "\n".join([first, *lines, "execution time: 1.23s"]).split("\n")


@pytest.mark.parametrize(
    ("status", "error"),
    [(CallStatus.QUEUE_TIMEOUT, QueueTimeout), (CallStatus.INTERNAL_ERROR, InternalError)],
)
def test_a_fault_is_nothing_that_a_model_sees(status: CallStatus, error: type[Exception]) -> None:
    """A failure of the service is an error of the caller's, who asks again or leaves the rollout out."""
    with pytest.raises(error):
        render(_result(status))


@pytest.mark.parametrize(
    ("head", "tail", "written", "most", "text"),
    [
        ("abc\n", "", 0, 4, "abc"),
        ("abcdefgh", "", 0, 4, "ab\n… 4 of 8 bytes left out …\ngh"),
        ("ab", "yz", 20_000, 100, "ab\n… 19,996 of 20,000 bytes left out …\nyz"),
        ("ab", "yz", 4, 100, "abyz"),
        ("abcd", "wxyz", 5000, 4, "ab\n… 4,996 of 5,000 bytes left out …\nyz"),
        ("abc", "", 10, 4, "abc\n… 7 of 10 bytes left out …"),
        ("é" * 4, "", 0, 5, "é\n… 4 of 8 bytes left out …\né"),
        ("abc", "", 0, 0, "… 3 of 3 bytes left out …"),
    ],
)
def test_a_long_stream_keeps_its_ends(head: str, tail: str, written: int, most: int, text: str) -> None:
    """What does not fit is left out of the middle, counted in bytes, and no character is torn."""
    assert shown(head, tail, written, most) == text


@given(st.text(), st.integers(min_value=0, max_value=40))
def test_what_is_shown_fits(text: str, most: int) -> None:
    """Head and tail are pieces of the text, with no more bytes than were asked for."""
    seen = shown(text, "", 0, most)
    if len(text.encode()) > most:
        first, _, rest = seen.partition("… ")
        last = rest.partition(" left out …")[2]
        assert len(first.encode()) + len(last.encode()) <= most + 2  # and two line ends
    else:
        assert seen == text.removesuffix("\n")
