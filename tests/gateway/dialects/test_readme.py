"""The table of languages, held against the code and the tests."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.dialects import DIALECTS
from gateway.engine import Engine

from ..conftest import Serve

ROOT = Path(__file__).parents[3]
README = (ROOT / "gateway/dialects/README.md").read_text(encoding="utf-8")


async def test_every_path_is_named(serve: Serve) -> None:
    """The table has the paths of each language, in that language's row, and no others."""
    service = await serve()
    engine = Engine(service.gateway, service.app.reader)  # type: ignore[attr-defined]
    for name, doors in DIALECTS.items():
        [row] = [line for line in README.splitlines() if f"]({name}.md)" in line]
        assert set(re.findall(r"`(/[^`]*)`", row.split("|")[2])) == {door.path for door in doors(engine)}


def test_every_row_is_held_by_a_test() -> None:
    """The tests that the second table names are there."""
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"def (test_\w+)", tests))
    named = set(re.findall(r"`(test_\w+)`", README))
    assert len(named) > 15
    assert named - defined == set()
