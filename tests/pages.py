"""The pages about other services' languages and other packages' adapters, each with one example, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for folder in ("gateway/dialects", "sandbox/integrations")
    for path in (ROOT / folder).glob("*.md")
    if path.name != "README.md"
)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A comment on a line that prints says what it prints.
_PROMISE = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)


class Shown(NamedTuple):
    """What the example of a page prints, and what the page says of that."""

    promised: list[str]
    printed: list[str]
    exit_code: int
    stderr: str


def run_example(page: Path, url: str, python: str) -> Shown:
    """Run the example of a page with this interpreter, against the service at `url`."""
    [code] = _BLOCK.findall(page.read_text(encoding="utf-8"))
    promised = _PROMISE.findall(code)
    assert promised, "an example shows what comes of it"
    done = subprocess.run(
        [python, "-c", code.replace("http://127.0.0.1:8000", url)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # noqa: TID251 - as a shell would
        check=False,
    )
    return Shown(promised, done.stdout.splitlines(), done.returncode, done.stderr)
