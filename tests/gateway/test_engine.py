"""What all languages share: permits, bounds, keys, and the caller who goes away."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

import httpx
import pytest
from pydantic import BaseModel
from starlette.types import ASGIApp

from gateway.app import Answers
from gateway.dialects import DIALECTS
from gateway.engine import Answer, Engine, EngineRoute, Exchange, Handler, in_turns, make_call, make_file
from gateway.tenants import ANONYMOUS, Authentication
from sandbox.api_keys import new_key, stanza
from sandbox.calls import CallStatus, ToolCall
from sandbox.errors import CallTooLarge, InvalidCall, Overloaded, SandboxError
from sandbox.settings import Dialect, RedisSettings

from .conftest import Serve, Service, listening, opened, until

PATH = "/spoken"


class Programs(BaseModel):
    """A request of the language that these tests speak."""

    codes: list[str]
    wall_s: float | None = None

    def calls(self) -> list[ToolCall]:
        limits = {} if self.wall_s is None else {"wall_s": self.wall_s}
        return [make_call(id=code.replace(" ", ":"), code=code, limits=limits) for code in self.codes]


async def run_all(exchange: Exchange) -> Answer:
    """Answers a word for each program."""
    came = await exchange.run_all(exchange.parse(Programs).calls())
    words = [type(one).__name__ if isinstance(one, SandboxError) else one.status for one in came]
    return Answer(" ".join(words).encode())


async def run_one(exchange: Exchange) -> Answer:
    """Answers what the first program printed."""
    return Answer((await exchange.run(exchange.parse(Programs).calls()[0])).stdout.encode())


def refuse(error: SandboxError) -> Answer:
    """Says an error in this language."""
    return Answer(f"{type(error).__name__}: {error.message}".encode(), 418)


def speak(
    service: Service, handler: Handler, refuse: Callable[[SandboxError], Answer] | None = refuse
) -> ASGIApp:
    """A language with this one handler, behind all that a request passes."""
    engine = Engine(service.gateway, service.app.reader)  # type: ignore[attr-defined]
    door = Authentication(EngineRoute(engine, handler, refuse), service.gateway.keys, {PATH: "run"})
    return Answers(door, service.gateway, [PATH])


@asynccontextmanager
async def spoken(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of it, past any socket."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield http


async def hang_up(address: tuple[str, int], path: str, body: bytes, ready: Awaitable[None]) -> None:
    """Send a request over a connection of its own, and close that when something has come."""
    _, writer = await asyncio.open_connection(*address)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await ready
    writer.close()
    await writer.wait_closed()


async def test_calls_run_side_by_side_and_each_in_its_place(serve: Serve) -> None:
    """A batch is answered in order; a fault, and a call that is refused, are one item's affair."""
    async with spoken(speak(await serve(), run_all)) as http:
        response = await http.post(PATH, json={"codes": ["hold", "fail", "fault", "late", "release", "echo"]})
        words = [
            CallStatus.OK,
            CallStatus.ERROR,
            CallStatus.INTERNAL_ERROR,
            CallStatus.QUEUE_TIMEOUT,
            "ok",
            "ok",
        ]
        assert response.text.split() == words
        twice = await http.post(PATH, json={"codes": ["echo 1", "echo 1"], "wall_s": 1.0})
        assert twice.text == "ok ok", "the same call twice is one call"
        above = await http.post(PATH, json={"codes": ["echo 2"], "wall_s": 61.0})
        assert above.text == "InvalidCall"


async def test_what_is_wrong_is_said_in_the_language_s_words(serve: Serve) -> None:
    """A body that is no request, one with too many parts and a call above a ceiling reach `refuse`."""
    service = await serve(gateway={"max_body_bytes": 100_000})
    async with spoken(speak(service, run_one)) as http:
        for body, words in [
            ("{", "InvalidCall: body: Invalid JSON"),
            ('{"codes": [1]}', "InvalidCall: codes.0: Input should be a valid string"),
            ("[" * 80_000, "InvalidCall: body: it has more than 75000 names, texts, brackets and commas"),
            ('{"codes": ["echo"], "wall_s": 99}', "InvalidCall: limits.wall_s: 99 is above"),
            (
                '{"codes": ["echo"], "wall_s": -1}',
                "InvalidCall: limits.wall_s: Input should be greater than 0",
            ),
            (" " * 100_001, "CallTooLarge: the request is larger than 100000 bytes"),
        ]:
            response = await http.post(PATH, content=body)
            assert response.status_code == 418
            assert response.text.startswith(words)
    assert (service.gateway.admission.held, service.gateway.admission.held_bytes) == (0, 0)


async def test_without_words_of_its_own_it_has_ours(serve: Serve) -> None:
    """A language that does not say how it refuses has our errors."""
    async with spoken(speak(await serve(), run_one, None)) as http:
        response = await http.post(PATH, content="{")
    assert (response.status_code, response.json()["error"]["name"]) == (422, "InvalidCall")


async def test_a_bug_in_a_language_is_ours(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    """An exception that is none of ours is 500 with an incident, the log has its traceback, and no permit is lost."""

    async def stumble(exchange: Exchange) -> Answer:
        raise KeyError(exchange.body)

    service = await serve()
    with caplog.at_level(logging.ERROR, logger="gateway.app"):
        async with spoken(speak(service, stumble)) as http:
            response = await http.post(PATH, content="secret")
    incident = caplog.records[0].incident  # type: ignore[attr-defined]
    assert response.status_code == 500
    assert response.json() == {
        "error": {
            "name": "InternalError",
            "message": f"the service failed; its log tells more under {incident}",
        }
    }
    assert service.gateway.admission.held == 0


async def test_a_batch_holds_a_permit_for_each_call(serve: Serve) -> None:
    """While a batch runs all of its calls count, one that does not fit is refused as a whole, and all come free."""
    service = await serve(gateway={"max_in_flight": 3})
    admission = service.gateway.admission
    async with spoken(speak(service, run_all)) as http:
        held = asyncio.create_task(http.post(PATH, json={"codes": ["hold", "echo"]}))
        await service.worker.has_seen(2)
        assert admission.held == 2
        full = await http.post(PATH, json={"codes": ["echo", "echo 2"]})
        assert full.text == "Overloaded: 3 of 3 calls are in flight here"
        assert (await http.post(PATH, json={"codes": ["echo 3"]})).text == "ok"
        assert admission.held == 2
        service.worker.released.set()
        assert (await held).text == "ok ok"
    assert (admission.held, admission.held_bytes) == (0, 0)


async def test_a_full_gateway_reads_no_body(serve: Serve) -> None:
    """The permit comes before the body."""
    service = await serve(gateway={"max_in_flight": 1})

    read = []

    async def body() -> AsyncIterator[bytes]:
        read.append(True)
        yield b"{}"

    async with spoken(speak(service, run_one)) as http:
        with service.gateway.admission.enter(ANONYMOUS):
            response = await http.post(PATH, content=body())
    assert response.text == "Overloaded: 1 of 1 calls are in flight here"
    assert not read


async def test_run_alone_takes_and_gives_back_its_own_permit(serve: Serve) -> None:
    """Who has no request, as a session over a socket, is admitted call by call."""
    service = await serve(gateway={"max_in_flight": 1})
    engine = Engine(service.gateway, service.app.reader)  # type: ignore[attr-defined]
    running = asyncio.create_task(engine.run_alone(make_call(code="hold"), ANONYMOUS))
    await service.worker.has_seen(1)
    with pytest.raises(Overloaded):
        await engine.run_alone(make_call(code="echo"), ANONYMOUS)
    service.worker.released.set()
    assert (await running).status is CallStatus.OK
    assert service.gateway.admission.held == 0


async def test_run_alone_cancelled_cancels_its_call(serve: Serve, redis_of_test: RedisSettings) -> None:
    """A call whose caller is cancelled is ordered off its worker, and its permit comes free."""
    service = await serve()
    engine = Engine(service.gateway, service.app.reader)  # type: ignore[attr-defined]
    async with opened(redis_of_test) as queue:
        running = asyncio.create_task(engine.run_alone(make_call(code="hold"), ANONYMOUS))
        await service.worker.has_seen(1)
        running.cancel()
        await asyncio.wait([running])
        assert service.gateway.admission.held == 0
        while await queue.orders("echo") != [service.worker.seen[0].place]:
            pass


async def test_a_caller_that_goes_away_cancels_all_its_calls(
    serve: Serve, redis_of_test: RedisSettings
) -> None:
    """The connection breaks: every call of the request is ordered off its worker, and its permit comes free."""
    service = await serve()
    admission = service.gateway.admission
    async with listening(service, speak(service, run_all)) as address, opened(redis_of_test) as queue:
        await hang_up(address, PATH, b'{"codes": ["hold", "lose"]}', service.worker.has_seen(2))
        orders: set[str] = set()
        while orders != {delivery.place for delivery in service.worker.seen}:
            orders |= set(await queue.orders("echo"))
        await until(lambda: admission.held == 0)
    assert admission.held_bytes == 0
    assert service.gateway.metrics.requests.labels(PATH, "gone")._value.get() == 1


async def test_a_caller_that_goes_away_through_all_of_the_application(serve: Serve) -> None:
    """A language's own path is no different."""
    service = await serve()
    async with listening(service) as address:
        await hang_up(address, "/run_code", b'{"code": "hold"}', service.worker.has_seen(1))
        await until(lambda: service.gateway.metrics.cancelled._value.get() == 1)
        await until(lambda: service.gateway.admission.held == 0)
    assert service.gateway.metrics.requests.labels("/run_code", "gone")._value.get() == 1


async def test_the_metrics_know_a_door(serve: Serve) -> None:
    """A request to a language counts under its own path, and one below it as `other`."""
    service = await serve()
    await service.http.post("/run_code", json={"code": "echo"})
    await service.http.post("/run_code/x", json={})
    requests = service.gateway.metrics.requests
    assert requests.labels("/run_code", 200)._value.get() == 1
    assert requests.labels("other", 404)._value.get() == 1


async def test_a_language_that_is_switched_off(serve: Serve) -> None:
    """Its paths are unknown, and those of the others are not."""
    service = await serve(gateway={"dialects": "piston, nemo_skills"})
    response = await service.http.post("/run_code", json={"code": "echo"})
    assert (response.status_code, response.json()["error"]["name"]) == (404, "NotFound")
    assert (await service.http.get("/v1/ping")).status_code == 404


async def test_every_language_has_paths_of_its_own(serve: Serve) -> None:
    """Each that a setting can name is there, and no path belongs to two of them, or to us."""
    service = await serve(gateway={"dialects": ""})
    engine = Engine(service.gateway, service.app.reader)  # type: ignore[attr-defined]
    assert set(DIALECTS) == set(get_args(Dialect))
    paths = Counter(door.path for doors in DIALECTS.values() for door in doors(engine))
    ours = {getattr(route, "path", "") for route in service.app.routes}
    assert [path for path, count in paths.items() if count > 1 or path in ours] == []


async def test_another_method_is_405(serve: Serve) -> None:
    """A door opens for its methods alone."""
    assert (await (await serve()).http.get("/run_code")).status_code == 405


async def test_keys(serve: Serve, tmp_path: Path) -> None:
    """Where keys are needed a door asks for its own scope, and a ping for none."""
    runs, sees = new_key(), new_key()
    file = tmp_path / "keys.toml"
    file.write_text(f"{stanza(runs, 'team', ['run'])}\n{stanza(sees, 'ops', ['admin'])}\n")
    http = (await serve(gateway={"keys_file": str(file)})).http

    async def status(**headers: str) -> int:
        return (await http.post("/run_code", json={"code": "echo"}, headers=headers)).status_code

    assert await status() == 401
    assert await status(authorization=f"Bearer {sees}") == 403
    assert await status(authorization=f"Bearer {runs}") == 200
    assert await status(**{"x-api-key": runs}) == 200
    assert (await http.get("/v1/ping")).status_code == 200


async def test_the_work_of_a_batch_lets_others_have_their_turn() -> None:
    """What goes on until another task has come to its turn does not go on for ever."""
    came = []

    async def other() -> None:
        came.append(True)

    task = asyncio.create_task(other())
    assert {*await in_turns(iter(lambda: bool(came), True))} == {False}
    await task


def test_a_call_of_wrong_fields_is_invalid() -> None:
    """What is wrong with a call that a language builds is an InvalidCall that names the field."""
    with pytest.raises(InvalidCall, match=r"^files\.a/b: Input should be base64$"):
        make_file("a/b", "%")
    with pytest.raises(InvalidCall, match=r"^files: Value error, 'a' cannot be a file and a folder$"):
        make_call(code="", files={"a": "", "a/b": ""})


async def test_a_permit_larger_than_a_tenant_s_is_too_large(serve: Serve, tmp_path: Path) -> None:
    """A batch that never fits is 413 and not 429, so that nobody sends it again."""
    key = new_key()
    file = tmp_path / "keys.toml"
    file.write_text(f"{stanza(key, 'team', ['run'])}\n[tenants.team]\nmax_in_flight = 2\n")
    async with spoken(speak(await serve(gateway={"keys_file": str(file)}), run_all)) as http:
        answer = await http.post(PATH, json={"codes": ["echo"] * 3}, headers={"x-api-key": key})
    assert answer.text.startswith(f"{CallTooLarge.__name__}: calls: 3 at once")
