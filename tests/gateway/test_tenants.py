"""API keys: who comes in, to what, and what happens when the file changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import tenants as tenants_module
from gateway.app import create_app
from gateway.metrics import Metrics
from gateway.tenants import KeyRing, Tenant, scope_of
from sandbox.api_keys import TENANT_PATTERN, new_key, stanza
from sandbox.errors import ConfigError
from sandbox.queue import CallQueue
from sandbox.settings import GatewaySettings, RedisSettings, Settings

from .conftest import Serve, Service, until

RUN, ADMIN, BOTH = new_key(), new_key(), new_key()
FILE = f"""
{stanza(RUN, "team-a", ["run"])}
{stanza(ADMIN, "ops", ["admin"])}
{stanza(BOTH, "team-b", ["run", "admin"])}
[tenants.team-a]
weight = 2
max_in_flight = 5
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A file with one key for each need."""
    path = tmp_path / "keys.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes of a file are seen at once."""
    monkeypatch.setattr(tenants_module, "LOOK_EVERY_S", 0.001)


def write(path: Path, text: str) -> None:
    """Change a file in its place."""
    path.write_text(text)


def replace(path: Path, text: str) -> None:
    """Put another file in the place of one."""
    other = path.with_name("other.toml")
    other.write_text(text)
    other.replace(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def run(service: Service, headers: dict[str, str], code: str = "echo") -> httpx.Response:
    return await service.http.post("/v1/run", json={"code": code}, headers=headers)


def error(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["name"]


def test_a_key_is_found_with_its_tenant_and_scopes(keys_file: Path) -> None:
    """What the file says of a tenant is what its keys bring with them, and the rest has the defaults."""
    ring = KeyRing(str(keys_file), Metrics())
    found = [ring.find(key.encode()) for key in (RUN, ADMIN, BOTH)]
    assert [known and (known.tenant, known.scopes) for known in found] == [
        (Tenant("team-a", weight=2, max_in_flight=5), {"run"}),
        (Tenant("ops", weight=1, max_in_flight=None), {"admin"}),
        (Tenant("team-b"), {"run", "admin"}),
    ]


@given(st.binary() | st.sampled_from([RUN[:-1].encode(), f"{RUN} ".encode(), RUN.upper().encode()]))
def test_no_other_key_is_found(key: bytes) -> None:
    """Nothing but the very key opens."""
    ring = KeyRing("", Metrics())
    ring._keys = tenants_module._read_text(FILE)
    assert ring.find(key) is None


async def test_both_headers_show_a_key(serve: Serve, keys_file: Path) -> None:
    """`Authorization: Bearer` and `X-API-Key` are read alike; what a proxy wants in the first leaves the second."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    for headers in (
        {"authorization": f"bearer   {RUN}"},
        {"x-api-key": RUN},
        {"authorization": "Basic eDp5", "x-api-key": RUN},
    ):
        assert (await run(service, headers)).status_code == 200
    assert error(await run(service, bearer("x") | {"x-api-key": RUN})) == (401, "Unauthorized")


async def test_without_a_known_key_nothing_is_read(serve: Serve, keys_file: Path) -> None:
    """A stranger is told what is missing, in the standard header too, and takes no permit."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    for headers, words in (
        ({}, "needs an API key"),
        (bearer("rsk_wrong"), "not known"),
        ({"x-api-key": ""}, "not known"),
        ({"authorization": RUN}, "needs an API key"),
    ):
        response = await run(service, headers)
        assert error(response) == (401, "Unauthorized")
        assert response.headers["www-authenticate"] == "Bearer"
        assert words in response.json()["error"]["message"]
    assert service.worker.seen == []


#: Each path, and which keys open it.
NEEDS = {
    "/healthz": None,
    "/readyz": None,
    "/docs": None,
    "/docs/files/swagger-ui.css": None,
    "/openapi.json": None,
    "/v1/run": "run",
    "/v1/batch": "run",
    "/v1/status": "run",
    "/v1/jobs": "run",
    "/v1/jobs/a": "run",
    "/v1/jobs/a/b": "run",
    "/v1/jobs/{call_id:path}": "run",
    "/v1/judge": "run",
    "/v1/judge/batch": "run",
    "/metrics": "admin",
    "/v1/dead": "admin",
    "/v1/dead/1-1": "admin",
    "/v1/dead/1-1/send": "admin",
    "/": "admin",
    "/v1/run/": "admin",
    "/v1/runs": "admin",
    "/V1/run": "admin",
    "/healthz/x": "admin",
    "/docs/files": "admin",
    "/v1/jobsx": "admin",
    "/v1/grade/math": "run",
    "/v1/grade/math/batch": "run",
}


@pytest.mark.parametrize(("path", "needed"), NEEDS.items())
async def test_each_path_needs_its_scope(
    serve: Serve, keys_file: Path, path: str, needed: str | None
) -> None:
    """Probes and docs are open, calls need `run`, and all else, also what is not there, needs `admin`."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    answers = [
        (await service.http.get(path, headers=headers)).status_code
        for headers in ({}, bearer(RUN), bearer(ADMIN), bearer(BOTH))
    ]
    passes = {None: [True] * 4, "run": [False, True, False, True], "admin": [False, False, True, True]}[
        needed
    ]
    assert [code not in {401, 403} for code in answers] == passes
    assert answers[0] == 401 or needed is None
    assert scope_of(path) == needed


@pytest.mark.parametrize("path", ["/v1/run%0a", "/run%0a", "/openenv/step%0a", "/mcp%0a"])
async def test_a_line_s_end_behind_a_path_changes_no_scope(serve: Serve, keys_file: Path, path: str) -> None:
    """The patterns of routes let it pass; a key that is good for metrics alone runs no program that way."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    for headers, code in [({}, 401), (bearer(ADMIN), 403)]:
        assert (await service.http.post(path, content=b'{"code": ""}', headers=headers)).status_code == code


def test_every_route_is_listed() -> None:
    """A route of the app that is open or needs `run` is so on purpose: it stands in the table above."""
    app = create_app(Settings(), CallQueue(RedisSettings(url="unix:///nowhere")))
    paths = {getattr(route, "path", "") for route in app.routes}
    assert {path for path in paths if scope_of(path) != "admin"} <= NEEDS.keys()


async def test_without_a_file_all_is_open(serve: Serve) -> None:
    """No key is asked for, and none is looked at."""
    service = await serve()
    for path in NEEDS:
        assert (await service.http.get(path, headers=bearer("x"))).status_code not in {401, 403}


async def test_a_tenant_s_bound_holds(serve: Serve, keys_file: Path) -> None:
    """With as many calls in flight as the file allows, one more is 429; another tenant's is not."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    held = [asyncio.create_task(run(service, bearer(RUN), "hold")) for _ in range(5)]
    await service.worker.has_seen(5)
    refused = await run(service, bearer(RUN))
    assert error(refused) == (429, "Overloaded")
    assert refused.json()["error"]["message"] == "tenant team-a has its 5 calls in flight here"
    assert (await run(service, bearer(BOTH))).status_code == 200
    metrics = (await service.http.get("/metrics", headers=bearer(ADMIN))).text
    assert 'sandbox_gateway_shed_calls_total{reason="tenant"} 1.0' in metrics
    assert 'sandbox_gateway_tenant_in_flight_calls{tenant="team-a"} 5.0' in metrics
    service.worker.released.set()
    assert [(await task).status_code for task in held] == [200] * 5


async def test_a_changed_file_holds_from_then_on(serve: Serve, keys_file: Path, look_often: None) -> None:
    """A key that is taken out opens no more, and one that is put in does, also when the file is replaced."""
    service = await serve(gateway={"keys_file": str(keys_file)})
    new = new_key()
    replace(keys_file, stanza(new, "team-c", ["run"]))
    ring = service.gateway.keys
    await until(lambda: ring.find(new.encode()))
    assert (await run(service, bearer(new))).status_code == 200
    assert (await run(service, bearer(RUN))).status_code == 401
    write(keys_file, "keys = []\n")
    await until(lambda: not ring.find(new.encode()))
    assert (await run(service, bearer(new))).status_code == 401


BROKEN = {
    "no TOML": "[[keys",
    "an empty file": "",
    "no key in it": "[tenants.team-a]\n",
    "an unknown field": FILE + "more = 1\n",
    "an unknown table": FILE + "[tenant.team-b]\nweight = 2\n",
    "a short digest": FILE.replace('sha256 = "', 'sha256 = "x', 1),
    "a scope that is none": FILE.replace('["admin"]', '["root"]'),
    "no scope": FILE.replace('["admin"]', "[]"),
    "a tenant's name": FILE.replace('"ops"', '"Ops"'),
    "a name of nothing": FILE.replace('"ops"', '""'),
    "a weight of nothing": FILE.replace("weight = 2", "weight = 0"),
    "no calls": FILE.replace("max_in_flight = 5", "max_in_flight = 0"),
    "the same key twice": FILE.replace("[tenants", f"{stanza(RUN, 'team-b', ['run'])}\n[tenants"),
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_that_is_broken_at_the_start_stops_it(keys_file: Path, what: str) -> None:
    """The start is refused with the file's name, and no key or digest is quoted."""
    keys_file.write_bytes(BROKEN[what].encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        create_app(
            Settings(gateway=GatewaySettings(keys_file=str(keys_file))),
            CallQueue(RedisSettings(url="unix:///nowhere")),
        )
    assert str(keys_file) in caught.value.message
    assert not [line for line in FILE.splitlines() if "sha256" in line and line in caught.value.message]


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    """A name that leads nowhere does not mean that all is open."""
    with pytest.raises(ConfigError, match="cannot read the keys file"):
        KeyRing(str(tmp_path / "nowhere.toml"), Metrics())


async def test_a_file_that_breaks_later_leaves_the_keys(
    serve: Serve, keys_file: Path, look_often: None, caplog: pytest.LogCaptureFixture
) -> None:
    """The keys from before hold; the log says it once for each change, and a metric until it is mended."""
    service = await serve(gateway={"keys_file": str(keys_file)})

    def stale_s() -> Any:
        return service.gateway.metrics.registry.get_sample_value("sandbox_gateway_keys_stale_seconds")

    def errors() -> int:
        return sum(record.levelno == logging.ERROR for record in caplog.records)

    breakages: list[Callable[[], object]] = [lambda: write(keys_file, "[[keys"), keys_file.unlink]
    for count, break_it in enumerate(breakages, start=1):
        break_it()
        await until(lambda count=count: errors() == count)
        before = stale_s()
        await until(lambda before=before: stale_s() > before)
        assert (await run(service, bearer(RUN))).status_code == 200
        assert errors() == count
    write(keys_file, FILE)
    await until(lambda: stale_s() == 0)
    assert not [record for record in caplog.records if RUN in record.getMessage()]


def test_the_description_has_the_keys(keys_file: Path) -> None:
    """With keys on, /openapi.json says how one is shown, which routes need none, and what refusals look like."""
    described = create_app(
        Settings(gateway=GatewaySettings(keys_file=str(keys_file))),
        CallQueue(RedisSettings(url="unix:///nowhere")),
    ).openapi()
    assert described["components"]["securitySchemes"].keys() == {"bearer", "header"}
    assert described["security"] == [{"bearer": []}, {"header": []}]
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            if method == "parameters":
                continue  # of the path, whatever the method
            if scope_of(path) is None:
                assert operation["security"] == []
                assert not {"401", "403"} & operation["responses"].keys()
            else:
                assert "security" not in operation
                assert repr(scope_of(path)) in operation["responses"]["403"]["description"]
    plain = create_app(Settings(), CallQueue(RedisSettings(url="unix:///nowhere"))).openapi()
    assert "securitySchemes" not in plain["components"]
    assert "401" not in plain["paths"]["/v1/run"]["post"]["responses"]


@given(st.from_regex(TENANT_PATTERN, fullmatch=True))
def test_any_stanza_is_read_again(tenant: str) -> None:
    """What `sandbox keys new` writes is what a gateway reads."""
    key = new_key()
    [known] = tenants_module._read_text(stanza(key, tenant, ["run", "admin"]))
    assert (known.tenant, known.scopes) == (Tenant(tenant), {"run", "admin"})
