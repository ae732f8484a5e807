"""Calls whose result is asked for later, and their end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from sandbox.api_keys import new_key, stanza
from sandbox.calls import ToolResult
from sandbox.settings import RedisSettings
from tests.conftest import RunningRedis

from .conftest import Serve, Service, bench, opened, until


async def post(service: Service, **call: Any) -> httpx.Response:
    return await service.http.post("/v1/jobs", json=call)


async def get(service: Service, call_id: str, wait_s: float | None = None) -> httpx.Response:
    params = {} if wait_s is None else {"wait": wait_s}
    return await service.http.get(f"/v1/jobs/{quote(call_id, safe='')}", params=params)


async def delete(service: Service, call_id: str) -> httpx.Response:
    return await service.http.delete(f"/v1/jobs/{quote(call_id, safe='')}")


def error(response: httpx.Response) -> str:
    return str(response.json()["error"]["name"])


async def test_a_job_is_asked_for_until_it_is_done(serve: Serve) -> None:
    """202 with its id until there is a result; then that, byte for byte, from any gateway and more than once."""
    one, other = await serve(), await serve()
    queued = await post(one, id="a", code="hold")
    assert (queued.status_code, queued.json()) == (202, {"id": "a", "status": "pending"})
    assert one.gateway.admission.held == 1  # until its end: a job is a call in flight like any other
    await one.worker.has_seen(1)
    for service in (one, other):
        pending = await get(service, "a")
        assert (pending.status_code, pending.json()) == (202, {"id": "a", "status": "pending"})
    one.worker.released.set()
    answers = [await get(service, "a", wait_s=30) for service in (one, other, one)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].content == ToolResult.model_validate_json(answers[0].content).model_dump_json().encode()
    assert len(one.worker.seen) == 1
    await until(lambda: one.gateway.admission.held == 0)


async def test_a_result_is_waited_for(serve: Serve) -> None:
    """A GET that waits is answered as soon as the result is there, at the gateway that was asked and at another."""
    one, other = await serve(), await serve()
    await post(one, id="a", code="hold")
    waiting = [asyncio.create_task(get(service, "a", wait_s=30)) for service in (one, other, other)]
    await until(lambda: one.gateway.admission.held == other.gateway.admission.held == 2)
    await one.worker.has_seen(1)
    one.worker.released.set()
    assert [(await task).json()["status"] for task in waiting] == ["ok"] * 3
    await until(lambda: one.gateway.admission.held == other.gateway.admission.held == 0)


async def test_a_wait_ends(serve: Serve) -> None:
    """After the time that was asked for the answer is 202, and the job goes on."""
    service = await serve()
    await post(service, id="a", code="hold")
    await service.worker.has_seen(1)
    for _ in range(3):
        assert (await get(service, "a", wait_s=0.02)).status_code == 202
    [waiting] = service.gateway.replies
    assert waiting.callers == 1  # the gateway itself
    service.worker.released.set()
    assert (await get(service, "a", wait_s=30)).status_code == 200


@pytest.mark.parametrize("wait", ["-1", "soon", "nan", "inf"])
async def test_a_wait_that_is_no_time(serve: Serve, wait: str) -> None:
    """Garbage is refused by name."""
    answer = await (await serve()).http.get("/v1/jobs/a", params={"wait": wait})
    assert (answer.status_code, error(answer)) == (422, "InvalidCall")
    assert answer.json()["error"]["message"].startswith("wait: ")


async def test_a_fault_is_an_answer(serve: Serve) -> None:
    """Of a job a fault is kept and shown as the result that it is; sent again the job runs anew."""
    service = await serve()
    await post(service, id="a", code="fault")
    for _ in range(2):
        answer = await get(service, "a", wait_s=30)
        assert (answer.status_code, answer.json()["status"]) == (200, "internal_error")
    assert answer.json()["reason"] == "the jail broke"
    await post(service, id="a", code="fault")
    await service.worker.has_seen(2)


@pytest.mark.parametrize(
    ("also", "error_name"),
    [({"code": "hold", "deadline_s": 0.1}, "InternalError"), ({"code": "echo"}, "InvalidCall")],
)
async def test_a_job_that_is_sent_otherwise_meanwhile(
    serve: Serve, also: dict[str, Any], error_name: str
) -> None:
    """Who waits for a job is not told what was wrong with another sending of its id: a deadline, a program."""
    service = await serve()
    await post(service, id="a", code="hold")
    await service.worker.has_seen(1)
    waiting = asyncio.create_task(get(service, "a", wait_s=30))
    await until(lambda: len(service.gateway.replies) == 1)
    assert error(await service.http.post("/v1/run", json={"id": "a", **also})) == error_name
    assert (await waiting).status_code == 202
    service.worker.released.set()
    assert (await get(service, "a", wait_s=30)).json()["status"] == "ok"


async def test_nobody_knows_it(serve: Serve) -> None:
    """An id that was never sent, or that no call can have, is 404, and to end it ends nothing."""
    service = await serve()
    for call_id in ("a", "b/c"):
        unknown = await get(service, call_id, wait_s=30)
        assert (unknown.status_code, error(unknown)) == (404, "NotFound")
        ended = await delete(service, call_id)
        assert (ended.status_code, ended.json()) == (200, {"id": call_id, "cancelled": False})
    for call_id in ("a|b", "a b", "ä", "x" * 129, "a\nb"):
        assert [(await ask(service, call_id)).status_code for ask in (get, delete)] == [404, 404]
    assert service.gateway.admission.held == 0


@pytest.mark.parametrize("call_id", ["a/b", "/", "//a", "a/", "../v1/run", "a:b._-/c"])
async def test_any_id_fits_into_the_path(serve: Serve, call_id: str) -> None:
    """Slashes and dots are part of ids, and reach us when they are quoted."""
    service = await serve()
    assert (await post(service, id=call_id, code="echo 1")).status_code == 202
    answer = await get(service, call_id, wait_s=30)
    assert (answer.json()["id"], answer.json()["stdout"]) == (call_id, "1")
    assert (await delete(service, call_id)).json() == {"id": call_id, "cancelled": False}


async def test_every_call_is_known_by_its_id(serve: Serve) -> None:
    """A call that came by another route can be asked for too; a call that is a job can be waited for."""
    service = await serve()
    held = asyncio.create_task(service.http.post("/v1/run", json={"id": "a", "code": "hold"}))
    await service.worker.has_seen(1)
    assert (await get(service, "a")).status_code == 202
    assert (await post(service, id="a", code="hold")).status_code == 202
    waiting = asyncio.create_task(get(service, "a", wait_s=30))
    await until(lambda: service.gateway.admission.held == 2)
    service.worker.released.set()
    assert (await held).content == (await waiting).content
    assert (await service.http.post("/v1/run", json={"id": "a", "code": "hold"})).content == (
        await held
    ).content
    assert len(service.worker.seen) == 1


async def test_a_different_job_is_refused(serve: Serve) -> None:
    """An id stands for one call, also of a job."""
    service = await serve()
    await post(service, id="a", code="hold")
    refused = await post(service, id="a", code="echo")
    assert (refused.status_code, error(refused)) == (422, "InvalidCall")


async def test_the_end_of_a_job(serve: Serve, redis_of_test: RedisSettings) -> None:
    """DELETE tells the worker to stop, whoever waits gets Cancelled, and afterwards nobody knows the call."""
    one, other = await serve(), await serve()
    calls = {"calls": [{"id": "a", "code": "hold"}, {"id": "b", "code": "hold"}]}
    lines = {"accept": "application/x-ndjson"}
    waiting = [
        asyncio.create_task(one.http.post("/v1/run", json={"id": "a", "code": "hold"})),
        asyncio.create_task(other.http.post("/v1/batch", json=calls)),
        asyncio.create_task(other.http.post("/v1/batch", json=calls, headers=lines)),
    ]
    await one.worker.has_seen(2)
    await until(lambda: all(waiting.is_put for waiting in other.gateway.replies))
    waiting.append(asyncio.create_task(get(one, "a", wait_s=30)))
    await until(lambda: (one.gateway.admission.held, other.gateway.admission.held) == (2, 4))
    async with opened(redis_of_test) as queue:
        ended = await delete(other, "a")
        assert (ended.status_code, ended.json()) == (200, {"id": "a", "cancelled": True})
        (order,) = await queue.orders("echo")
        assert order in [delivery.place for delivery in one.worker.seen if delivery.call.id == "a"]
    assert (await get(one, "a")).status_code == 404
    assert (await delete(one, "a")).json()["cancelled"] is False
    one.worker.released.set()
    run, batch, ndjson, asked = [await task for task in waiting]
    for answer in (run, asked):
        assert (answer.status_code, error(answer)) == (409, "Cancelled")
    assert batch.json()["results"][0]["error"]["name"] == "Cancelled"
    assert batch.json()["results"][1]["status"] == "ok"
    assert '{"index":0,"error":{"name":"Cancelled"' in ndjson.text


async def test_a_job_that_waits_is_ended(serve: Serve, redis_of_test: RedisSettings) -> None:
    """No worker gets it any more, though nobody waited for it."""
    service = await serve()
    await service.worker.rest()
    await post(service, id="a", code="echo")
    assert (await delete(service, "a")).json()["cancelled"] is True
    async with opened(redis_of_test) as queue:
        assert await queue.take("other", 1, block_s=0) == []
    assert (await get(service, "a")).status_code == 404


async def test_a_job_outlives_its_gateway(serve: Serve, redis_of_test: RedisSettings) -> None:
    """It is in Redis alone, so a gateway that ends takes nothing with it."""
    one, other = await serve(), await serve()
    await post(one, id="a", code="hold")
    await one.worker.has_seen(1)
    waiting = asyncio.create_task(get(one, "a", wait_s=30))
    await until(lambda: one.gateway.admission.held == 1)
    await one.gateway.drain(0.0)
    assert (await waiting).status_code == 503
    one.worker.released.set()
    assert (await get(other, "a", wait_s=30)).json()["status"] == "ok"


async def test_a_job_is_answered_by_its_deadline(serve: Serve) -> None:
    """Whoever asks for a job whose worker is silent gets a fault at its deadline, and not only when a lease has ended."""
    service = await serve()
    assert (await post(service, id="silent", code="lose", deadline_s=0.5)).status_code == 202
    await service.worker.has_seen(1)
    answer = await service.http.get("/v1/jobs/silent", params={"wait": 20})
    assert (answer.status_code, answer.json()["status"]) == (200, "internal_error")
    assert "did not answer by its deadline" in answer.json()["reason"]
    again = await service.http.get("/v1/jobs/silent")
    assert (again.status_code, again.json()["status"]) == (200, "internal_error")


async def test_a_job_is_put_again_into_a_redis_that_has_started_anew(any_redis: RunningRedis) -> None:
    """A job that was taken is run and answered, though nobody waits for it when Redis loses everything."""
    async with bench(any_redis.settings) as serve:
        service = await serve()
        assert (await post(service, id="a", code="hold")).status_code == 202
        await service.worker.has_seen(1)
        any_redis.kill()
        await any_redis.start()
        await service.worker.has_seen(2)
        service.worker.released.set()
        answer = await get(service, "a", wait_s=30)
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")


async def test_jobs_count_against_their_tenant(serve: Serve, tmp_path: Path) -> None:
    """A tenant's bound holds for its jobs, as long as they are under way."""
    keys_file, key = tmp_path / "keys.toml", new_key()
    keys_file.write_text(f"{stanza(key, 'team-a', ['run'])}[tenants.team-a]\nmax_in_flight = 2\n")
    service = await serve(gateway={"keys_file": str(keys_file)})
    service.http.headers["authorization"] = f"Bearer {key}"
    for _ in range(2):
        assert (await post(service, code="hold")).status_code == 202
    assert (await post(service, code="hold")).status_code == 429
    service.worker.released.set()
    await until(lambda: service.gateway.admission.held == 0)
    assert (await post(service, code="echo")).status_code == 202


async def test_a_job_that_has_its_result_already_holds_nothing(serve: Serve) -> None:
    """A job that is sent again when it is done takes no place for longer than its request."""
    service = await serve()
    for _ in range(2):
        assert (await post(service, id="a", code="echo 1")).status_code == 202
        await until(lambda: service.gateway.admission.held == 0)
    assert len(service.worker.seen) == 1
    assert len(service.gateway.replies) == 0
