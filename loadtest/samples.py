"""The example calls that ship with the project, each with the outcome it must have.

`programs/` holds one call a file. The leading comment says what it shows and what must come of it, one
`# KEY: value` a line, until the first line that is no comment:

    SHOWS         one sentence; required
    EXPECT        the status; required
    EXIT          the exit code, where it is not the usual one (0 for `ok`, 1 for `error`)
    SIGNAL        the signal that ends the program, where it is not the usual one (9 at a limit, otherwise none)
    STDOUT        one line of stdout, repeated; all of stdout and nothing else, but for a last newline
    STDOUT-BYTES  how long stdout is; alone, it stands for output too long to be written here
    STDERR-HAS    a text that stderr holds, repeated; a program that ends `ok` without any leaves stderr empty
    TRUNCATED     `stdout` or `stderr`, the stream that was cut
    STDIN         one line of stdin, repeated
    FILE          `name = JSON`, a file given with the call, in the call's own form
    LIMITS        `name=value` pairs
    ECHO          `yes`: echo_last_value
    BOUND         how much harm the program can do where the sandbox fails; for the reader

The header is part of the code that is sent, so line numbers in a traceback are those of the file.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from sandbox import Answer, CallStatus, SandboxError, ToolCall, ToolResult

PROGRAMS = Path(__file__).with_name("programs")

_HEADER_LINE = re.compile(r"# (?P<key>[A-Z-]+):(?: (?P<value>.*))?")
_ONCE = {"SHOWS", "EXPECT", "EXIT", "SIGNAL", "STDOUT-BYTES", "TRUNCATED", "LIMITS", "ECHO", "BOUND"}
_REPEATED = {"STDOUT", "STDERR-HAS", "STDIN", "FILE"}
_USUAL_EXIT = {CallStatus.OK: 0, CallStatus.ERROR: 1}
_LIMITS = {CallStatus.TIMEOUT, CallStatus.MEMORY_LIMIT, CallStatus.OUTPUT_LIMIT}
_USUAL_SIGNAL = dict.fromkeys(_LIMITS, 9)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must come of a call."""

    status: CallStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: str | None = ""  # None: only its length is known
    stdout_bytes: int | None = None
    stderr_has: tuple[str, ...] = ()
    truncated: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Sample:
    """One example call."""

    name: str
    shows: str
    call: ToolCall
    expected: Expectation


def load_samples(folder: Path = PROGRAMS) -> list[Sample]:
    """All example calls, by name. Raises ValueError that names the file whose header is wrong."""
    samples = []
    for path in sorted(folder.glob("*.py")):
        try:
            samples.append(read_sample(path.stem, path.read_text(encoding="utf-8")))
        except ValueError as exc:
            raise ValueError(f"{path.name}: {exc}") from exc
    return samples


def read_sample(name: str, code: str) -> Sample:
    """One example call from its text. Raises ValueError when the header is wrong."""
    header = _read_header(code)
    call = {
        "code": code,
        "stdin": "".join(f"{line}\n" for line in header["STDIN"]),
        "files": dict(_read_file(value) for value in header["FILE"]),
        "limits": dict(pair.split("=", 1) for value in header["LIMITS"] for pair in value.split()),
        "echo_last_value": header["ECHO"] == ["yes"],
    }
    return Sample(name, header["SHOWS"][0], ToolCall.model_validate(call), _read_expectation(header))


def complaints(expected: Expectation, outcome: Answer) -> list[str]:
    """What is not as expected, one short sentence each; empty when all is."""
    if isinstance(outcome, SandboxError):
        return [f"no result: {type(outcome).__name__}: {outcome}"]
    if outcome.status.is_fault:
        return [f"a fault, {outcome.status.value}: {outcome.reason}"]
    found = []
    for word, want, got in (
        ("status", expected.status.value, outcome.status.value),
        ("exit code", expected.exit_code, outcome.exit_code),
        ("signal", expected.signal, outcome.signal),
        ("cut streams", expected.truncated, _cut_streams(outcome)),
    ):
        if want != got:
            found.append(f"{word} is {_shown(got)}, not {_shown(want)}")
    if expected.stdout is not None and outcome.stdout not in {expected.stdout, f"{expected.stdout}\n"}:
        found.append(f"stdout is {_excerpt(outcome.stdout)}, not {_excerpt(expected.stdout)}")
    if expected.stdout_bytes not in {None, size := len(outcome.stdout.encode())}:
        found.append(f"stdout has {size} bytes, not {expected.stdout_bytes}")
    missing = [text for text in expected.stderr_has if text not in outcome.stderr]
    found += [f"stderr lacks {text!r}: {_excerpt(outcome.stderr)}" for text in missing]
    if expected.status is CallStatus.OK and not expected.stderr_has and outcome.stderr:
        found.append(f"stderr is not empty: {_excerpt(outcome.stderr)}")
    return found


def _read_header(code: str) -> defaultdict[str, list[str]]:
    header: defaultdict[str, list[str]] = defaultdict(list)
    for number, line in enumerate(code.splitlines(), start=1):
        if not line.startswith("#"):
            break
        match = _HEADER_LINE.fullmatch(line)
        if match is None or match["key"] not in _ONCE | _REPEATED:
            raise ValueError(f"line {number} is no header line that we know: {line!r}")
        if match["key"] in _ONCE and match["key"] in header:
            raise ValueError(f"line {number} repeats {match['key']}")
        header[match["key"]].append(match["value"] or "")
    for key in ("SHOWS", "EXPECT"):
        if key not in header:
            raise ValueError(f"the header lacks {key}")
    return header


def _read_file(value: str) -> tuple[str, str | dict[str, str]]:
    name, _, content = value.partition(" = ")
    return name, json.loads(content)


def _read_expectation(header: defaultdict[str, list[str]]) -> Expectation:
    status = CallStatus(header["EXPECT"][0])
    only_length = header["STDOUT-BYTES"] and not header["STDOUT"]
    return Expectation(
        status=status,
        exit_code=_number(header["EXIT"], _USUAL_EXIT.get(status)),
        signal=_number(header["SIGNAL"], _USUAL_SIGNAL.get(status)),
        stdout=None if only_length else "\n".join(header["STDOUT"]),
        stdout_bytes=_number(header["STDOUT-BYTES"], None),
        stderr_has=tuple(header["STDERR-HAS"]),
        truncated=frozenset(header["TRUNCATED"]),
    )


def _number(values: list[str], otherwise: int | None) -> int | None:
    return int(values[0]) if values else otherwise


def _cut_streams(result: ToolResult) -> frozenset[str]:
    flags = {"stdout": result.stdout_truncated, "stderr": result.stderr_truncated}
    return frozenset(name for name, cut in flags.items() if cut)


def _shown(value: object) -> str:
    if isinstance(value, frozenset):
        return " and ".join(sorted(value)) or "none"
    return "none" if value is None else str(value)


def _excerpt(text: str, length: int = 160) -> str:
    return repr(text) if len(text) <= length else f"{text[:length]!r}… ({len(text)} characters)"
