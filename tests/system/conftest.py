"""The whole service, as a person starts it. Every process, signal, socket and jail here is a real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox.errors import ConfigError
from sandbox.jail import runtime
from sandbox.settings import load_settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start of the stack is a part of the first test that uses it, and takes its time on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session", autouse=True)
def _runtime() -> None:
    """What the service needs and `make test` makes."""
    try:
        runtime.check(load_settings().jail.runtime)
    except ConfigError as exc:
        if os.environ.get("CI") == "true":  # noqa: TID251 - whether we are in CI is no setting of the service
            pytest.fail(str(exc))
        pytest.skip(str(exc))
