"""What the processes of a service use, by its parts."""

from __future__ import annotations

import os
import subprocess
import sys

from loadtest.processes import used_by

#: Runs a child that uses CPU and ends, says so, and stays until its stdin ends.
WORKER = """
import subprocess, sys
burn = "import time\\nwhile time.process_time() < 0.5: pass"
subprocess.run([sys.executable, "-c", burn], check=True)
print("ended", flush=True)
sys.stdin.read()
"""


def test_a_jail_that_was_replaced_is_not_its_workers() -> None:
    """The CPU of a worker's child that has ended is the jail's, so that no difference has a jail's whole life in it."""
    # The words by which a worker is known stand behind the program, which does not look at them.
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, "-m worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ended\n"
        used = used_by(os.getpid())
    finally:
        worker.communicate()

    assert used["jail"].cpu_s >= 0.4
    assert used["worker"].cpu_s < used["jail"].cpu_s
    assert used["worker"].processes == 1
