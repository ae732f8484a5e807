"""`make integrations`: every adapter against the package that it is for, and the example of its page.

The service runs from this project's own environment, once for all. Each group of packages that can be installed together
gets an environment under build/, made by pip from this project's extras as anybody would, and kept for the next time.
What is missing there is a failure, never a skip. Names of groups as arguments choose among them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.pages import PAGES, ROOT, run_example
from tests.system.stack import stack

T = TypeVar("T")

_BUILD = ROOT / "build" / "integrations"
_RUNNER = ("pytest>=8.3", "pytest-asyncio>=1.0", "pytest-timeout>=2.3")


@dataclass(frozen=True)
class Group:
    """Adapters whose packages share an environment."""

    name: str
    adapters: tuple[str, ...]  # each is an extra, a test file and a page
    also: tuple[str, ...] = ()  # what their tests need, and versions where any would do

    @property
    def home(self) -> Path:
        """Its environment."""
        return _BUILD / self.name

    @property
    def python(self) -> str:
        """Its interpreter."""
        return str(self.home / "bin" / "python")


GROUPS = (
    Group("light", ("gymnasium", "langchain", "skyrl")),
    Group("trl", ("trl", "openenv"), also=("torch==2.13.0",)),
    Group("verifiers", ("verifiers",)),
    Group("verl", ("verl",), also=("torch==2.13.0", "verl[verl-core]")),  # the agent loop is in its core
)


def main(names: list[str]) -> int:
    """Run the groups of these names, or all; 1 if one of them failed."""
    if unknown := set(names) - {group.name for group in GROUPS}:
        print(f"no such group: {', '.join(unknown)}", file=sys.stderr)
        return 2
    chosen = [group for group in GROUPS if not names or group.name in names]
    for group in chosen:
        _timed(f"{group.name}: installed", partial(_install, group))
    with stack("--workers", "1", "--slots", "8") as service:
        failed = [
            group.name
            for group in chosen
            if not _timed(f"{group.name}: ran", partial(_run, group, service.url))
        ]
    for group in chosen:
        print(f"{group.name}: {'FAILED' if group.name in failed else 'passed'}, {_mib(group.home):,} MiB")
    return 1 if failed else 0


def _install(group: Group) -> None:
    if not Path(group.python).exists():
        venv.create(group.home, with_pip=True)
    project = f"{ROOT}[{','.join(group.adapters)}]"
    pip = [group.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *_RUNNER, *group.also, "--editable", project], check=True)


def _run(group: Group, url: str) -> bool:
    tests = [f"tests/integrations/test_{adapter}.py" for adapter in group.adapters]
    # Only the settings of this project's own tests: theirs is another environment, and other people's warnings.
    options = [
        "--confcutdir=tests/integrations",
        "-o",
        "filterwarnings=",
        "-p",
        "no:cacheprovider",
        "--timeout=300",
    ]
    done = subprocess.run(
        [group.python, "-m", "pytest", "--quiet", *options, *tests],
        cwd=ROOT,
        env=os.environ | {"INTEGRATIONS_URL": url},  # noqa: TID251 - as a shell would
        check=False,
    )
    return all([done.returncode == 0, *(_shows(group, adapter, url) for adapter in group.adapters)])


def _shows(group: Group, adapter: str, url: str) -> bool:
    [page] = [page for page in PAGES if page.stem == adapter]
    shown = run_example(page, url, group.python)
    is_right = shown.exit_code == 0 and shown.printed == shown.promised
    if not is_right:
        print(f"{adapter}.md: the example printed {shown.printed}\n{shown.stderr}", file=sys.stderr)
    return is_right


def _timed(what: str, do: Callable[[], T]) -> T:
    began = time.monotonic()
    answer = do()
    print(f"{what} in {time.monotonic() - began:.0f} s", flush=True)
    return answer


def _mib(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*")) // 1024**2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
