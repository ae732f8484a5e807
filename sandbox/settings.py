"""All settings, read once by each program's `main` and handed down by section.

Sources, strongest first: the environment (`SANDBOX_<SECTION>__<NAME>`, e.g. `SANDBOX_GATEWAY__PORT=8000`), then
the TOML file that `SANDBOX_CONFIG` names (`[gateway]` / `port = 8000`), then the defaults below. `REDIS_URL` is
understood as `SANDBOX_REDIS__URL`, which wins over it. `SANDBOX_API_KEY` is the key of a caller and none of the
service's business. Any other name that nobody knows stops the start, with the nearest name that we do know.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from sandbox.calls import MIB, Limits, Network, first_error
from sandbox.errors import ConfigError

PREFIX = "SANDBOX_"
API_KEY = f"{PREFIX}API_KEY"
_CONFIG = f"{PREFIX}CONFIG"
_NO_SETTINGS = {_CONFIG, API_KEY}

#: While one call runs, others are set up or settled, and what is ready at one time shares its round trips. With 2 and 4
#: for each of two cores, 32 callers of `print(1)` got 365 and 467 calls a second.
SLOTS_PER_CORE = 4


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RedisSettings(_Section):
    """Where the queue lives."""

    url: str = Field(
        default="",
        description="redis://, rediss:// (TLS), unix://, sentinel:// or sentinels:// (TLS); see README.md. "
        "Empty: `sandbox up` starts its own.",
    )
    namespace: str = Field(
        default="sandbox",
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Prefix of every key, so that several services can share one Redis.",
    )


#: Languages of other services that a gateway speaks (gateway/dialects).
Dialect = Literal["sandbox_fusion", "code_judge", "nemo_skills", "piston", "mcp", "openenv"]


def _listed(value: object) -> object:
    return [name for part in value.split(",") if (name := part.strip())] if isinstance(value, str) else value


class Address(NamedTuple):
    """Where somebody listens."""

    host: str
    port: int


_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\[\]:\s]+)):([0-9]{1,5})")


def _addresses(value: object) -> object:
    """Of texts."""
    listed = _listed(value)
    return [*map(_address, listed)] if isinstance(listed, list) else listed


def _address(text: object) -> Address:
    match = _ADDRESS.fullmatch(text) if isinstance(text, str) else None
    if match is None or int(match[3]) > 65535:
        raise PydanticCustomError("address", "Input should be HOST:PORT, or [HOST]:PORT for IPv6")
    return Address(match[1] or match[2], int(match[3]))


class GatewaySettings(_Section):
    """HTTP in, HTTP out."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535, description="0 takes a free one.")
    also: Annotated[tuple[Address, ...], BeforeValidator(_addresses)] = Field(
        default=(),
        description="HOST:PORT of further addresses, with commas between, for callers who know no other.",
    )
    max_in_flight: int = Field(
        default=10_000, ge=1, description="Calls that one gateway process holds; one more is answered 429."
    )
    # 10,000 calls of 50 KiB. While it is put into the queue a call takes twice its bytes in memory, and five times
    # where a character beyond U+FFFF makes each of its text four bytes wide.
    max_in_flight_bytes: int = Field(
        default=512 * MIB,
        ge=1024,
        description="Bytes of requests that one gateway process holds; a request beyond them is answered 429.",
    )
    max_body_bytes: int = Field(
        default=16 * MIB, ge=1024, description="Largest request; a larger one gets 413."
    )
    max_batch: int = Field(default=1024, ge=1, description="Most calls in one batch request.")
    max_backlog: int = Field(
        default=100_000,
        ge=1,
        description="Calls of one priority that may wait in Redis, whoever put them; one more is answered 429.",
    )
    notice_s: float = Field(
        default=5.0,
        ge=0,
        description="How long calls are still taken after SIGTERM, so that balancers notice first.",
    )
    keys_file: str = Field(
        default="", description="TOML file of API keys (gateway/tenants.py). Empty: everybody may do all."
    )
    insecure: bool = Field(
        default=False, description="Serve other machines without API keys; else such a start is refused."
    )
    dialects: Annotated[tuple[Dialect, ...], BeforeValidator(_listed)] = Field(
        default=get_args(Dialect),
        description="Languages of other services that are spoken too, with commas between; empty: none.",
    )


#: From weak to strong; SECURITY.md says what each protects.
Level = Literal["process", "namespaces", "strict"]


class CeilingSettings(_Section):
    """The most that a call may ask for. More is refused with 422, never clamped."""

    wall_s: float = Field(default=60.0, gt=0)
    cpu_s: float = Field(default=60.0, gt=0)
    memory_bytes: int = Field(default=2048 * MIB, ge=16 * MIB)
    output_bytes: int = Field(default=1 * MIB, ge=0)
    processes: int = Field(default=256, ge=1)
    deadline_s: float = Field(default=3600.0, gt=0)
    network: Network = Field(
        default="none",
        description="`loopback` lets calls ask for sockets among their processes, and opens that much of the kernel.",
    )

    def defaults(self) -> Limits:
        """Limits of a call that names none: ours, or the ceiling where that is lower."""
        ours = Limits()
        return Limits.model_validate({name: min(value, getattr(self, name)) for name, value in ours})


class WorkerSettings(_Section):
    """Queue in, queue out."""

    slots: int = Field(
        default=0,
        ge=0,
        le=4095,  # MAX_SLOTS of sandbox/jail/policy.py: a user for each
        description="Calls that one worker runs at a time. 0: four for each usable core.",
    )
    lease_s: float = Field(
        default=10.0, gt=0.5, description="A worker silent for this long loses its calls to another worker."
    )
    grace_s: float = Field(default=30.0, ge=0, description="How long running calls may finish after SIGTERM.")
    metrics_port: int = Field(
        default=-1, ge=-1, le=65535, description="Port of /metrics. -1: none, 0: a free one."
    )


def _not_empty(place: Path | str) -> Path | str:
    if place == "":
        raise PydanticCustomError(
            "empty_path", "is empty, which would mean the folder that we were started in"
        )
    return place


class JailSettings(_Section):
    """The walls around a program."""

    level: Level = Field(
        default="namespaces",
        description="What must hold; a host that cannot give it stops the start. `process`: where there are none.",
    )
    runtime: Annotated[Path, BeforeValidator(_not_empty)] = Field(
        default=Path(sys.prefix) / "sandbox-runtime",
        description="The root file system that programs see, made by `sandbox runtime build`.",
    )
    scratch_bytes: int = Field(default=64 * MIB, ge=MIB, description="Size of a call's /tmp.")
    scratch_inodes: int = Field(default=2048, ge=16, description="Files and folders in a call's /tmp.")
    first_uid: int = Field(
        default=200_000,
        ge=1000,
        description="Host uids from here on belong to slots, when the worker runs as root.",
    )


class LogSettings(_Section):
    """What the programs say on stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "json", "text"] = Field(
        default="auto", description="auto: text on a terminal, else one JSON object a line."
    )


class Settings(_Section):
    """Every section; a program hands each part only its own."""

    redis: RedisSettings = RedisSettings()
    gateway: GatewaySettings = GatewaySettings()
    ceilings: CeilingSettings = CeilingSettings()
    worker: WorkerSettings = WorkerSettings()
    jail: JailSettings = JailSettings()
    log: LogSettings = LogSettings()


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read file and environment.

    Raises ConfigError for a file that cannot be read, a value out of bounds, or a name that is not known.
    """
    environ = os.environ if environ is None else environ  # noqa: TID251 - the one reader
    values = _from_file(environ.get(_CONFIG))
    if url := environ.get("REDIS_URL"):
        values.setdefault("redis", {})["url"] = url
    for variable, value in environ.items():
        if variable.startswith(PREFIX) and variable not in _NO_SETTINGS:
            section, _, name = variable.removeprefix(PREFIX).lower().partition("__")
            _check_name(section, name, f"the variable {variable}")
            values.setdefault(section, {})[name] = value
    try:
        settings = Settings.model_validate(values)
    except ValidationError as exc:
        name, _, rule = first_error(exc).partition(":")
        raise ConfigError(f"setting {name} ({_variable(name)}):{rule}") from exc
    if settings.jail.level == "process" and settings.ceilings.network != "none":
        raise ConfigError(
            "ceilings.network is loopback, which takes net namespaces, and jail.level process has none: change either"
        )
    return settings


def _from_file(path: str | None) -> dict[str, dict[str, Any]]:
    if not path:
        return {}
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read the settings file {path}: {exc}") from exc
    for section, names in content.items():
        if not isinstance(names, dict):
            raise ConfigError(
                f"{path}: {section} stands outside of a section; write it below a [section] line"
            )
        if section not in Settings.model_fields:
            _check_name(section, "", f"[{section}] in {path}")
        for name in names:
            _check_name(section, name, f"{section}.{name} in {path}")
    return content


def _check_name(section: str, name: str, where: str) -> None:
    known = {f"{s}.{n}" for s, field in Settings.model_fields.items() for n in _names(field.annotation)}
    asked = f"{section}.{name}"
    if asked not in known:
        near = difflib.get_close_matches(asked, known, n=1, cutoff=0.0)[0]
        raise ConfigError(f"{where} is no setting of ours. The nearest is {near} ({_variable(near)}).")


def _variable(setting: str) -> str:
    return PREFIX + setting.replace(".", "__").upper()


def _names(section: Any) -> list[str]:
    return list(section.model_fields)
