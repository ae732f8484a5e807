"""Traces: plans in files, and records of calls that are plans again."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from loadtest.load import Arrivals, loads
from loadtest.openloop import Planned, Sent
from loadtest.trace import read_trace, to_line
from loadtest.workloads import KINDS, load_workload
from sandbox import ConfigError, InvalidCall


def read(path: Path, text: str) -> list[Planned]:
    """The plan that this text is, with `mixed` where it names no kind."""
    path.write_text(text)
    return read_trace(path, KINDS, load_workload("sympy").draw(random.Random(1)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where a test may write a trace."""
    return tmp_path / "trace.jsonl"


def test_a_trace_has_kinds_programs_and_times_alone(file: Path) -> None:
    """A line names a kind, brings a program, or leaves it to the workload; lines are put in order."""
    planned = read(
        file,
        '{"at_s": 2, "code": "1", "stdin": "x"}\n{"at_s": 0.5, "kind": "numpy"}\n\n{"at_s": 1}\n',
    )

    assert [(plan.at_s, plan.kind.name) for plan in planned] == [
        (0.5, "numpy"),
        (1, "sympy"),
        (2, "trace.jsonl:1"),
    ]
    assert planned[2].kind.call().stdin == "x"
    assert planned[2].kind.status is None


def test_what_a_bench_writes_is_the_plan_that_it_had(file: Path) -> None:
    """The record of calls is read back as their kinds and times, whatever came of them."""
    plan = loads(Arrivals("poisson", rates=(50,), seconds=2), load_workload("mixed"), seed=3)[0].planned
    sent = [
        Sent(p.kind.name, p.at_s, 0.001, 0.25, "refused", is_right=False, why="no")
        if n % 2
        else Sent(p.kind.name, p.at_s, 0.001, 0.25, "ok", is_right=True, cpu_s=0.1, wall_s=0.2, queue_s=0.3)
        for n, p in enumerate(plan)
    ]

    again = read(file, "".join(to_line(call, 0.0) for call in sent))

    assert again == list(plan)


def test_a_later_run_is_written_behind_the_earlier_one(file: Path) -> None:
    """A sweep is one trace: each run's calls are where they were, after the first run's start."""
    sent = Sent("print", 0.5, 0.0, 0.1, "ok", is_right=True)

    [first, second] = read(file, to_line(sent, 0.0) + to_line(sent, 10.0))

    assert (first.at_s, second.at_s) == (0.5, 10.5)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{}", "at_s"),
        ('{"at_s": -1}', "at_s"),
        ('{"at_s": NaN}', ""),
        ('{"at_s": 1e300}', "at_s"),
        ('{"at_s": "soon"}', "at_s"),
        ('{"at_s": 1, "kind": "no such"}', "no kind 'no such'"),
        ('{"at_s": 1, "code": "1", "stdinn": "x"}', "stdinn"),
        ('{"at_s": 1, "cod": "1"}', "cod"),
        ('{"at_s": 1, "code": "1", "limits": {"wall_s": -1}}', "limits.wall_s"),
        ("[1]", "no object"),
        ("{", ""),
    ],
)
def test_a_line_that_is_wrong_is_named(file: Path, line: str, complaint: str) -> None:
    """Nothing of a trace is skipped or guessed: the error has the line's number and what it breaks."""
    with pytest.raises(InvalidCall, match=rf"trace\.jsonl:2: .*{complaint}"):
        read(file, f'{{"at_s": 0}}\n{line}\n')


def test_a_trace_without_calls_or_file_is_refused(file: Path) -> None:
    """There is nothing to send."""
    with pytest.raises(ConfigError, match="no call"):
        read(file, "\n")
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(file.with_name("none"), KINDS, iter([]))


def test_a_trace_may_name_the_kinds_of_a_workload_of_ones_own(tmp_path: Path) -> None:
    """What was sent from a file of calls is sent again when that file is the workload."""
    calls, trace = tmp_path / "calls.jsonl", tmp_path / "trace.jsonl"
    calls.write_text('{"code": "1"}\n{"code": "2"}\n')
    trace.write_text('{"at_s": 0, "kind": "calls.jsonl:2"}\n')

    [load] = loads(Arrivals("trace", trace=trace), load_workload(str(calls)), seed=1)

    assert [plan.kind.code for plan in load.planned] == ["2"]
    assert load.seconds > 0


def test_a_files_name_need_not_be_text(tmp_path: Path) -> None:
    """What was measured could else not be written."""
    file = tmp_path / os.fsdecode(b"\xff.jsonl")
    file.write_text('{"at_s": 0, "code": "1"}\n')
    calls = tmp_path / os.fsdecode(b"\xfe.jsonl")
    calls.write_text('{"code": "1"}\n')
    workload = load_workload(str(calls))

    [load] = loads(Arrivals("trace", trace=file), workload, seed=1)

    for name in (load.words, workload.name, workload.kinds[0].name):
        name.encode()
