"""A whole service as `python -P -m sandbox up` runs it, for tests that look at it from outside.

What they see is what an operator sees: HTTP, the log on stderr, exit codes, and the processes of the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import redis

from .processes import Process, alive, family, until

START_S = 60.0
END_S = 60.0


class Stack:
    """A supervisor and what it has started."""

    def __init__(self, *options: str, **variables: str) -> None:
        #: Everything that the stack makes for itself on disk is in here. Not pytest's own folder, whose path is
        #: too long for a socket.
        self.directory = Path(tempfile.mkdtemp(prefix="stack-"))
        environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}  # noqa: TID251
        environ |= {"TMPDIR": str(self.directory), **variables}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "sandbox", "up", "--port", "0", *options],
            env=environ,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.log: list[dict[str, Any]] = []
        self._logged = threading.Condition()
        self._reader = threading.Thread(target=self._read_log)
        self._reader.start()
        self._seen: set[Process] = set()
        assert self._process.stdout is not None
        try:
            first = self._process.stdout.readline().split()
            assert first[:2] == ["listening", "on"], f"the stack did not start: {self.tail()}"
        except BaseException:
            self.end(signal.SIGKILL)
            shutil.rmtree(self.directory)
            raise
        self.url = first[2]
        self.http = httpx.Client(base_url=self.url, timeout=50, trust_env=False)

    # ---- what it says ----

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._logged:
                self.log.append(json.loads(line) if line.startswith("{") else {"event": line.rstrip()})
                self._logged.notify_all()

    def wait_log(self, since: int, event: str, **fields: Any) -> dict[str, Any]:
        """The first line of this event with these fields at or after a position of the log."""
        wanted = {"event": event, **fields}

        def found() -> dict[str, Any] | None:
            return next((line for line in self.log[since:] if wanted.items() <= line.items()), None)

        with self._logged:
            line = self._logged.wait_for(found, START_S)
        assert line is not None, f"{wanted} was not logged: {self.tail()}"
        return line

    def tail(self) -> str:
        """The end of its log, for a failed test."""
        return "\n" + "\n".join(str(line) for line in self.log[-40:])

    def run(self, code: str, **fields: Any) -> httpx.Response:
        """POST one call."""
        return self.http.post("/v1/run", json={"code": code, **fields})

    def is_ready(self) -> bool:
        """Whether the gateway says that it would serve a call."""
        return self.http.get("/readyz").status_code == 200

    def worker_ids(self) -> set[str]:
        """The workers that the gateway knows and that take calls."""
        workers = self.http.get("/v1/status").json()["workers"]
        return {worker["id"] for worker in workers if not worker["draining"]}

    def is_whole(self, workers: int) -> bool:
        """Whether it serves with so many workers, as the gateway that we happen to reach sees it."""
        try:
            return self.is_ready() and len(self.worker_ids()) == workers
        except httpx.TransportError:  # that was one which has just ended
            return False

    # ---- its processes ----

    def children(self, words: str) -> list[int]:
        """The supervisor's children whose command line has these words."""
        return [p.pid for p in alive() if p.parent == self.pid and words in p.command]

    @property
    def workers(self) -> list[int]:
        return self.children("-m worker")

    @property
    def gateways(self) -> list[int]:
        return self.children("-m gateway")

    @property
    def redis(self) -> int:
        [pid] = self.children("redis.sock")
        return pid

    def redis_client(self) -> redis.Redis:
        """A plain connection to its Redis. Use it in a `with`."""
        [socket] = self.directory.glob("sandbox-redis-*/redis.sock")
        return redis.Redis(unix_socket_path=str(socket), protocol=2, socket_timeout=10)

    def processes(self) -> set[Process]:
        """All that live of those it has ever been seen to have."""
        now = alive()
        self._seen |= {process for process in now if process.session == self.pid}
        for process in [process for process in now if process in self._seen]:
            self._seen |= set(family(process.pid, now))
        return {process for process in self._seen if process.lives}

    # ---- its end ----

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the supervisor."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit code of the supervisor, after the last line of its log."""
        code = self._process.wait(END_S)
        self._reader.join(END_S)
        assert not self._reader.is_alive(), "somebody still holds its stderr"
        return code

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end, and kill whatever is left after a long time; the exit code."""
        self.processes()
        self.send(number)
        try:
            return self.wait()
        finally:
            left = self.processes()
            for process in left:
                os.kill(process.pid, signal.SIGKILL)
            for stream in (self._process.stdout, self._process.stderr):
                assert stream is not None
                stream.close()

    def close(self) -> None:
        """End it if the test did not, and remove its folder."""
        if self._process.poll() is None:
            self.end()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
        self.http.close()
        shutil.rmtree(self.directory)


@contextmanager
def stack(*options: str, **variables: str) -> Iterator[Stack]:
    """Run a stack in a `with` block."""
    running = Stack(*options, **variables)
    try:
        yield running
    finally:
        running.close()


def gone(processes: set[Process]) -> None:
    """Wait until none of these lives."""
    until(lambda: not any(process.lives for process in processes), f"the end of {processes}")
