"""A service that answers whatever a test makes it say, to see whether anybody notices."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from .oracle import Call

Result = dict[str, Any]
#: What is said to the n-th sending of a call: bodies, one after the other, with the HTTP status as `http` where it is
#: not 200. None breaks the connection, and an empty list says nothing for ever.
Lie = Callable[[Call, int], list[Result] | None]


class _Server(ThreadingHTTPServer):
    def __init__(self, lie: Lie, calls: dict[str, Call]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.lie = lie
        self.calls = calls
        self.sent: dict[str, int] = {}
        self.jobs: dict[str, list[Result]] = {}
        self.over = threading.Event()

    def said(self, id_: str) -> list[Result] | None:
        self.sent[id_] = self.sent.get(id_, 0) + 1
        return self.lie(self.calls[id_], self.sent[id_])


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/jobs":
            self._job(body["id"])
            return
        said = [self.server.said(item["id"]) for item in body.get("calls", [body])]
        lines = [
            {"index": index} | answer if "calls" in body else answer
            for index, answers in enumerate(said)
            for answer in answers or []
        ]
        if None in said and not lines:
            return  # the connection closes without a word
        self._tell(lines, more=None in said or [] in said)
        if [] in said:
            self.server.over.wait()

    def _job(self, id_: str) -> None:
        answers = self.server.said(id_)
        if answers is None:
            return
        if any(answer.get("http") in {429, 503} for answer in answers):
            self._tell(answers)
            return
        self.server.jobs[id_] = answers
        self._tell([{"http": 202}])

    def do_GET(self) -> None:
        answers = self.server.jobs[self.path.removeprefix("/v1/jobs/").partition("?")[0]]
        if not answers:
            self.server.over.wait()
            return
        self._tell(answers[:1])

    def _tell(self, lines: list[Result], *, more: bool = False) -> None:
        """Answer; with `more` the end of the connection comes before the promised length."""
        body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self.send_response(lines[0].get("http", 200) if lines else 200)
        self.send_header("content-length", str(len(body) + more))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@contextmanager
def service(lie: Lie, calls: dict[str, Call]) -> Iterator[str]:
    """Run it in a `with` block; the URL of it."""
    server = _Server(lie, calls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
