"""The examples of the pages about other services' languages and other packages' adapters."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.pages import PAGES, run_example

from .stack import Stack


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_example_of_a_page_does_what_it_says(page: Path, the_stack: Stack) -> None:
    """Each page has one example, which runs as it stands and prints what its comments say."""
    shown = run_example(page, the_stack.url, sys.executable)
    # An adapter is for who has the package; `make integrations` runs its page where that is installed.
    if missing := re.search(r"ModuleNotFoundError: No module named '([\w.]+)'$", shown.stderr.strip()):
        pytest.skip(f"{missing[1]} is not installed here")
    assert shown.exit_code == 0, shown.stderr
    assert shown.printed == shown.promised
