"""A call that no worker survives: it is answered as a fault, kept, and looked at by `sandbox dead`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .processes import family, until
from .stack import Stack, stack

CODE = "import time; print('begun', flush=True); time.sleep(1000)"


def dead(running: Stack, *words: str) -> str:
    """What the command says."""
    told = subprocess.run(
        [sys.executable, "-P", "-m", "sandbox", "dead", *words, "--url", running.url],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return told.stdout


def programs(running: Stack) -> dict[int, list[int]]:
    """By worker that serves: the programs that it runs. One that is starting tries its walls by programs, too."""
    serving = {int(name.split("-")[-2]) for name in running.worker_ids()}
    found = {}
    for worker in set(running.workers) & serving:
        below = family(worker)
        forkservers = {process.parent for process in below if process.command == "init"}
        found[worker] = [p.pid for p in below if p.parent in forkservers and p.command != "init"]
    return {worker: pids for worker, pids in found.items() if pids}


def test_a_call_that_kills_its_workers_is_refused_by_the_third() -> None:
    """After two workers it is `internal_error` and a dead letter, which can be listed, shown, sent again, dropped."""
    with stack("--workers", "2", SANDBOX_WORKER__LEASE_S="2") as running, ThreadPoolExecutor() as threads:
        call: dict[str, Any] = {"id": "poison", "limits": {"wall_s": 60}}
        answer = threads.submit(running.run, CODE, **call)
        for _ in range(2):
            until(lambda: programs(running), "a worker that runs it")
            [worker] = programs(running)
            os.kill(worker, signal.SIGKILL)
            until(lambda: worker not in running.workers, "its end")  # noqa: B023
        assert answer.result().status_code == 500
        error = answer.result().json()["error"]
        assert error["name"] == "InternalError"
        assert error["message"].startswith("delivered too often")
        # A caller that tries again gets the same answer, and kills nobody.
        assert running.run(CODE, **call).json()["error"] == error

        [row] = [line for line in dead(running, "list").splitlines() if "poison" in line]
        entry = next(word for word in row.replace("│", " ").split() if "-" in word)
        assert "delivered too often" in row
        letter = json.loads(dead(running, "show", entry))
        assert (letter["call"]["id"], letter["call"]["code"]) == ("poison", CODE)
        assert letter["times_delivered"] == 3

        sent = threads.submit(dead, running, "send", entry)
        until(lambda: programs(running), "the program, again")
        [[program]] = programs(running).values()
        os.kill(program, signal.SIGKILL)
        assert json.loads(sent.result())["status"] == "signaled"
        assert "poison" not in dead(running, "list")

        refused = subprocess.run(
            [sys.executable, "-P", "-m", "sandbox", "dead", "drop", entry, "--url", running.url],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (refused.returncode, "no dead letter" in refused.stderr) == (1, True)
