"""What a forkserver says that a program has taken over: whatever it is, the worker is well and no call ends by accident."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.calls import ToolResult
from sandbox.errors import JailError
from sandbox.jail import PRELOADS, Host, Jail, Slot, prepare
from sandbox.jail import jail as jail_module
from sandbox.jail.cgroups import Place
from sandbox.jail.watched import Watched
from sandbox.settings import JailSettings

from .box import open_fds, program

READY, ENDED, FAILED, STARTED = 1, 2, 3, 4
CALL = 1  # the number of the only one
#: In nsjail's place: says what it was told to, at its start and when it has been asked to run something.
LIAR = """\
import os, socket
control = socket.socket(fileno=3)
for name in ("first", "then"):
    if not os.path.exists(f"{folder}/{{name}}"):
        break
    control.recv(1 << 20)
    with open(f"{folder}/{{name}}", "rb") as file:
        said = file.read()
    while said:
        size = int.from_bytes(said[:2], "little")
        try:
            control.send(said[2 : 2 + size])
        except BrokenPipeError:
            os._exit(0)
        said = said[2 + size :]
os._exit(0)
"""


def reply(
    kind: int, number: int = CALL, status: int = 0, error: int = 0, where: bytes = b"", spent: int = 0
) -> bytes:
    """A struct reply of fork.c."""
    return jail_module._REPLY.pack(kind, number, status, spent, spent, error, where)


any_reply = st.builds(
    reply,
    st.sampled_from([READY, ENDED, ENDED, FAILED, STARTED, 0, 5, 2**64 - 1]),
    st.sampled_from([CALL, CALL, 0, 2, 2**64 - 1]),
    st.sampled_from([0, 42 << 8, 9, 139, 0x7F, 0x137F, 0xFFFF, 1 << 16, -1, 2**40, -(2**63)]),
    st.sampled_from([0, 5, 12, -1, 4096, 2**31, 2**63 - 1]),
    st.binary(max_size=32),
    st.sampled_from([0, 1, 10**6, 2**64 - 1]),
)
messages = st.lists(any_reply | st.binary(min_size=1, max_size=150), max_size=6)


class Liar:
    """A host whose nsjail is played."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        nsjail = folder / "nsjail"
        liar = folder / "liar.py"
        liar.write_text(LIAR.format(folder=folder))
        nsjail.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -ISB {shlex.quote(str(liar))}\n")
        nsjail.chmod(0o755)
        self.host: Host = dataclasses.replace(
            prepare(JailSettings(), slots=1), nsjail=nsjail, place=Place("none", {}, "a test")
        )

    def says(self, first: list[bytes], then: list[bytes] | None = None) -> None:
        """What it says at its start, and then, when it was asked to run a call. After that it hangs up."""
        (self.folder / "then").unlink(missing_ok=True)
        for name, said in (("first", first), ("then", then)):
            if said is not None:
                content = b"".join(len(each).to_bytes(2, "little") + each for each in said)
                (self.folder / name).write_bytes(content)

    def run(self) -> ToolResult | JailError:
        """Run one call, and see to it that nothing but its outcome comes of it."""
        accidents: list[dict[str, Any]] = []

        async def run() -> ToolResult | JailError:
            asyncio.get_running_loop().set_exception_handler(lambda _, context: accidents.append(context))
            try:
                jail = await Jail.start(self.host, PRELOADS[0])
            except JailError as exc:
                return exc
            try:
                return await jail.run(program("print(1)"), Slot(1, Watched()))
            except JailError as exc:
                return exc
            finally:
                await jail.close()

        with asyncio.Runner() as runner:
            runner.get_loop()  # has descriptors of its own
            before = open_fds()
            outcome = runner.run(run())
            assert open_fds() == before
        assert accidents == []
        return outcome


@pytest.fixture(scope="module")
def liar() -> Any:
    """One for all."""
    with tempfile.TemporaryDirectory() as folder:
        yield Liar(Path(folder))


def sound_end(said: bytes) -> int | None:
    """The exit status or negative signal, if this is a good end of the call."""
    if len(said) != jail_module._REPLY.size:
        return None
    kind, number, status, *_ = jail_module._REPLY.unpack(said)
    if (kind, number) != (ENDED, CALL) or not 0 <= status <= 0xFFFF or status & 0x7F == 0x7F:
        return None
    return os.waitstatus_to_exitcode(status)


@settings(max_examples=60, deadline=None)
@given(messages)
def test_nonsense_is_a_fault(liar: Liar, said: list[bytes]) -> None:
    """A call has a verdict only where its end was told, and then that one; all else is a JailError."""
    liar.says([reply(READY)], said)
    outcome = liar.run()
    if isinstance(outcome, ToolResult):
        code = outcome.exit_code if outcome.exit_code is not None else -(outcome.signal or 0)
        assert code == next(end for end in map(sound_end, said) if end is not None)


@settings(max_examples=30, deadline=None)
@given(messages)
def test_nonsense_instead_of_a_start(liar: Liar, said: list[bytes]) -> None:
    """A jail that says anything but that it serves does not start, or ends."""
    liar.says(said)
    assert isinstance(liar.run(), JailError)


@pytest.mark.parametrize(
    "said",
    [
        [reply(READY), reply(ENDED)],
        [reply(0), reply(ENDED)],
        [reply(5), reply(ENDED)],
        [reply(ENDED, status=0x137F)],
        [reply(ENDED, status=-1)],
        [reply(ENDED, status=2**40)],
        [reply(FAILED, error=2**40)],
        [reply(FAILED, error=-1)],
        [b"x", reply(ENDED)],
    ],
)
def test_each_kind_of_nonsense(liar: Liar, said: list[bytes]) -> None:
    """A second start, an unknown kind, a status that is no end, an error that is none."""
    liar.says([reply(READY)], said)
    assert isinstance(liar.run(), JailError)


def test_a_good_end(liar: Liar) -> None:
    """What is played here is understood: an end that is told well is a verdict."""
    liar.says([reply(READY)], [reply(STARTED), reply(STARTED), reply(ENDED, status=3 << 8)])
    outcome = liar.run()
    assert isinstance(outcome, ToolResult)
    assert outcome.exit_code == 3
