"""Who may come in.

Theory of operation. The setting `gateway.keys_file` names a TOML file of keys, by their SHA-256, and of the
tenants that they belong to:

    [[keys]]
    sha256 = "5e88...d8"
    tenant = "team-a"
    scopes = ["run"]        # or "admin", or both

    [tenants.team-a]        # may be left out
    weight = 2              # its share of a full service, beside the others'; 1
    max_in_flight = 500     # calls that one gateway process holds for it; no bound of its own

Each request passes `Authentication` before any route. It looks up the request's key, holds its scopes against
those of the path, and lays the tenant into the scope, where `tenant_of` finds it. A path that is not listed here, nor
a door of a dialect, needs `admin`, so that a route which somebody adds is closed until somebody opens it. Without a
keys file every path is open and every request is ANONYMOUS.

One loop of this process looks once a second whether the file has changed, and reads it then; requests that are
in meanwhile stay. A file that is broken at the start stops the start. One that breaks later changes nothing: the
keys from before hold, the log has one error for each change, and `sandbox_gateway_keys_stale_seconds` counts
until it is mended. Nobody can be locked out, or let in, by half of a file: an editor that empties it before it
writes leaves one without `keys`, which counts as broken, while `keys = []` means nobody. The loop begins when
Redis was first reached; until then no call is served anyway.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from gateway.metrics import Metrics
from sandbox.api_keys import Scope, TenantName, digest_of
from sandbox.calls import first_error
from sandbox.errors import ConfigError, Forbidden, Unauthorized
from sandbox.process import told_within

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

_OPEN = frozenset({"/healthz", "/readyz", "/docs", "/openapi.json"})
_OPEN_BELOW = "/docs/files/"
_RUN = frozenset({"/v1/run", "/v1/batch", "/v1/jobs", "/v1/status", "/v1/judge", "/v1/judge/batch"})
_RUN_BELOW = ("/v1/jobs/", "/v1/grade/")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever shares one name in the keys file, and what of the service is theirs."""

    name: str
    weight: int = 1
    max_in_flight: int | None = None


#: Everybody, where there are no keys.
ANONYMOUS = Tenant("")


def tenant_of(connection: Connection) -> Tenant:
    """Whose request this is. Every request that a route sees has one."""
    tenant: Tenant = connection["tenant"]
    return tenant


def scope_of(path: str) -> Scope | None:
    """What a key must be good for on this path; None: nobody needs one."""
    if path in _OPEN or path.startswith(_OPEN_BELOW):
        return None
    return "run" if path in _RUN or path.startswith(_RUN_BELOW) else "admin"


def folder_of(path: str) -> str:
    """The door that opens all below it, `/folder/`, if there were one on the way to this path."""
    return f"/{path[1:].partition('/')[0]}/"


class Authentication:
    """Lets nobody pass whom the keys do not, and tells the routes whose request it is.

    `doors` are paths beside those of our own, each with the scope that it takes.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, doors: Mapping[str, Scope | None]) -> None:
        self._app = app
        self._keys = keys
        self._doors = doors

    async def __call__(self, connection: Connection, receive: Receive, send: Send) -> None:
        """Pass a request on. Raises Unauthorized and Forbidden."""
        if connection["type"] in {"http", "websocket"}:
            needed = self._needed(connection["path"]) if self._keys.are_needed else None
            connection["tenant"] = ANONYMOUS if needed is None else self._admit(connection, needed)
        await self._app(connection, receive, send)

    def _needed(self, path: str) -> Scope | None:
        path = path.removesuffix(
            "\n"
        )  # as the routes see it: a pattern's `$` matches before a line's end, too
        for door in (path, folder_of(path)):
            if door in self._doors:
                return self._doors[door]
        return scope_of(path)

    def _admit(self, connection: Connection, needed: Scope) -> Tenant:
        presented = _presented(connection["headers"])
        if presented is None:
            raise Unauthorized("this needs an API key: send `Authorization: Bearer KEY`, or `X-API-Key: KEY`")
        known = self._keys.find(presented)
        if known is None:
            raise Unauthorized("this API key is not known here")
        if needed not in known.scopes:
            raise Forbidden(f"this needs a key with the scope {needed!r}, which this one has not")
        return known.tenant


def _presented(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key of a request. `Authorization` may hold what a proxy wants instead; then the other one counts."""
    named = dict(headers)
    scheme, _, bearer = named.get(b"authorization", b"").partition(b" ")
    return bearer.strip() if scheme.lower() == b"bearer" else named.get(b"x-api-key")


class _Known(NamedTuple):
    """A key of the file."""

    digest: bytes
    tenant: Tenant
    scopes: frozenset[Scope]


class _FileState(NamedTuple):
    """What tells one state of a file from the next."""

    changed_ns: int
    inode: int
    size: int


class KeyRing:
    """The keys that hold now. Raises ConfigError for a file that is broken."""

    def __init__(self, path: str, metrics: Metrics) -> None:
        self.are_needed = bool(path)
        self._path = Path(path)
        self._stale_seconds = metrics.keys_stale_seconds
        self._stale_since: float | None = None
        self._state = _state_of(self._path) if path else None
        self._keys = _read(self._path) if path else []

    def find(self, key: bytes) -> _Known | None:
        """Who shows this key. It takes as long for any key, so that nobody learns from the time."""
        digest = digest_of(key)
        found = None
        for known in self._keys:
            if hmac.compare_digest(known.digest, digest):
                found = known
        return found

    async def watch(self, stop: asyncio.Event) -> None:
        """Follow the file until told to stop."""
        while self.are_needed and not await told_within(stop, LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        # The state is asked for first: what is written between the two is seen a second later.
        state = _state_of(self._path)
        now = asyncio.get_running_loop().time()
        if state != self._state:
            self._state = state
            try:
                self._keys = _read(self._path)
            except ConfigError as exc:
                log.error(  # noqa: TRY400 - a traceback would say no more
                    "keys file is broken", extra={"reason": exc.message, "keys": len(self._keys)}
                )
                if self._stale_since is None:
                    self._stale_since = now
            else:
                log.info("keys read", extra={"keys": len(self._keys)})
                self._stale_since = None
        self._stale_seconds.set(now - self._stale_since if self._stale_since is not None else 0.0)


def _state_of(path: Path) -> _FileState | None:
    """None where there is none; `_read` says why."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _FileState(found.st_mtime_ns, found.st_ino, found.st_size)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Key(_Strict):
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    tenant: TenantName
    scopes: frozenset[Scope] = Field(min_length=1)


class _Share(_Strict):
    weight: int = Field(default=1, ge=1, le=1000)
    max_in_flight: int | None = Field(default=None, ge=1)


class _KeysFile(_Strict):
    keys: list[_Key]
    #: One without a key is no mistake: its keys may just have been taken away.
    tenants: dict[TenantName, _Share] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_entry_for_each_key(self) -> Self:
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ValueError("two of the keys have the same sha256")
        return self


def _read(path: Path) -> list[_Known]:
    try:
        return _read_text(path.read_text(encoding="utf-8"))
    except ValidationError as exc:
        raise ConfigError(f"the keys file {path}: {first_error(exc)}") from exc
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read the keys file {path}: {exc}") from exc


def _read_text(text: str) -> list[_Known]:
    file = _KeysFile.model_validate(tomllib.loads(text))
    tenants = {name: Tenant(name, share.weight, share.max_in_flight) for name, share in file.tenants.items()}
    return [
        _Known(bytes.fromhex(key.sha256), tenants.get(key.tenant, Tenant(key.tenant)), key.scopes)
        for key in file.keys
    ]
