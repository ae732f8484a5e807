"""The examples of the pages about other services' languages and other packages' adapters, run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .stack import Stack

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for folder in ("gateway/dialects", "sandbox/integrations")
    for path in (ROOT / folder).glob("*.md")
    if path.name != "README.md"
)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A comment on a line that prints says what it prints.
_PROMISE = re.compile(r"print\(.*\)  # (.+)$", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_does_what_it_says(page: Path, the_stack: Stack) -> None:
    """Each page has one example, which runs as it stands and prints what its comments say."""
    [code] = _BLOCK.findall(page.read_text(encoding="utf-8"))
    promised = _PROMISE.findall(code)
    assert promised, "an example shows what comes of it"
    # An adapter is for who has the package; the page's own tests run where it is installed.
    done = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8000", the_stack.url)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(ROOT)},  # noqa: TID251 - as a shell would
        check=False,
    )
    if missing := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'$", done.stderr.strip()):
        pytest.skip(f"{missing[1]} is not installed here")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised
