"""The table of costs, short and for real: every figure is there and is one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from loadtest.costs import _CODES, _LAYERS
from sandbox.jail.cgroups import find_place

FIGURE = r"-?\d+(?:\.\d+)?"


@pytest.mark.parametrize(
    ("option", "set_to", "words"),
    [
        ("foo", "strict", "level: Input should be 'process', 'namespaces' or 'strict'"),
        ("", "nope", "setting jail.level (SANDBOX_JAIL__LEVEL): Input should be"),
        ("process", "strict", "which the level process does without; give --level namespaces or strict"),
    ],
)
def test_a_wrong_level_is_one_sentence(
    option: str, set_to: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was said."""
    monkeypatch.setenv("SANDBOX_JAIL__LEVEL", set_to)
    command = [sys.executable, "-m", "loadtest.costs", "--level", option]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    said = " ".join((ended.stdout + ended.stderr).split())
    assert words in said
    assert "Traceback" not in said
    assert "https:" not in said


@pytest.mark.skipif(find_place().kind == "none", reason="the program's share comes from its cgroup")
def test_costs_of_every_forkserver_and_layer() -> None:
    """Each forkserver and each layer has its row, and a fresh nsjail costs more than a call."""
    command = [sys.executable, "-m", "loadtest.costs", "--calls", "3"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [re.split(r"\s{2,}", line.strip()) for line in ended.stdout.splitlines()]
    by_name = {tuple(row[:2]): row[2:] for row in rows if len(row) == 11}
    for preload, codes in _CODES.items():
        for name in codes:
            *figures, cores = by_name[preload, name]
            assert all(re.fullmatch(FIGURE, figure) for figure in [*figures, cores])
            program, server, worker, total, bare, _walls, nsjail, _times = map(float, figures)
            assert total == pytest.approx(program + server + worker, abs=0.02)
            assert min(program, server, worker, bare) > 0
            assert nsjail > bare
    layers = {row[0]: row[1:] for row in rows if len(row) == 4}
    expected = [label for name, label in _LAYERS.items() if label and name != "user namespace"]
    assert [label for label in layers if label in expected] == expected
    assert all(re.fullmatch(FIGURE, figure) for label in expected for figure in layers[label])
