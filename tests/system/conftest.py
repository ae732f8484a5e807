"""The whole service, as a person starts it. Every process, signal, socket and jail here is a real one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import until
from .stack import Stack, stack

WORKERS = 2
#: Long enough that a heartbeat on a busy machine is no silence.
LEASE_S = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A start of the stack is a part of the first test that uses it, and takes its time on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session", autouse=True)
def _runtime(_jail_runtime: None) -> None:
    """Everything here runs programs."""


@pytest.fixture(scope="module")
def the_stack() -> Iterator[Stack]:
    """Two workers, one gateway, and a Redis of its own."""
    options = ("--workers", str(WORKERS), "--slots", "8")
    with stack(*options, SANDBOX_WORKER__LEASE_S=str(LEASE_S)) as running:
        yield running


@pytest.fixture
def whole(the_stack: Stack) -> Stack:
    """The stack, when all of it serves."""
    until(lambda: the_stack.is_whole(WORKERS), "the whole stack")
    the_stack.processes()  # so that it knows what may have to be gone
    return the_stack
