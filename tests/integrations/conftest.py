"""Adapters against the packages that they are for. `make integrations` installs those and names a running service.

Without one nothing here is collected: most of these packages are too large for everybody's environment, and some
cannot be installed together.
"""

from __future__ import annotations

import os
import socket

import pytest

URL = os.environ.get("INTEGRATIONS_URL", "")  # noqa: TID251 - how `make integrations` tells its tests

if not URL:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def url() -> str:
    """Where the service is."""
    return URL


@pytest.fixture
def nobody() -> str:
    """Where none is: a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
