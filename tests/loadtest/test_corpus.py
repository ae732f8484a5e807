"""Recorded programs: how a corpus is read, and when an output agrees with the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.corpus import Agreement, Recorded, compare, read_corpus
from sandbox import ConfigError, ToolResult, Unavailable

LINE = '{"id": "a", "code": "print(1)", "stdout": "1", "answer": "1"}\n'


def test_fields_that_we_do_not_know_are_left_alone(tmp_path: Path) -> None:
    """A corpus may say more of a program than we use."""
    (tmp_path / "c.jsonl").write_text(LINE * 3)
    assert read_corpus(tmp_path / "c.jsonl", first=2) == [Recorded(id="a", code="print(1)", stdout="1")] * 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(f'{LINE}{{"id": "b"}}\n', r"c\.jsonl:2 is no program .*: code: "), (None, "cannot read the corpus")],
)
def test_a_corpus_that_cannot_be_read_is_named(tmp_path: Path, content: str | None, complaint: str) -> None:
    """A wrong line is named by file and number; a missing file is an error."""
    if content is not None:
        (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_corpus(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("ours", "theirs", "agreement"),
    [
        ("18\n", "18", Agreement.EXACT),
        ("a b\n", "a b", Agreement.EXACT),
        ("18\n\n", "18", Agreement.NUMERIC),
        ("18.0\n", "18", Agreement.NUMERIC),
        ("x = 0.30000000000000004\n", "x = 0.3", Agreement.NUMERIC),
        ("19\n", "18", Agreement.NONE),
        ("18 19\n", "18", Agreement.NONE),
        ("yes\n", "no", Agreement.NONE),
        ("", "SyntaxError: invalid syntax", Agreement.NONE),
    ],
)
def test_outputs_are_compared(ours: str, theirs: str, agreement: Agreement) -> None:
    """Equal text but for one last newline is exact; equal numbers in another spelling are told apart from it."""
    outcome = ToolResult.model_validate({"id": "1", "status": "ok", "exit_code": 0, "stdout": ours})
    assert compare(Recorded(id="a", code="", stdout=theirs), outcome) is agreement


def test_no_result_never_agrees() -> None:
    """A call that got no result does not agree with a record of no output."""
    assert compare(Recorded(id="a", code="", stdout=""), Unavailable("no worker")) is Agreement.NONE
