"""The Makefile's set-up: what is missing is named in one sentence, and a path may hold a space."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
PYTHON = "exec " + shlex.quote(sys.executable)  # a fake command that is the real interpreter


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the Makefile needs, without an environment, below a folder with a space in its name."""
    if shutil.which("make") is None:
        pytest.fail("make is missing (Debian: apt install make)")
    folder = tmp_path / "a check out"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(PROJECT / name, folder)
    return folder


def make(checkout: Path, *arguments: str, commands: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run make where only these commands exist; each is a line of shell that sees the arguments as "$@"."""
    fakes = checkout.parent / "bin"
    fakes.mkdir()
    for name, line in commands.items():
        (fakes / name).write_text(f"#!/bin/sh\n{line}\n")
        (fakes / name).chmod(0o755)
    program = shutil.which("make")
    assert program is not None
    return subprocess.run(
        [program, *arguments],
        cwd=checkout,
        env={"PATH": str(fakes)},
        capture_output=True,
        text=True,
        check=False,
    )


WORKING = {"uname": "echo Linux", "python3": f'{PYTHON} "$@"', "cc": "exit 0"}


@pytest.mark.parametrize(
    ("commands", "sentence"),
    [
        ({"uname": "echo Darwin"}, "RoC Sandbox needs Linux: its jail is made of Linux namespaces."),
        ({"python3": "exit 127"}, "Python 3.11 or newer is missing (Debian: apt install python3)."),
        (
            {"python3": f'case "$2" in *ensurepip*) exit 1;; esac; {PYTHON} "$@"'},
            "The venv module of python3 is missing (Debian: apt install python3-venv).",
        ),
        (
            {"cc": "exit 1"},
            "A C compiler with the C library headers is missing (Debian: apt install gcc libc6-dev).",
        ),
    ],
)
@pytest.mark.parametrize("target", ["demo", "test", "up", "bench", "locust", "soak", "check", "fmt"])
def test_what_is_missing_is_named(
    checkout: Path, target: str, commands: dict[str, str], sentence: str
) -> None:
    """Each target ends at the first thing that the host lacks, says which and how to get it, and makes nothing."""
    done = make(checkout, target, commands=WORKING | commands)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0] == sentence
    assert done.stdout == ""
    assert not (checkout / ".venv").exists()


def test_an_interpreter_that_is_too_old_is_refused(checkout: Path) -> None:
    """PYTHON=… is checked like the one we find."""
    done = make(checkout, "check", "PYTHON=oldpython", commands=WORKING | {"oldpython": "exit 1"})
    assert (
        done.stderr.splitlines()[0] == "oldpython is no Python 3.11 or newer (Debian: apt install python3)."
    )


def test_a_newer_interpreter_under_its_own_name_is_found(checkout: Path) -> None:
    """A host whose python3 is too old uses the python3.12 beside it."""
    commands = WORKING | {"python3": "exit 1", "python3.12": f'{PYTHON} "$@"'}
    done = make(checkout, "-n", "check", commands=commands)
    assert '"python3.12" -m venv' in done.stdout


@pytest.mark.parametrize("target", ["demo", "test", "up", "bench", "locust", "check", "fmt", "clean"])
def test_no_recipe_holds_the_path_of_the_checkout(checkout: Path, target: str) -> None:
    """All paths in the recipes are relative, so that a space in the checkout's path cannot split one."""
    done = make(checkout, "-n", target, commands=WORKING)
    assert done.returncode == 0, done.stderr
    assert str(checkout) not in done.stdout


def test_help_names_every_target_for_people(checkout: Path) -> None:
    """`make` alone lists the targets, one a line."""
    done = make(checkout, commands={name: f'exec {shutil.which(name)} "$@"' for name in ("sed",)})
    assert done.returncode == 0, done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines()] == [
        "demo", "test", "native", "up", "bench", "locust", "soak", "chaos", "integrations", "check", "fmt", "clean",
        "help",
    ]  # fmt: skip
