"""The run of chaos itself: it can be interrupted at any moment, and leaves nothing behind."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path

from .plan import faults
from .processes import family, until

PROJECT = Path(__file__).parents[2]


def test_an_interrupted_run_leaves_nothing() -> None:
    """SIGINT while a gateway is frozen: exit code 130, and no process and no file of the stack is there any more."""
    seed = next(seed for seed in itertools.count() if faults(seed, 60)[0].fault == "gateway-freeze")
    command = [sys.executable, "-m", "tests.system.chaos", "--seconds", "60", "--seed", str(seed)]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert any("gateway-freeze" in line for line in process.stdout)
            started = family(process.pid)
            words = {word for each in started for word in each.command.replace(":", " ").split()}
            sockets = [Path(word) for word in words if "/stack-" in word]
            assert [socket.exists() for socket in sockets] == [True]
        finally:
            process.send_signal(signal.SIGINT)
            process.stdout.read()
    assert process.returncode == 130
    until(lambda: not any(each.lives for each in started), "the end of all that it had started")
    assert not any(parent.exists() for parent in sockets[0].parents if parent.name.startswith("stack-"))
