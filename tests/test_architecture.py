"""What documents and structure promise, compared with the code.

Layers are import-linter's, and the tree of errors is held to its picture in `sandbox/test_errors.py`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

import sandbox
from gateway.metrics import Metrics
from sandbox.calls import CallStatus, Limits, ToolCall
from sandbox.settings import CeilingSettings, Settings
from worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("sandbox", "gateway", "worker", "loadtest")
TEXTS = {"", ".c", ".json", ".jsonl", ".md", ".py", ".sh", ".seccomp", ".toml", ".txt", ".yaml", ".yml"}
UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}

#: What a metric counts or measures stands in its name.
COUNTED = {"bytes", "calls", "failures", "reclaimed", "replies", "requests", "seconds", "slots", "websockets"}


def source(*folders: str) -> Iterator[tuple[Path, ast.Module]]:
    """Every Python file of ours in these folders."""
    for path in chain.from_iterable((ROOT / folder).rglob("*.py") for folder in folders):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def project_files() -> Iterator[Path]:
    """Every text file of the project, and none of what tools leave in a checkout."""
    folders = [ROOT / folder for folder in (*PACKAGES, "tests", ".ci")]
    for path in chain(ROOT.iterdir(), *(folder.rglob("*") for folder in folders)):
        if path.is_file() and path.suffix in TEXTS:
            yield path


def test_readme_lists_every_status() -> None:
    """Its table has each status in the code's order, in the family that the code puts it into."""
    listed = re.findall(r"^\| `(\w+)` \| (verdict|fault) \|", README, re.MULTILINE)
    assert listed == [(status.value, "fault" if status.is_fault else "verdict") for status in CallStatus]


def test_readme_has_the_limits_and_their_ceilings() -> None:
    """The numbers a caller reads are the defaults of the code."""
    number = r"([\d.]+)(?: ([KMG]iB))?"
    listed = {
        name: (float(default) * UNITS[unit], float(most) * UNITS[most_unit])
        for name, default, unit, most, most_unit in re.findall(
            rf"`(\w+)` {number}(?: a stream)? \({number}\)", README
        )
    }
    defaults = {**dict(Limits()), "deadline_s": ToolCall(code="").deadline_s}
    assert listed == {name: (default, getattr(CeilingSettings(), name)) for name, default in defaults.items()}


def test_every_limit_has_a_ceiling() -> None:
    """A limit that somebody adds cannot be asked for without bound."""
    assert set(CeilingSettings.model_fields) == {*Limits.model_fields, "deadline_s", "network"}


@pytest.mark.parametrize("section", sorted(Settings.model_fields.keys() - {"ceilings"}))
def test_every_setting_is_used(section: str) -> None:
    """Outside of settings.py somebody reads it, from its section or from what is called settings."""
    read = {
        node.attr
        for path, tree in source("sandbox", "gateway", "worker")
        if path != ROOT / "sandbox" / "settings.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and re.search(rf"(settings|\b{section}|\bbounds)$", ast.unparse(node.value))
    }
    named = type(getattr(Settings(), section)).model_fields.keys()
    assert named - read == set()


def test_exports_are_there_and_explained() -> None:
    """Each name of `sandbox.__all__` exists, in order, and each class says itself what it is."""
    assert sandbox.__all__ == sorted(sandbox.__all__)
    exported = [getattr(sandbox, name) for name in sandbox.__all__]
    assert [thing for thing in exported if inspect.isclass(thing) and not vars(thing).get("__doc__")] == []


def test_metrics_have_names_of_their_own_with_a_unit() -> None:
    """No two programs share a name, each begins with its program, and says what it counts or measures."""
    registries = {"gateway": Metrics().registry, "worker": WorkerMetrics().registry}
    names = [
        (program, family.name) for program, registry in registries.items() for family in registry.collect()
    ]
    assert len({name for _, name in names}) == len(names) > 10
    for program, name in names:
        assert name.startswith(f"sandbox_{program}_"), name
        assert COUNTED & set(name.split("_")), f"{name} does not say what it counts"


def test_the_forkserver_imports_the_standard_library_only() -> None:
    """It runs under the jail's interpreter, where there is nothing of ours."""
    [(_, tree)] = [(p, t) for p, t in source("sandbox/jail") if p.name == "forkserver.py"]
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else ["." * node.level + (node.module or "")]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported - sys.stdlib_module_names == set()


def test_no_file_names_a_machine_or_a_registry() -> None:
    """Neither a folder of whoever wrote it nor the host that packages came from stands in the project."""
    homes = "home|root|Users|work"
    hosts = "|".join(
        re.escape(".".join(words)) for words in (("pypi", "org"), ("pythonhosted", "org"), ("docker", "io"))
    )
    # Assembled here, so that this file does not hold what it looks for. That there is a /home or a /root is no
    # secret, and tests try to see them.
    foreign = re.compile(rf"(?<![\w.)}}>/-])/(?:{homes})/\w|\b(?:{hosts})\b|{re.escape(str(ROOT))}\b")
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in project_files()
        for match in foreign.finditer(path.read_text(encoding="utf-8", errors="replace"))
    }
    assert found == set()
