"""The oracle finds what is not exactly one right answer, also from clients that a service lies to."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict

import pytest

from loadtest.crowd import Report, Spec
from loadtest.oracle import Heard, Sent, Verdict, judge, most_at_once

SENT = {f"c{n}": Sent(f"r{n}", float(n), n + 0.5) for n in range(3)}
HEARD = [Heard(f"r{n}", f"c{n}", n + 10.0, is_right=True) for n in range(3)]


def counts(verdict: Verdict) -> tuple[int, int, int, int, int]:
    """Answered, unanswered, doubled, foreign, wrong."""
    return (
        len(verdict.latencies_s),
        verdict.unanswered,
        verdict.duplicates,
        verdict.foreign,
        verdict.wrong,
    )


def test_one_right_answer_each_is_good() -> None:
    """Three calls with their answers are good, and each took ten seconds from before its connection on."""
    verdict = judge(SENT, HEARD)
    assert verdict.is_good
    assert verdict.latencies_s == [10.0, 10.0, 10.0]


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        (HEARD[1:], (2, 1, 0, 0, 0)),
        ([*HEARD, HEARD[0]], (2, 0, 1, 0, 0)),
        ([*HEARD, Heard("r0", "strange", 11.0, is_right=True)], (3, 0, 0, 1, 0)),
        ([Heard("r1", "c0", 11.0, is_right=True), *HEARD[1:]], (2, 1, 0, 1, 0)),
        ([HEARD[0]._replace(is_right=False), *HEARD[1:]], (2, 0, 0, 0, 1)),
        ([], (0, 3, 0, 0, 0)),
    ],
    ids=["missing", "doubled", "foreign", "of another request", "wrong", "none"],
)
def test_anything_else_is_found(heard: list[Heard], expected: tuple[int, ...]) -> None:
    """What is missing, doubled, of somebody else or wrong is counted as that, and the whole is not good."""
    verdict = judge(SENT, heard)
    assert counts(verdict) == expected
    assert not verdict.is_good


def test_the_peak_counts_what_is_surely_in_flight() -> None:
    """A call counts from the end of its sending to its answer, and an answer at the moment of a sending goes first."""
    assert most_at_once(SENT.values(), HEARD) == 3
    one_after_the_other = [Heard("", "", call.sent_s + 1.0, is_right=True) for call in SENT.values()]
    assert most_at_once(SENT.values(), one_after_the_other) == 1
    assert most_at_once(SENT.values(), []) == 3


# ---- the clients' process, before a service that lies ----


def right(call_id: str) -> dict[str, object]:
    """What a stand-in answers."""
    return {"id": call_id, "status": "ok", "stdout": "held\n", "worker": "stand-in-1"}


def http(*bodies: dict[str, object]) -> bytes:
    """An answer of its own for each."""
    texts = [json.dumps(body).encode() for body in bodies]
    return b"".join(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text) for text in texts)


@asynccontextmanager
async def service(answer: Callable[[str], bytes]) -> AsyncIterator[int]:
    """The port of a service that answers each request, whose call has this id, by these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split()[0])
        call = json.loads(await reader.readexactly(length))
        if answered := answer(call["id"]):
            writer.write(answered)
            await reader.read()  # until the caller goes
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def spec(port: int, requests: int = 3) -> Spec:
    """Some single requests to it."""
    return Spec(
        host="127.0.0.1",
        port=port,
        source="127.0.0.2",
        name="c",
        requests=requests,
        size=1,
        code="pass",
        deadline_s=60.0,
        printed="held\n",
        worker="stand-in",
        burst=8,
        queue=8,
    )


async def start_crowd(what: Spec) -> asyncio.subprocess.Process:
    """A client process of its own."""
    command = (sys.executable, "-m", "loadtest.crowd", json.dumps(asdict(what)))
    return await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def hear(answer: Callable[[str], bytes]) -> tuple[Verdict, Counter[str], list[str]]:
    """The verdict on what a client process heard, its errors, and what it said before its report."""
    async with service(answer) as port:
        what = spec(port)
        crowd = await start_crowd(what)
        assert crowd.stdout is not None
        *said, last = (await crowd.stdout.read()).splitlines()
        assert await crowd.wait() == 0
    fields = json.loads(last)["report"]
    report = Report(**fields | {"errors": Counter(fields["errors"])})
    verdict = judge(dict(report.calls(what)), report.answers(what))
    return verdict, report.errors, [json.loads(line)["trouble"] for line in said]


async def test_a_client_hears_right_answers() -> None:
    """Of an honest service everything is heard and nothing found."""
    verdict, errors, said = await hear(lambda call_id: http(right(call_id)))
    assert counts(verdict) == (3, 0, 0, 0, 0)
    assert verdict.is_good
    assert (errors, said) == (Counter(), [])


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        (lambda call_id: http(right(call_id), right(call_id)), (2, 0, 1, 0, 0)),
        (lambda call_id: http(right("c-0-0")), (2, 1, 0, 1, 0)),
        (lambda call_id: http(right(call_id) | {"stdout": "guessed\n"}), (2, 0, 0, 0, 1)),
        (lambda call_id: http(right(call_id) | {"worker": "host-1"}), (2, 0, 0, 0, 1)),
    ],
    ids=["doubled", "foreign", "wrong output", "no stand-in"],
)
async def test_a_client_hears_what_is_not_right(
    lie: Callable[[str], bytes], expected: tuple[int, ...]
) -> None:
    """A lie on one of three connections reaches the oracle as what it is."""
    verdict, _, _ = await hear(lambda call_id: lie(call_id) if call_id == "c-1-0" else http(right(call_id)))
    assert counts(verdict) == expected


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (http({"error": {"name": "Overloaded", "message": "full"}}), "Overloaded"),
        (b"", "connection lost"),
        (b"what?\r\n", "no HTTP"),
    ],
    ids=["error", "closed", "no HTTP"],
)
async def test_what_is_no_answer_is_an_error_by_name(answer: bytes, name: str) -> None:
    """A call that got an error, or lost its connection, is unanswered, and the first trouble is told at once."""
    verdict, errors, said = await hear(lambda call_id: answer if call_id == "c-1-0" else http(right(call_id)))
    assert counts(verdict) == (2, 1, 0, 0, 0)
    assert errors == Counter({name: 1})
    assert len(said) == 1
    assert said[0].startswith(f"{name}: ")


async def test_a_client_reports_what_it_has_when_its_parent_goes() -> None:
    """The end of stdin ends a process whose requests are never answered, and its report says that they are not."""
    async with service(lambda call_id: b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{") as port:
        what = spec(port)
        crowd = await start_crowd(what)
        output, _ = await crowd.communicate(b"")  # closes it
        assert crowd.returncode == 0
    report = json.loads(output)["report"]
    assert report["heard"] == []
    assert not report["errors"]
