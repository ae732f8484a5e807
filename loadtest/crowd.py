"""`python -m loadtest.crowd SPEC`: a client process with very many connections, and one request on each of them.

Theory of operation. One thread with an epoll, since a transport of asyncio takes more memory than all that a
connection needs here: a socket, and a parser from its first answered byte on. First it opens all connections and
writes each request as a whole, in bursts, and waits between two of them while the gateways have not accepted enough of
those before. Then it reads until every request has its end.

Its parent has both ends of it: stdin, whose end makes it stop and report what it has, so that it outlives nobody, and
stdout, with a line for the first trouble of all and a last one for the report. Connections stay open until then, so
that what comes after an answer is heard as well. Times are those of CLOCK_MONOTONIC, which is one clock for the
whole machine.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import httptools

from loadtest.connections import accept_queue
from loadtest.oracle import Heard, Sent
from sandbox.process import use_all_descriptors

_READ_BYTES = 65536
_LOOK_S = 0.005  # how often it looks whether connections were accepted
_CONNECT_S = 10.0  # to a socket of this machine that has room
#: IP_BIND_ADDRESS_NO_PORT: the kernel finds one as it connects, of all that are free towards there.
_NO_PORT_YET = 24


@dataclass(frozen=True, slots=True)
class Spec:
    """What one process shall send."""

    host: str
    port: int
    source: str  # its own address
    name: str  # begins each of its calls' ids
    requests: int
    size: int  # calls of a request: 1 goes to /v1/run, more to /v1/batch
    code: str
    deadline_s: float
    printed: str  # what a right answer brings
    worker: str  # how the name begins of who gives it
    burst: int  # see `sizing.Plan`
    queue: int

    def calls_of(self, request: int) -> list[str]:
        """The ids of the calls that a request carries."""
        return [f"{self.name}-{request}-{index}" for index in range(self.size)]


@dataclass(slots=True)
class Report:
    """What a process has sent and heard."""

    sent: list[tuple[float, float]] = field(default_factory=list)  # of each request: begun_s, sent_s
    # As `Heard`, with the request's number.
    heard: list[tuple[int, str, float, bool]] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    def calls(self, spec: Spec) -> Iterator[tuple[str, Sent]]:
        """Each call that was sent, by its id."""
        for request, (begun_s, sent_s) in enumerate(self.sent):
            for call_id in spec.calls_of(request):
                yield call_id, Sent(f"{spec.name}-{request}", begun_s, sent_s)

    def answers(self, spec: Spec) -> Iterator[Heard]:
        """Each answer that came."""
        for request, call_id, at_s, is_right in self.heard:
            yield Heard(f"{spec.name}-{request}", call_id, at_s, is_right)


class _Crowd:
    """All connections of this process."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.report = Report()
        self.open = spec.requests  # requests that have no end yet
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._is_told_to_end = False
        self._epoll.register(sys.stdin.fileno(), select.EPOLLIN | select.EPOLLHUP)

    def run(self) -> Report:
        """Send everything and hear everything."""
        started_s = time.process_time()
        for request in range(self.spec.requests):
            if request % self.spec.burst == 0 and not self._may_go_on():
                break
            self._send(request)
        while self.open and not self._is_told_to_end:
            self._hear(None)
        self.report.cpu_s = time.process_time() - started_s
        return self.report

    def trouble(self, what: str, why: str) -> None:
        """Count what is no answer; the parent hears of the first at once."""
        if not self.report.errors:
            print(json.dumps({"trouble": f"{what}: {why}"}), flush=True)
        self.report.errors[what] += 1

    def _may_go_on(self) -> bool:
        """Wait until there is room for further connections; False when there shall be none."""
        self._hear(0)
        while accept_queue(self.spec.port) > self.spec.queue and not self._is_told_to_end:
            self._hear(_LOOK_S)  # nobody tells us, so we look again
        return not self._is_told_to_end

    def _send(self, request: int) -> None:
        begun_s = time.monotonic()
        line = socket.socket()
        line.setsockopt(socket.IPPROTO_IP, _NO_PORT_YET, 1)
        line.settimeout(_CONNECT_S)
        try:
            line.bind((self.spec.source, 0))
            line.connect((self.spec.host, self.spec.port))
            line.sendall(_request(self.spec, request))
        except OSError as exc:
            line.close()
            self.open -= 1
            self.trouble("not sent", str(exc))
            return
        finally:
            self.report.sent.append((begun_s, time.monotonic()))
        line.setblocking(False)
        self._connections[line.fileno()] = _Connection(self, request, line)
        self._epoll.register(line.fileno(), select.EPOLLIN)

    def _hear(self, seconds: float | None) -> None:
        for number, _ in self._epoll.poll(seconds):
            if number == sys.stdin.fileno():
                self._is_told_to_end = True
            elif not self._connections[number].read():
                self._epoll.unregister(number)
                self._connections.pop(number).line.close()


class _Connection:
    """One connection, and where its answer stands. The parser calls the `on_` methods."""

    __slots__ = ("_crowd", "_has_ended", "_parser", "_request", "_text", "line")

    def __init__(self, crowd: _Crowd, request: int, line: socket.socket) -> None:
        self.line = line
        self._crowd = crowd
        self._request = request
        self._has_ended = False
        self._parser: httptools.HttpResponseParser | None = None
        self._text = b""

    def read(self) -> bool:
        """Hear what has come; False at the end of the connection."""
        try:
            data = self.line.recv(_READ_BYTES)
        except OSError as exc:
            self._end("connection lost", str(exc))
            return False
        if not data:
            self._end("connection lost", "closed before the end of its answer")
            return False
        self._parser = self._parser or httptools.HttpResponseParser(self)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end("no HTTP", str(exc))
            return False
        return True

    def on_body(self, data: bytes) -> None:
        """A part of an answer. Each line that is whole is an answer, as far as it is known by now."""
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._hear(line)

    def on_message_complete(self) -> None:
        """The end of an answer, which needs no newline."""
        if self._text:
            self._hear(self._text)
            self._text = b""
        self._end()

    def _hear(self, line: bytes) -> None:
        at_s = time.monotonic()
        try:
            fields = json.loads(line)
            error = fields.get("error")
        except (ValueError, AttributeError):
            self._crowd.trouble("no JSON object", line[:200].decode(errors="replace"))
            return
        if error is not None:
            self._crowd.trouble(error["name"], error["message"])
            return
        call_id = fields.get("id", "")
        place, spec = fields.get("index", 0), self._crowd.spec
        is_right = (
            call_id == f"{spec.name}-{self._request}-{place}"
            and fields.get("status") == "ok"
            and fields.get("stdout") == spec.printed
            and fields.get("worker", "").startswith(spec.worker)
        )
        self._crowd.report.heard.append((self._request, call_id, at_s, is_right))

    def _end(self, trouble: str = "", why: str = "") -> None:
        if not self._has_ended:
            self._has_ended = True
            self._crowd.open -= 1
            if trouble:
                self._crowd.trouble(trouble, why)


def _request(spec: Spec, request: int) -> bytes:
    calls = [
        {"id": call_id, "code": spec.code, "deadline_s": spec.deadline_s}
        for call_id in spec.calls_of(request)
    ]
    body = json.dumps(calls[0] if spec.size == 1 else {"calls": calls}).encode()
    head = (
        f"POST {'/v1/run' if spec.size == 1 else '/v1/batch'} HTTP/1.1\r\n"
        f"host: {spec.host}:{spec.port}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
    )
    if spec.size > 1:
        head += "accept: application/x-ndjson\r\n"
    return head.encode() + b"\r\n" + body


def main() -> None:
    """Do what the one argument says."""
    use_all_descriptors()
    report = _Crowd(Spec(**json.loads(sys.argv[1]))).run()
    print(json.dumps({"report": {name: getattr(report, name) for name in Report.__slots__}}), flush=True)


if __name__ == "__main__":
    main()
