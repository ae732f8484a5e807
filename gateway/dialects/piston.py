"""Piston's language: `POST /api/v2/execute` and `GET /api/v2/runtimes`.

Times are in ms and memory is in bytes. The stage `run` says what came of a program by `code` or `signal`, and by
`status`: null, RE (exit code not 0), SG (signal), TO (time), OL or EL (stdout or stderr too long). The original has XX
too, for a failure of its own, which its callers take for the program's; here that is HTTP 500, as other failures of the
original are. A full service and a call that waited too long are 429.

The version that a caller wants is held against the Python of the workers that are alive, which they tell the gateway.
"""

from __future__ import annotations

import json
import re
import signal
from base64 import b64encode
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, Field, StrictFloat, StrictInt
from starlette.types import Scope

from gateway.dialects.semver import parse_version, satisfies
from gateway.engine import Answer, Door, Engine, EngineRoute, Exchange, Page, make_call, make_file
from gateway.gateway import Gateway
from gateway.routes import retry_after
from sandbox.calls import Base64File, CallStatus, ToolCall, ToolResult
from sandbox.errors import InvalidCall, Overloaded, QueueTimeout, SandboxError, Unavailable

#: How long a call may wait in the queue, beside its time to run.
QUEUE_S = 30.0
DEFAULT_MS = 3000.0

Number = StrictInt | StrictFloat | None


class File(BaseModel):
    """A file of a request. As in the original, an encoding that is not known is utf8."""

    name: str | None = None
    content: str
    encoding: str | None = None


class ExecuteRequest(BaseModel):
    """The body of `/api/v2/execute`. A name that is not known is passed over."""

    language: str = Field(min_length=1)
    version: str = Field(min_length=1)
    files: list[File] = Field(max_length=256)
    stdin: str | None = None
    args: list[str] | None = None
    run_timeout: Number = None
    run_cpu_time: Number = None
    run_memory_limit: Number = None
    # Python has no such stage.
    compile_timeout: Number = None
    compile_cpu_time: Number = None
    compile_memory_limit: Number = None


class Stage(BaseModel):
    """What came of a program."""

    stdout: str
    stderr: str
    output: str
    code: int | None
    signal: str | None
    message: str | None
    status: Literal["RE", "SG", "TO", "OL", "EL"] | None
    cpu_time: int
    wall_time: int
    memory: int | None


class ExecuteResponse(BaseModel):
    """What `/api/v2/execute` answers."""

    language: str = "python"
    version: str
    run: Stage


def doors(engine: Engine) -> Sequence[Door]:
    """What this dialect listens to."""
    return [
        Door("/api/v2/execute", EngineRoute(engine, execute, refuse)),
        Door("/api/v2/runtimes", Page(lambda _: runtimes(engine.gateway)), methods=("GET",)),
    ]


def runtimes(gateway: Gateway) -> Answer:
    """The versions of Python that there are."""
    known = [{"language": "python", "version": one, "aliases": aliases(one)} for one in versions(gateway)]
    return Answer(json.dumps(known).encode())


def versions(gateway: Gateway) -> list[str]:
    """The Pythons of the workers that take calls, the newest first."""
    said = {worker.python for worker in gateway.readiness.workers if worker.python and not worker.draining}
    return sorted(said, key=parse_version, reverse=True)


def aliases(version: str) -> list[str]:
    """What else `python` may be called, as in the original's packages."""
    major, minor, _ = parse_version(version)
    return ["py", "py3", "python3", f"python{major}.{minor}"]


async def execute(exchange: Exchange) -> Answer:
    """Run one program."""
    if not _is_json(exchange.scope):
        return _message(415, "requests must be of type application/json")
    request = exchange.parse(ExecuteRequest)
    gateway = exchange.engine.gateway
    newest = _check_runtime(request, versions(gateway))
    result = await exchange.run(to_call(request, exchange.engine))
    if (error := result.to_error()) is not None:
        raise error
    ran_under = {worker.id: worker.python for worker in gateway.readiness.workers}
    version = ran_under.get(result.worker) or newest
    return Answer(ExecuteResponse(version=version, run=to_stage(result)).model_dump_json().encode())


def _is_json(scope: Scope) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"application/json") for name, value in scope["headers"]
    )


def _check_runtime(request: ExecuteRequest, known: Sequence[str]) -> str:
    """The newest of the versions that may run it. Raises InvalidCall unless each of them is what it wants."""
    if not known:
        raise Unavailable("no worker has said yet which Python it has", retry_after_s=1.0)
    for version in known:
        is_called_so = request.language in {"python", *aliases(version)}
        if not is_called_so or not satisfies(parse_version(version), request.version):
            raise InvalidCall(f"{request.language[:50]}-{request.version[:50]} runtime is unknown")
    return known[0]


def to_call(request: ExecuteRequest, engine: Engine) -> ToolCall:
    """The call that a request asks for. Raises InvalidCall, in the request's own words."""
    ceilings = engine.ceilings
    if request.args:
        raise InvalidCall(
            "args are not supported by this service: a program can read what it needs from stdin"
        )
    wall_s = _bounded("run_timeout", request.run_timeout, DEFAULT_MS, ceilings.wall_s * 1000) / 1000
    memory = request.run_memory_limit if (request.run_memory_limit or -1) > 0 else None
    limits = {
        "wall_s": wall_s,
        "cpu_s": _bounded("run_cpu_time", request.run_cpu_time, DEFAULT_MS, ceilings.cpu_s * 1000) / 1000,
        "memory_bytes": int(
            _bounded("run_memory_limit", memory, ceilings.memory_bytes, ceilings.memory_bytes)
        ),
        "output_bytes": ceilings.output_bytes,
        "processes": ceilings.processes,
    }
    main = _main(request.files)
    return make_call(
        code=request.files[main].content,
        stdin=request.stdin or "",
        files=dict(_files(request.files, main)),
        limits=limits,
        deadline_s=min(wall_s + QUEUE_S, ceilings.deadline_s),
    )


def _bounded(name: str, value: Number, default: float, ceiling: float) -> float:
    """A limit, or the default where it is 0 or missing. Raises InvalidCall."""
    if not value:
        return min(default, ceiling)
    if value > ceiling:
        raise InvalidCall(f"{name} cannot exceed the configured limit of {ceiling:.15g}")
    if not value > 0:
        raise InvalidCall(f"{name} must be non-negative")
    return value


def _main(files: Sequence[File]) -> int:
    """The place of the program: the first file that is text. Raises InvalidCall."""
    for place, file in enumerate(files):
        if _encoding(file) == "utf8":
            return place
    raise InvalidCall("files must include at least one utf8 encoded file")


def _encoding(file: File) -> Literal["utf8", "base64", "hex"]:
    return file.encoding if file.encoding in {"base64", "hex"} else "utf8"  # type: ignore[return-value]


def _files(files: Sequence[File], main: int) -> Iterator[tuple[str, str | Base64File]]:
    """What lies beside the program. It lies there itself under another name than `main.py`, if it has one."""
    for place, file in enumerate(files):
        if place != main:
            yield file.name or f"file{place}.code", _content(place, file)
        elif file.name and file.name != "main.py":
            yield file.name, file.content


def _content(place: int, file: File) -> str | Base64File:
    encoding = _encoding(file)
    if encoding == "utf8":
        return file.content
    try:
        encoded = file.content if encoding == "base64" else b64encode(bytes.fromhex(file.content)).decode()
    except ValueError as exc:
        raise InvalidCall(f"files[{place}].content: Input should be hex") from exc
    return make_file(file.name or f"file{place}.code", encoded)


def to_stage(result: ToolResult) -> Stage:
    """What came of a call that has a verdict."""
    status, message = _ended(result)
    is_killed = result.status not in {CallStatus.OK, CallStatus.ERROR, CallStatus.SIGNALED}
    return Stage(
        stdout=result.stdout,
        stderr=result.stderr,
        output=result.stdout + result.stderr,
        code=None if is_killed else result.exit_code,
        signal="SIGKILL" if is_killed else _signal_name(result.signal),
        message=message,
        status=status,
        cpu_time=round(result.usage.cpu_s * 1000),
        wall_time=round(result.usage.wall_s * 1000),
        memory=result.usage.memory_peak_bytes or None,
    )


def _ended(result: ToolResult) -> tuple[Literal["RE", "SG", "TO", "OL", "EL"] | None, str | None]:
    match result.status:
        case CallStatus.OK:
            return None, None
        case CallStatus.ERROR:
            return "RE", f"Exited with error status {result.exit_code}"
        case CallStatus.TIMEOUT:
            return "TO", "Time limit exceeded"
        case CallStatus.MEMORY_LIMIT:
            return "SG", "Memory limit exceeded"
        case CallStatus.OUTPUT_LIMIT:
            is_stdout = result.stdout_truncated
            return ("OL", "stdout length exceeded") if is_stdout else ("EL", "stderr length exceeded")
    return "SG", f"Caught fatal signal {result.signal}"


def _signal_name(number: int | None) -> str | None:
    """Its name; None for none, and for one of those that have no name."""
    return next((one.name for one in signal.Signals if one == number), None)


def refuse(error: SandboxError) -> Answer:
    """What a request without a result is answered."""
    if isinstance(error, InvalidCall):
        return _message(400, _in_their_words(error.message))
    is_load = isinstance(error, QueueTimeout | Overloaded)
    status = Overloaded.http_status if is_load else error.http_status
    return _message(status, error.message, retry_after(error))


def _in_their_words(complaint: str) -> str:
    """What pydantic says of a field that is missing or of another kind, as the original says it."""
    field, _, _rule = complaint.partition(": ")
    if field in {"language", "version"}:
        return f"{field} is required as a string"
    if field == "files":
        return "files is required as an array"
    if content := re.fullmatch(r"files\.(\d+)\.content", field):
        return f"files[{content[1]}].content is required as a string"
    if number := re.match(r"(?:run|compile)_(?:timeout|cpu_time|memory_limit)\b(?=\.)", field):
        return f"If specified, {number[0]} must be a number"
    return complaint


def _message(status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> Answer:
    return Answer(json.dumps({"message": message}).encode(), status, headers)
