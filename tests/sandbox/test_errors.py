"""The tree of errors and its form on the wire."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

import sandbox
from sandbox import errors
from sandbox.errors import InternalError, Overloaded, SandboxError, from_wire

ALL = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, SandboxError)]
SENT = [cls for cls in ALL if type(from_wire(cls.__name__, "")) is cls]


@pytest.mark.parametrize("cls", ALL)
def test_every_error_is_drawn_in_the_tree_and_exported(cls: type[SandboxError]) -> None:
    """The picture at the top of the file and `sandbox.__all__` leave none out, and the picture has its status."""
    assert errors.__doc__ is not None
    [line] = [
        line for line in errors.__doc__.splitlines() if line.split("─ ")[-1].split()[:1] == [cls.__name__]
    ]
    assert cls.__name__ in sandbox.__all__
    if cls in SENT:
        assert str(cls.http_status) in line.split()


@pytest.mark.parametrize("cls", SENT)
@pytest.mark.parametrize("retry_after_s", [None, 1.5])
def test_an_error_survives_the_wire(cls: type[SandboxError], retry_after_s: float | None) -> None:
    """Class, message and pause come back as the gateway raised them."""
    body = cls("the message", retry_after_s=retry_after_s).to_wire()["error"]
    back = from_wire(**body)  # type: ignore[arg-type]
    assert type(back) is cls
    assert (back.message, back.retry_after_s, str(back)) == ("the message", retry_after_s, "the message")


@pytest.mark.parametrize("name", ["JailError", "ConfigError", "AnswerLost", "SandboxError", "ValueError", ""])
def test_a_name_that_no_gateway_sends_becomes_an_internal_error(name: str) -> None:
    """What a newer or a broken gateway says is quoted, and never silently taken for something else."""
    back = from_wire(name, "the message")
    assert type(back) is InternalError
    assert back.message == f"{name}: the message"


def test_only_what_can_do_no_harm_is_retryable() -> None:
    """A call that did not run may be sent again, and one that is lost, which its id leads back to its run."""
    retryable = {cls.__name__ for cls in ALL if cls.is_retryable}
    assert retryable == {"Overloaded", "Unavailable", "AnswerLost", "QueueTimeout"}


@pytest.mark.parametrize("clone", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_can_be_copied_and_sent_to_another_process(clone: object) -> None:
    """Nothing is lost when a trainer hands it between its processes."""
    assert callable(clone)
    back = clone(Overloaded("full", retry_after_s=2.0))
    assert (type(back), back.message, back.retry_after_s) == (Overloaded, "full", 2.0)
