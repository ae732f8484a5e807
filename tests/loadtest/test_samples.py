"""The example calls: their headers are read right, and the checker finds each way to miss an expectation."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from loadtest.samples import Expectation, complaints, load_samples, read_sample
from sandbox import CallStatus, Limits, ToolResult, Unavailable

HEADER = "# SHOWS: a thing\n# EXPECT: ok\n"


def result(**fields: object) -> ToolResult:
    """A result that ended `ok` and printed nothing, but for the fields given."""
    return ToolResult.model_validate({"id": "1", "status": "ok", "exit_code": 0} | fields)


def test_all_shipped_examples_are_read() -> None:
    """Every program that ships has a header we can read, and no two show the same thing."""
    samples = load_samples()
    assert len(samples) >= 60
    assert [shows for shows, count in Counter(sample.shows for sample in samples).items() if count > 1] == []


def test_the_shipped_examples_cover_every_verdict() -> None:
    """Each status that is a verdict is the expected one of at least one example."""
    expected = {sample.expected.status for sample in load_samples()}
    assert expected == {status for status in CallStatus if not status.is_fault}


def test_the_whole_header_becomes_the_call() -> None:
    """Stdin, files, limits and echo are given with the call, and the code is sent as it stands in the file."""
    code = (
        HEADER
        + '# STDIN: one\n# STDIN:\n# FILE: a/b.txt = "x\\ny"\n# FILE: c = {"base64": "AAE="}\n'
        + "# LIMITS: wall_s=1.5 processes=7\n# ECHO: yes\n# BOUND: short\n\n# EXIT: a comment\n1\n"
    )
    call = read_sample("a", code).call
    assert call.code == code
    assert call.stdin == "one\n\n"
    assert call.files["a/b.txt"] == "x\ny"
    assert call.files["c"].base64 == b"\x00\x01"
    assert call.limits == Limits(wall_s=1.5, processes=7)
    assert call.echo_last_value


def test_limits_that_are_not_named_stay_the_servers() -> None:
    """A call sends only what its header names, so that the server's defaults hold for the rest."""
    call = read_sample("a", f"{HEADER}# LIMITS: wall_s=1\n").call
    assert call.model_dump(exclude_unset=True)["limits"] == {"wall_s": 1.0}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("# EXPECT: ok", Expectation(CallStatus.OK, exit_code=0)),
        ("# EXPECT: error", Expectation(CallStatus.ERROR, exit_code=1)),
        ("# EXPECT: error\n# EXIT: 3", Expectation(CallStatus.ERROR, exit_code=3)),
        ("# EXPECT: signaled\n# SIGNAL: 11", Expectation(CallStatus.SIGNALED, signal=11)),
        (
            "# EXPECT: timeout\n# STDOUT: a\n# STDOUT:\n# STDOUT:  b",
            Expectation(CallStatus.TIMEOUT, signal=9, stdout="a\n\n b"),
        ),
        (
            "# EXPECT: output_limit\n# STDOUT-BYTES: 9\n# TRUNCATED: stdout",
            Expectation(
                CallStatus.OUTPUT_LIMIT,
                signal=9,
                stdout=None,
                stdout_bytes=9,
                truncated=frozenset({"stdout"}),
            ),
        ),
        (
            "# EXPECT: ok\n# STDERR-HAS: x: y\n# STDERR-HAS: z",
            Expectation(CallStatus.OK, exit_code=0, stderr_has=("x: y", "z")),
        ),
    ],
)
def test_the_header_becomes_the_expectation(lines: str, expected: Expectation) -> None:
    """Status, exit code, signal, output and cut streams are expected as written, the usual code and signal unwritten."""
    assert read_sample("a", f"# SHOWS: a thing\n{lines}\nprint()\n").expected == expected


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("# SHOWS: a thing\n", "lacks EXPECT"),
        ("# EXPECT: ok\n", "lacks SHOWS"),
        (f"{HEADER}# EXPECT: error\n", "line 3 repeats EXPECT"),
        (f"{HEADER}# STDOUTS: 1\n", "line 3 is no header line"),
        (f"{HEADER}# a remark\n", "line 3 is no header line"),
        ("# SHOWS: a thing\n# EXPECT: fine\n", "'fine' is not a valid CallStatus"),
    ],
)
def test_a_wrong_header_is_refused(header: str, complaint: str) -> None:
    """A misspelt, repeated or missing line is an error that names it, and never an expectation less."""
    with pytest.raises(ValueError, match=complaint):
        read_sample("a", header)


def test_a_limit_that_nobody_knows_is_refused() -> None:
    """A misspelt limit in a header is an error."""
    with pytest.raises(ValidationError, match="walls"):
        read_sample("a", f"{HEADER}# LIMITS: walls=1\n")


@pytest.mark.parametrize("stdout", ["7", "7\n"])
def test_a_result_as_expected_gives_no_complaint(stdout: str) -> None:
    """The expected status, code and lines pass, with and without a newline at the end."""
    assert complaints(Expectation(CallStatus.OK, exit_code=0, stdout="7"), result(stdout=stdout)) == []


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"status": "timeout", "exit_code": None}, ["status is timeout, not ok", "exit code is none, not 0"]),
        ({"exit_code": 3}, ["exit code is 3, not 0"]),
        ({"signal": 9}, ["signal is 9, not none"]),
        ({"stdout": "8\n"}, ["stdout is '8\\n', not '7'"]),
        ({"stdout": "7\n\n"}, ["stdout is '7\\n\\n', not '7'"]),
        ({"stdout_truncated": True}, ["cut streams is stdout, not none"]),
        ({"stderr": "careful"}, ["stderr is not empty: 'careful'"]),
    ],
)
def test_each_difference_is_named(fields: dict[str, object], complaint: list[str]) -> None:
    """Each field that is not as expected gives one sentence with both values."""
    expected = Expectation(CallStatus.OK, exit_code=0, stdout="7")
    assert complaints(expected, result(**{"stdout": "7\n"} | fields)) == complaint


def test_missing_text_and_length_are_named() -> None:
    """A text that stderr lacks and a stdout of another length are complaints."""
    expected = Expectation(
        CallStatus.OK, exit_code=0, stdout=None, stdout_bytes=4, stderr_has=("KeyError", "'a'")
    )
    got = result(stdout="é", stderr="KeyError: 'b'")
    assert complaints(expected, got) == [
        "stdout has 2 bytes, not 4",
        "stderr lacks \"'a'\": \"KeyError: 'b'\"",
    ]


def test_no_verdict_is_never_as_expected() -> None:
    """A fault and an exception are complaints that say why, whatever was expected."""
    expected = Expectation(CallStatus.OK, exit_code=0)
    fault = result(status="internal_error", exit_code=None, reason="the jail broke")
    assert complaints(expected, fault) == ["a fault, internal_error: the jail broke"]
    assert complaints(expected, Unavailable("no worker")) == ["no result: Unavailable: no worker"]
