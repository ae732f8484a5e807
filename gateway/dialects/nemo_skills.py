"""The language of the NeMo-Skills sandbox: `POST /execute`, `/sessions` and `GET /health`.

Theory of operation. Its client names a session in the header `X-Session-ID` with every `ipython` program, also with one
that stands alone, for which it makes up an id. This service keeps no state between calls, and says so in the word that
the language has for it: every answer has `new_session_created`, which tells the client that what earlier programs of
this session defined is not there.

That client looks at one HTTP status, 502, which it takes for "no answer came"; of any other answer it reads
`process_status`. So whatever is no verdict, a full service, a call that waited too long or a fault of ours, is 502, and
a refused request has that word beside its `error`. It waits for the program's time limit and 5 s, so a call's deadline
lies within that.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field
from starlette.types import Scope

from gateway.engine import Answer, Door, Engine, EngineRoute, Exchange, Page, make_call
from gateway.gateway import Gateway
from gateway.routes import retry_after
from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.errors import InternalError, InvalidCall, Overloaded, QueueTimeout, SandboxError, Unavailable

#: Of the 5 s that its client waits beyond the time limit, what a call may wait in the queue; the rest is the way.
QUEUE_S = 4.0
_NO_VERDICT = (Overloaded, Unavailable, QueueTimeout, InternalError)
_NO_ANSWER = 502
_PYTHON = {"ipython", "python", "python3"}


class ExecuteRequest(BaseModel):
    """The body of `/execute`. A name that is not known is passed over."""

    generated_code: str
    timeout: int | float = Field(gt=0, le=86_400)  # which of the two it was is to be seen where it is said
    language: str = "ipython"
    std_input: str = ""
    max_output_characters: int = Field(default=1000, ge=0)
    traceback_verbosity: Literal["Minimal", "Plain", "Context", "Verbose"] = "Plain"


class ExecuteResponse(BaseModel):
    """What `/execute` answers."""

    process_status: Literal["completed", "error", "timeout"]
    stdout: str
    stderr: str
    new_session_created: bool = True


def doors(engine: Engine) -> Sequence[Door]:
    """What this dialect listens to."""
    return [
        Door("/execute", EngineRoute(engine, execute, refuse)),
        Door("/sessions", Page(no_sessions), methods=("GET",)),
        Door("/sessions/", Page(no_such_session)),
        Door("/health", Page(lambda _: health(engine.gateway)), methods=("GET",), scope=None),
    ]


async def execute(exchange: Exchange) -> Answer:
    """Run one program."""
    request = exchange.parse(ExecuteRequest)
    result = await exchange.run(to_call(request, exchange.engine))
    return Answer(to_response(result, request).model_dump_json().encode())


def to_call(request: ExecuteRequest, engine: Engine) -> ToolCall:
    """The call that a request asks for. Raises InvalidCall, in the request's own words."""
    ceilings = engine.ceilings
    if request.language not in _PYTHON:
        raise InvalidCall(
            f"language: this service runs ipython, python and python3, not {request.language[:50]!r}"
        )
    if request.timeout > ceilings.wall_s:
        raise InvalidCall(
            f"timeout: {request.timeout:g} s is above this service's ceiling of {ceilings.wall_s:g} s"
        )
    limits = {
        "wall_s": request.timeout,
        "cpu_s": ceilings.cpu_s,
        "memory_bytes": ceilings.memory_bytes,
        "output_bytes": ceilings.output_bytes,
        "processes": ceilings.processes,
    }
    return make_call(
        code=request.generated_code,
        stdin=request.std_input,
        limits=limits,
        # So that the head of what is kept, one half, has so many characters, of at most four bytes each.
        keep_bytes=2 * min(4 * request.max_output_characters, ceilings.output_bytes),
        deadline_s=min(request.timeout + QUEUE_S, ceilings.deadline_s),
        echo_last_value=request.language == "ipython",
    )


def to_response(result: ToolResult, request: ExecuteRequest) -> ExecuteResponse:
    """What came of a call, in the words of `/execute`. Raises what a fault is."""
    if (error := result.to_error()) is not None:
        raise error
    most = request.max_output_characters
    stdout = cut(result.stdout, most, result.stdout_bytes)
    stderr = cut(result.stderr, most, result.stderr_bytes)
    return ExecuteResponse(
        process_status=_WORDS.get(result.status, "error"),
        stdout=stdout,
        stderr=stderr + _reason(result, request),  # behind the cut, so that it is always there
    )


_WORDS: dict[CallStatus, Literal["completed", "timeout"]] = {
    CallStatus.OK: "completed",
    CallStatus.TIMEOUT: "timeout",
}


def cut(text: str, most: int, written_bytes: int) -> str:
    """At most so many characters of a text, and of how much they are."""
    if len(text) <= most:
        return text
    return f"{text[:most]}<output cut: {most} characters of {written_bytes} bytes>"


def _reason(result: ToolResult, request: ExecuteRequest) -> str:
    reason = {
        CallStatus.TIMEOUT: f"Execution timed out after {request.timeout} seconds",
        CallStatus.MEMORY_LIMIT: "Execution was ended: it used more memory than its limit",
        CallStatus.OUTPUT_LIMIT: "Execution was ended: it wrote more than its limit on output",
        CallStatus.SIGNALED: f"Execution was ended by signal {result.signal}",
    }.get(result.status)
    if reason is None:
        return ""
    gap = "\n" if result.stderr and not result.stderr.endswith("\n") else ""
    return f"{gap}{reason}\n"


def refuse(error: SandboxError) -> Answer:
    """What a request without a result is answered."""
    body = {
        "error": error.message,
        "process_status": "error",
        "stdout": "",
        "stderr": f"{error.message}\n",
        "new_session_created": False,
    }
    if isinstance(error, _NO_VERDICT):
        return Answer(json.dumps({"error": error.message}).encode(), _NO_ANSWER, retry_after(error))
    status = 400 if isinstance(error, InvalidCall) else error.http_status
    return Answer(json.dumps(body).encode(), status)


def no_sessions(_: Scope) -> Answer:
    """There is never one."""
    return Answer(b'{"sessions":{},"backend":"ipython"}')


def no_such_session(scope: Scope) -> Answer:
    """What is asked of a session is answered so; the client takes it for deleted."""
    name = scope["path"].removeprefix("/sessions/")[:200]
    return Answer(json.dumps({"error": f"IPython session {name} not found"}).encode(), 404)


def health(gateway: Gateway) -> Answer:
    """Whether a program would be run now; the client waits for 200 before it begins."""
    obstacle = gateway.readiness.obstacle()
    if obstacle is None:
        return Answer(b'{"status":"healthy","worker":"roc-sandbox"}')
    return Answer(json.dumps({"status": "unhealthy", "error": obstacle.sentence}).encode(), 503)
