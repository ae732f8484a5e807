"""The contract: calls, results, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from sandbox import Base64File, CallStatus, InvalidCall, Limits, ToolCall, ToolResult, Usage
from sandbox.calls import parse_call

MODELS = [Limits, Usage, Base64File, ToolCall, ToolResult]


def test_only_code_is_required() -> None:
    """Everything else has a default, and the id is new for each call."""
    first, second = ToolCall(code="1"), parse_call(b'{"code": "1"}')
    assert first.id != second.id
    assert first == second.model_copy(update={"id": first.id})


@pytest.mark.parametrize("model", MODELS)
def test_models_are_frozen_and_refuse_unknown_fields(model: type[BaseModel]) -> None:
    """A misspelt field is an error and never a default, and nobody changes a call on its way."""
    assert model.model_config["frozen"]
    assert model.model_config["extra"] == "forbid"


def test_faults_are_told_from_verdicts() -> None:
    """Exactly two statuses say nothing about the program."""
    assert {status.value for status in CallStatus if status.is_fault} == {"queue_timeout", "internal_error"}
    assert {status.value for status in CallStatus if not status.is_fault} == {
        "ok", "error", "signaled", "timeout", "memory_limit", "output_limit",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "body: Invalid JSON"),
        (b"[]", "body: Input should be an object"),
        (b"{}", "code: Field required"),
        (b'{"code": 1}', "code: Input should be a valid string"),
        (b'{"code": "1", "stdn": ""}', "stdn: Extra inputs are not permitted"),
        (b'{"coed": "1"}', "coed: Extra inputs are not permitted"),
        (b'{"code": "1", "limits": {"wall": 1}}', "limits.wall: Extra inputs"),
        (b'{"code": "1", "limits": {"wall_s": 0}}', "limits.wall_s: Input should be greater than 0"),
        (b'{"code": "1", "limits": {"wall_s": NaN}}', "limits.wall_s: "),
        (b'{"code": "1", "limits": {"memory_bytes": 1}}', "limits.memory_bytes: "),
        (b'{"code": "1", "deadline_s": -1}', "deadline_s: "),
        (b'{"code": "1", "priority": "urgent"}', "priority: "),
        (b'{"code": "1", "id": "a b"}', "id: "),
        (b'{"code": "1", "id": "a\\n"}', "id: "),
        (b'{"code": "1", "id": ""}', "id: "),
        (b'{"code": "1", "files": {"a": {"base64": "aGk!="}}}', "files.a"),
        (b'{"code": "1", "files": {"a": {"base64": "aGk"}}}', "files.a"),
        (b'{"code": "\\ud800"}', "body: Invalid JSON"),
        ({"code": "\ud800"}, "code: "),
        ({"code": "1", "stdin": "\udfff"}, "stdin: "),
    ],
)
def test_a_bad_call_is_refused_with_the_field_named(raw: bytes | dict[str, object], words: str) -> None:
    """The message starts with the path of the first wrong field."""
    with pytest.raises(InvalidCall) as caught:
        parse_call(raw)  # type: ignore[arg-type]
    assert caught.value.message.startswith(words)


def test_a_refusal_quotes_no_value() -> None:
    """What a program says stays out of messages and logs."""
    with pytest.raises(InvalidCall) as caught:
        parse_call({"code": "1", "priority": "the secret"})
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../a", "a/../b", "a//b", "./a", "a/", "a\0b", "x" * 256]
)
def test_file_names_that_leave_the_working_directory_are_refused(name: str) -> None:
    """Absolute paths, '..', empty parts, zero bytes and names that no file system takes."""
    with pytest.raises(ValidationError):
        ToolCall(code="1", files={name: ""})


@pytest.mark.parametrize(
    "files", [{"a": "", "a/b": ""}, {"a/b/c": "", "a": ""}, {"main.py/x": ""}, {"main.py": ""}]
)
def test_files_that_cannot_lie_side_by_side_are_refused(files: dict[str, str]) -> None:
    """No name is a file and a folder, and none takes the program's own place."""
    with pytest.raises(InvalidCall, match="files"):
        parse_call({"code": "1", "files": files})


def test_files_may_be_text_or_bytes() -> None:
    """A file that is not text travels as base64 and arrives as its bytes."""
    call = parse_call(b'{"code": "1", "files": {"data/a.txt": "text", "b": {"base64": "/w\\nA="}}}')
    assert call.files["data/a.txt"] == "text"
    b = parse_call(call.model_dump_json()).files["b"]
    assert isinstance(b, Base64File)
    assert b.base64 == b"\xff\x00"


text = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    code=text,
    stdin=text,
    files=st.dictionaries(st.from_regex(r"([A-Z]{1,9}/)?[a-z]{1,9}", fullmatch=True), text, max_size=3),
    wall_s=st.floats(0.001, 86_400),
)
def test_a_call_survives_json(code: str, stdin: str, files: dict[str, str], wall_s: float) -> None:
    """What is written is read again as the same call, whatever text it holds."""
    call = ToolCall(code=code, stdin=stdin, files=dict(files), limits=Limits(wall_s=wall_s))
    assert parse_call(call.model_dump_json()) == call
    assert parse_call(json.loads(call.model_dump_json())) == call


@given(stdout=text, status=st.sampled_from(CallStatus), wall_s=st.floats(0, 1e6))
def test_a_result_survives_json(stdout: str, status: CallStatus, wall_s: float) -> None:
    """What a worker writes is what a client reads."""
    result = ToolResult(id="a", status=status, stdout=stdout, usage=Usage(wall_s=wall_s))
    assert ToolResult.model_validate_json(result.model_dump_json()) == result
