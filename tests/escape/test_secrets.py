"""What the worker knows is not in the jail: neither in a program nor in the forkserver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_residue import find_in

SECRET = "redis://user:hunter2-4711@queue.internal:6379"

_WORKER = """
import os, pathlib, sys
from tests.sandbox.jail.box import Box
box = Box(slots=1)
print(box.forkserver_pid(), os.getpid(), flush=True)
print(repr(box.run("import os\\nprint(dict(os.environ), os.getcwd(), os.uname().nodename)\\nprint(open('/proc/self/cmdline').read())").stdout), flush=True)
sys.stdin.read()
box.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root reads the memory of other processes")
def test_environment_and_arguments(tmp_path: Path) -> None:
    """A password in the worker's environment or command line is nowhere in the jail's memory, nor are its paths."""
    with subprocess.Popen(
        [sys.executable, "-c", _WORKER, SECRET],
        env={**os.environ, "REDIS_URL": SECRET, "SECRET_4711": "hunter2-4711"},  # noqa: TID251
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        forkserver, pid = map(int, worker.stdout.readline().split())
        said = worker.stdout.readline()
        assert find_in(pid, b"hunter2"), "the search finds nothing where it must"
        assert find_in(forkserver, b"hunter2") == []
        environ = Path(f"/proc/{forkserver}/environ").read_bytes()
        worker.stdin.close()
    assert b"hunter2" not in environ
    assert "4711" not in said
    assert "queue.internal" not in said
    assert str(Path(__file__).parents[2]) not in said
    assert "'sandbox'" not in said.replace("sandbox\\n", "")
    assert os.uname().nodename not in said.split()
