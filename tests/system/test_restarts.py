"""A stack is restarted part by part under load, and a stack whose supervisor was killed is out of the way."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from sandbox import SandboxClient, SandboxError, ToolCall

from .callers import Load, all_right
from .oracle import Call
from .processes import until
from .stack import Stack, gone, stack
from .test_end import listens

#: What a caller without our client asks again for: a refusal, or what a proxy says in the gateway's place.
AGAIN = {429, 502, 503, 504}
PARTS = 2


class Callers:
    """Callers that send one call after the other until they are told to stop, through our client and without it."""

    def __init__(self, url: str, each: int = 8) -> None:
        self.answers: list[tuple[str, str]] = []  # ids, and what came of each
        self._url = url
        self._each = each
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._call()))
        self._thread.start()

    async def _call(self) -> None:
        limits = httpx.Limits(max_connections=self._each)
        async with (
            SandboxClient(self._url) as client,
            httpx.AsyncClient(base_url=self._url, timeout=60, limits=limits, trust_env=False) as http,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._each):
                group.create_task(self._by_client(client, f"client-{number}"))
                group.create_task(self._by_hand(http, f"plain-{number}"))

    async def _by_client(self, client: SandboxClient, name: str) -> None:
        for call in self._calls(name):
            try:
                result = await client.run(call)
            except SandboxError as exc:
                self._note(call.id, repr(exc))
            else:
                self._note(result.id, result.stdout)

    async def _by_hand(self, http: httpx.AsyncClient, name: str) -> None:
        for call in self._calls(name):
            body = call.model_dump(include={"id", "code"})
            said = "no answer at all"
            for _ in range(100):
                try:
                    response = await http.post("/v1/run", json=body)
                except httpx.TransportError as exc:
                    said = repr(exc)
                else:
                    if response.status_code not in AGAIN:
                        said = response.json().get("stdout", response.text)
                        break
                    said = response.text
                await asyncio.sleep(0.1)  # as its retry policy says
            self._note(call.id, said)

    def _calls(self, name: str) -> Iterator[ToolCall]:
        """Most are short; every eighth lasts for as long as a part takes to come back."""
        number = 0
        while not self._stopping:
            id_ = f"{name}-{number}"
            seconds = 0.02 if number % 8 else 1.0
            yield ToolCall(id=id_, code=f"import time\ntime.sleep({seconds})\nprint({Call(id_).value()!r})")
            number += 1

    def _note(self, id_: str, said: str) -> None:
        with self._changed:
            self.answers.append((id_, said))
            self._changed.notify_all()

    def wait_more(self, count: int) -> None:
        """Wait until so many more calls are answered."""
        with self._changed:
            enough = len(self.answers) + count
            assert self._changed.wait_for(lambda: len(self.answers) >= enough, 60), "nobody is served"

    def stop(self) -> None:
        """Let the calls that are under way end."""
        self._stopping = True
        self._thread.join(120)
        assert not self._thread.is_alive()

    def wrong(self) -> list[tuple[str, str]]:
        """What was not answered by its own value."""
        return [(id_, said) for id_, said in self.answers if said != f"{Call(id_).value()}\n"]


@contextmanager
def callers(running: Stack) -> Iterator[Callers]:
    """Callers for the length of a `with` block."""
    calling = Callers(running.url)
    try:
        yield calling
    finally:
        calling.stop()


def test_every_part_can_be_restarted_under_load() -> None:
    """Gateways and workers get SIGTERM one after the other: no call fails, each is answered once and right."""
    with stack("--gateways", str(PARTS), "--workers", str(PARTS), "--slots", "4") as running:
        with callers(running) as calling:
            calling.wait_more(50)
            for kind in ("gateways", "workers"):
                for pid in getattr(running, kind):
                    mark = len(running.log)
                    os.kill(pid, signal.SIGTERM)
                    ended = running.wait_log(mark, "child ended")
                    assert (ended["exit_code"], ended["again_in_s"]) == (0, 0)
                    running.wait_log(mark, "listening" if kind == "gateways" else "serving")
                    until(lambda: running.is_whole(PARTS), "the whole stack")
                    calling.wait_more(50)
        assert calling.wrong() == []
        ids = [id_ for id_, _ in calling.answers]
        assert len(set(ids)) == len(ids)
        assert not [line for line in running.log if line.get("level") in {"error", "critical"}]


def test_a_killed_stack_lets_go_of_its_port() -> None:
    """After kill -9 another stack can have the port at once, while the old gateway still waits for an open call."""
    with stack("--slots", "2") as running:
        all_right(Load(running.url, "warm", 2, seconds=0))
        long = Load(running.url, "long", 1, seconds=50, limits={"wall_s": 60})
        until(lambda: running.http.get("/v1/status").json()["backlog"]["running"] == 1, "a running call")
        left = running.processes()
        drains = [process for process in left if process.pid in {*running.gateways, *running.workers}]
        os.kill(running.pid, signal.SIGKILL)
        until(lambda: not listens(running), "the end of its port")
        assert [process.lives for process in drains] == [True, True]
        with stack("--port", str(httpx.URL(running.url).port), "--slots", "2") as other:
            assert other.url == running.url
            assert other.run("print(1)").json()["stdout"] == "1\n"
        for process in drains:
            if process.lives:
                os.kill(process.pid, signal.SIGTERM)  # the second one, so that nobody waits for their grace
        assert long.broke_off()
        running.wait()
        gone(left)
