"""Which interpreter the runtime takes, among fake ones that say of themselves what a test wants."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from sandbox.errors import ConfigError
from sandbox.jail.interpreter import Interpreter, ask_interpreter, choose_interpreter


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host with Python 3.11.7 only, which runs the service."""
    return Host(tmp_path)


class Host:
    """Folders of fake interpreters."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.own = self.add("versions/3.11.7/bin/python3.11", "3.11.7")

    def add(self, place: str, version: str, **said: Any) -> Path:
        """Put a program there that answers every question as that version would."""
        answer = Interpreter(
            version=version, executable=self.root / place, prefix=Path("/"), library_folder="lib", stdlib=Path("/"),
            extensions=[], site=Path("/"), abi="cpython-3-x86_64-linux-gnu", lacks=[],
        ).model_copy(update=said)  # fmt: skip
        return self.put(place, f"echo {shlex.quote(answer.model_dump_json())}")

    def put(self, place: str, script: str) -> Path:
        """Put a shell script there."""
        python = self.root / place
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return python

    def choice(self) -> str:
        """Where the chosen interpreter lies."""
        folders = [str(self.root / "shims"), str(self.root / "bin"), str(self.root / "nowhere")]
        chosen = choose_interpreter(self.own, folders, self.own.parent.parent)
        return str(chosen.executable.relative_to(self.root))


def test_the_services_own_where_there_is_no_other(host: Host) -> None:
    """A bare Debian 12 has 3.11 and nothing else."""
    assert host.choice() == "versions/3.11.7/bin/python3.11"


def test_the_best_on_path(host: Host) -> None:
    """3.13 comes before 3.12, wherever they stand."""
    host.add("bin/python3.12", "3.12.3")
    assert host.choice() == "bin/python3.12"
    host.add("versions/3.13.1/bin/python3.13", "3.13.1")
    assert host.choice() == "versions/3.13.1/bin/python3.13"
    host.add("bin/python3.13", "3.13.0")
    assert host.choice() == "bin/python3.13"


def test_the_newest_beside_ours(host: Host) -> None:
    """Of several 3.13 in one place the newest is taken, by number and not by letter."""
    for version in ("3.13.9", "3.13.10", "3.13.2"):
        host.add(f"versions/{version}/bin/python3.13", version)
    assert host.choice() == "versions/3.13.10/bin/python3.13"


def test_a_command_that_refuses(host: Host) -> None:
    """What does not start, or is not what its name says, is passed over."""
    host.put("shims/python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    host.put("bin/python3.13", 'echo "{}"')
    host.add("shims/python3.12", "3.14.0")
    (host.root / "bin/python3.12").touch()
    assert host.choice() == "versions/3.11.7/bin/python3.11"
    host.add("versions/3.12.1/bin/python3.12", "3.12.1")
    assert host.choice() == "versions/3.12.1/bin/python3.12"


@pytest.mark.parametrize("said", [{"lacks": ["_ctypes"]}, {"abi": "cpython-313t-x86_64-linux-gnu"}])
def test_a_build_that_will_not_do(host: Host, said: dict[str, Any]) -> None:
    """Neither one without a library that programs want, nor one without the global lock."""
    host.add("bin/python3.13", "3.13.0", **said)
    assert host.choice() == "versions/3.11.7/bin/python3.11"


@pytest.mark.parametrize(("version", "chosen"), [("3.13.0", "own"), ("3.12.1", "bin"), ("3.14.0", "bin")])
def test_the_services_own_where_it_is_the_best(host: Host, version: str, chosen: str) -> None:
    """Another one of the same version is no reason to leave ours, and 3.14 is not better than 3.13."""
    host.own = host.add("own/python3", version)
    host.add("bin/python3.13", "3.13.9")
    assert host.choice().split("/")[0] == chosen


def test_what_an_interpreter_says_of_itself() -> None:
    """The one that runs this test is whole, and its parts are where it says."""
    interpreter = ask_interpreter(Path(sys.executable))
    assert interpreter.version == sys.version.split()[0]
    assert (interpreter.stdlib / "json/__init__.py").is_file()
    assert interpreter.executable.is_file()
    assert json.loads(interpreter.model_dump_json())["lacks"] == []


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("exit 0", "it does not answer as one"),
        ("echo Unknown option: -I >&2; echo 'Try `python -h`.' >&2; exit 2", "Try `python -h`."),
        ("kill -9 $$", "it does not answer as one"),
    ],
)
def test_what_is_no_interpreter(host: Host, script: str, words: str) -> None:
    """It is named in one line, with the last that it said itself."""
    python = host.put("bin/python", script)
    with pytest.raises(ConfigError) as caught:
        ask_interpreter(python)
    assert caught.value.message == f"{python} is no Python 3.11 or newer: {words}"


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    """It is named with what the system says."""
    with pytest.raises(
        ConfigError, match=r"no-python is no Python 3\.11 or newer: No such file or directory$"
    ):
        ask_interpreter(tmp_path / "no-python")


def test_an_interpreter_that_is_too_old(host: Host) -> None:
    """It is named with what is needed."""
    with pytest.raises(ConfigError, match=r"is Python 3\.10\.13; the jail needs 3\.11 or newer"):
        ask_interpreter(host.add("bin/python3.10", "3.10.13"))
