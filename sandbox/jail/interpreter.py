"""The interpreter that programs get: which one of the host's, and how it describes itself.

From 3.12 on an object can be immortal: its count of references is never written, so a child that only looks at what
the forkserver has warm copies no page of it. Calls are cheaper then, so the runtime prefers such a version over the one
that runs the service.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from sandbox.errors import ConfigError

#: Minor versions of Python 3 that the runtime prefers, the best first. Not 3.14, where multiprocessing by default
#: starts its processes through a server behind a socket, and the jail has no sockets.
PREFERRED = (13, 12)

#: Left out where an interpreter was built on a host without the libraries behind them. The forkserver needs the first.
_OFTEN_MISSING = ("_ctypes", "_bz2", "_lzma", "_sqlite3", "_ssl", "zlib")

_PROBE = f"""
import importlib.util, json, os, platform, site, sys, sysconfig
print(json.dumps({{
    "version": platform.python_version(),
    "executable": os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable),
    "prefix": os.path.realpath(sys.base_prefix),
    "library_folder": sys.platlibdir,
    "stdlib": os.path.dirname(os.__file__),
    "extensions": [p for p in sys.path if os.path.basename(p) == "lib-dynload" and os.path.isdir(p)],
    "site": site.getsitepackages(["/python"])[0],
    "abi": sysconfig.get_config_var("SOABI") or "",
    "lacks": [name for name in {_OFTEN_MISSING} if not importlib.util.find_spec(name)],
}}))
"""


class Interpreter(BaseModel):
    """An interpreter of the host, as it describes itself; of a virtual environment, the one below it."""

    model_config = ConfigDict(frozen=True)

    version: str
    executable: Path
    prefix: Path
    library_folder: str  # "lib", or "lib64" where the interpreter was built so
    stdlib: Path
    extensions: list[Path]
    site: Path  # where it will look for .pth files once it is /python; Debian's differs from all others
    abi: str
    lacks: list[str]  # of what is often missing

    @property
    def short_version(self) -> str:
        return ".".join(self.version.split(".")[:2])

    @property
    def is_preferred(self) -> bool:
        """True for a version in which a call is cheap; not for a build without the global lock."""
        return is_preferred(self.version) and not re.match(r"cpython-\d+t", self.abi)


def is_preferred(version: str) -> bool:
    """True for a version of Python in which a call is cheap."""
    return version.split(".")[:2] in [["3", str(minor)] for minor in PREFERRED]


def ask_interpreter(python: Path) -> Interpreter:
    """Start `python` and let it say where its parts lie. Raises ConfigError when it cannot or is too old."""
    try:
        # -I and -S: neither the user's settings nor installed packages have a say in the answer.
        command = [str(python), "-I", "-S", "-c", _PROBE]
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        interpreter = Interpreter.model_validate_json(answer.stdout)
    except OSError as exc:
        raise ConfigError(f"{python} is no Python 3.11 or newer: {exc.strerror}") from exc
    except ValidationError as exc:
        said = answer.stderr.strip().splitlines() or ["it does not answer as one"]
        raise ConfigError(f"{python} is no Python 3.11 or newer: {said[-1]}") from exc
    if tuple(map(int, interpreter.short_version.split("."))) < (3, 11):
        raise ConfigError(f"{python} is Python {interpreter.version}; the jail needs 3.11 or newer")
    return interpreter


def choose_interpreter(
    own: Path = Path(sys.executable),
    folders: Iterable[str] | None = None,
    prefix: Path = Path(sys.base_prefix),
) -> Interpreter:
    """The preferred interpreter of this host, or our `own` where there is none.

    Looked for in `folders` (default: PATH) and in the versions that lie beside ours, below the folder of `prefix`,
    as pyenv and uv lay them out.
    """
    ours = ask_interpreter(own)
    folders = os.get_exec_path() if folders is None else folders
    for minor in PREFERRED:
        if ours.short_version == f"3.{minor}" and ours.is_preferred:
            return ours
        for python in _candidates(minor, folders, prefix):
            try:
                found = ask_interpreter(python)
            except ConfigError:  # pyenv has commands for all its versions on PATH, and most refuse to start
                continue
            if found.short_version == f"3.{minor}" and found.is_preferred and not found.lacks:
                return found
    return ours


def _candidates(minor: int, folders: Iterable[str], prefix: Path) -> Iterator[Path]:
    beside = sorted(prefix.parent.glob(f"*3.{minor}.*"), key=_numbers, reverse=True)
    for folder in [*map(Path, folders), *(version / "bin" for version in beside)]:
        python = folder / f"python3.{minor}"
        if os.access(python, os.X_OK):
            yield python


def _numbers(folder: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", folder.name)]
