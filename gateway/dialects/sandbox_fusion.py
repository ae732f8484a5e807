"""SandboxFusion's language: `POST /run_code` as verl, SkyRL, verl-tool and others call it, and `POST /run_jupyter`.

What came of a program is answered 200 with three words: the outer `status`, the stage's `status`, and its
`return_code`, negative for a signal. A program that was ended for its memory or its output is `Finished` with -9, as if
the kernel's own killer had been at it, and the reason stands on its stderr; `TimeLimitExceeded` is for time alone.

What is no verdict is never one. A fault of ours is the outer `SandboxError`. What a caller should send again, a full
service or a call that waited too long, is 504: the one status that verl's client tries again on. That client waits for
the two time limits and 10 s more, so a call's deadline lies within that.

The cells of `/run_jupyter` run as one call (sandbox/cells.py), without a kernel. As in the original a cell that fails
is no failure of the request, and the cells behind it run. What is said of each cell is the program's word.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from gateway.engine import Answer, Door, Engine, EngineRoute, Exchange, Page, make_call, make_file
from gateway.routes import retry_after
from sandbox.calls import MIB, Base64File, CallStatus, FileName, Limits, ToolCall, ToolResult
from sandbox.cells import CellResult, cells_call, read_cells
from sandbox.errors import InvalidCall, Overloaded, QueueTimeout, SandboxError, Unavailable
from sandbox.settings import CeilingSettings

#: Of the 10 s that verl's client waits beyond the time limits, what a call may wait in the queue; the rest is the way.
QUEUE_S = 8.0
#: Files whose names have this are in requests for the original's own sake, and it leaves them out.
_IGNORED = "IGNORE_THIS_FILE"
_RETRY = (Overloaded, Unavailable, QueueTimeout)

#: What the original runs besides Python.
Language = Literal[
    "python", "cpp", "nodejs", "go", "go_test", "java", "php", "csharp", "bash", "typescript", "sql", "rust", "cuda",
    "lua", "R", "perl", "D_ut", "ruby", "scala", "julia", "pytest", "junit", "kotlin_script", "jest", "verilog",
    "python_gpu", "lean", "swift", "racket",
]  # fmt: skip
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RunCodeRequest(BaseModel):
    """The body of `/run_code`. As in the original, a name that is not known is passed over."""

    code: str
    language: Language = "python"  # the original wants it, and callers that it refuses for that want Python
    stdin: str | None = None
    compile_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = -1  # noqa: N815 - its name there
    files: dict[FileName, str | None] = {}
    fetch_files: list[FileName] = Field(default=[], max_length=64)


class RunJupyterRequest(BaseModel):
    """The body of `/run_jupyter`."""

    cells: list[str]
    cell_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # 0: only the total
    total_timeout: Seconds = 45.0
    memory_limit_MB: int = -1  # noqa: N815 - its name there
    kernel: Literal["python3"] = "python3"
    files: dict[FileName, str | None] = {}
    fetch_files: list[FileName] = Field(default=[], max_length=64)


class CommandRunResult(BaseModel):
    """What came of a stage."""

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    """What `/run_code` answers."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    compile_result: None = None  # Python has no such stage
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


class CellRunResult(BaseModel):
    """What came of a cell: of its last expression a bundle by MIME type, and an error as Jupyter has it."""

    stdout: str
    stderr: str
    display: list[dict[str, str]] = []
    error: list[dict[str, str | list[str]]] = []


class RunJupyterResponse(BaseModel):
    """What `/run_jupyter` answers."""

    status: Literal["Success", "Failed", "SandboxError"]
    message: str = ""
    driver: CommandRunResult | None = None
    cells: list[CellRunResult] = []
    executor_pod_name: str | None = None
    files: dict[str, str] = {}


def doors(engine: Engine) -> Sequence[Door]:
    """What this dialect listens to."""
    return [
        Door("/run_code", EngineRoute(engine, run_code, refuse)),
        Door("/run_jupyter", EngineRoute(engine, run_jupyter, refuse)),
        Door("/v1/ping", Page(lambda _: Answer(b'"pong"')), methods=("GET",), scope=None),
    ]


async def run_code(exchange: Exchange) -> Answer:
    """Run one program."""
    request = exchange.parse(RunCodeRequest)
    if request.language != "python":
        missing = f"this service runs python, and not {request.language}"
        return _answer(RunCodeResponse(status="SandboxError", message=missing))
    result = await exchange.run(to_call(request, exchange.engine))
    return _answer(to_response(result))


async def run_jupyter(exchange: Exchange) -> Answer:
    """Run the cells of a notebook."""
    request = exchange.parse(RunJupyterRequest)
    ceilings = exchange.engine.ceilings
    check_time(ceilings, "cell_timeout", request.cell_timeout)
    call = cells_call(
        request.cells,
        cell_s=request.cell_timeout or None,
        stop_on_error=False,
        files={**_files(request.files)},
        fetch_files=request.fetch_files,
        limits=to_limits(ceilings, "total_timeout", request.total_timeout, request.memory_limit_MB),
        deadline_s=min(request.total_timeout + QUEUE_S, ceilings.deadline_s),
    )
    return _answer(to_notebook(request.cells, await exchange.run(call)))


def to_call(request: RunCodeRequest, engine: Engine) -> ToolCall:
    """The call that a request asks for. Raises InvalidCall, in the request's own words."""
    ceilings = engine.ceilings
    limits = to_limits(ceilings, "run_timeout", request.run_timeout, request.memory_limit_MB)
    due_s = request.compile_timeout + request.run_timeout + QUEUE_S
    return make_call(
        code=request.code,
        stdin=request.stdin or "",
        files=_files(request.files),
        fetch_files=request.fetch_files,
        limits=limits,
        deadline_s=min(due_s, ceilings.deadline_s),
    )


def to_limits(ceilings: CeilingSettings, name: str, time_s: float, limit_mb: int) -> Limits:
    """The limits of a call, whose time is called `name`. Raises InvalidCall."""
    check_time(ceilings, name, time_s)
    return Limits(
        wall_s=time_s,
        cpu_s=ceilings.cpu_s,
        memory_bytes=memory_bytes(limit_mb, ceilings.memory_bytes),
        output_bytes=ceilings.output_bytes,
        processes=ceilings.processes,
    )


def check_time(ceilings: CeilingSettings, name: str, time_s: float) -> None:
    """Raise InvalidCall for a time above the ceiling."""
    if time_s > ceilings.wall_s:
        raise InvalidCall(f"{name}: {time_s:g} s is above this service's ceiling of {ceilings.wall_s:g} s")


def memory_bytes(limit_mb: int, ceiling: int) -> int:
    """A memory limit; none is the ceiling. Raises InvalidCall above that, and where no interpreter would start."""
    if limit_mb <= 0:
        return ceiling
    if not 16 <= limit_mb <= ceiling // MIB:
        raise InvalidCall(
            f"memory_limit_MB: this service gives 16 to {ceiling // MIB} MB, or -1 for its most"
        )
    return limit_mb * MIB


def _files(files: Mapping[str, str | None]) -> dict[str, Base64File]:
    given = {name: content for name, content in files.items() if content is not None}
    return {name: make_file(name, content) for name, content in given.items() if _IGNORED not in name}


def to_response(result: ToolResult) -> RunCodeResponse:
    """What came of a call, in the words of `/run_code`. Raises QueueTimeout."""
    error = result.to_error()
    if isinstance(error, QueueTimeout):
        raise error
    pod = result.worker or None
    if error is not None:
        return RunCodeResponse(status="SandboxError", message=error.message, executor_pod_name=pod)
    return RunCodeResponse(
        status="Success" if result.status is CallStatus.OK else "Failed",
        message=_left_out(result),
        run_result=to_stage(result),
        executor_pod_name=pod,
        files={name: b64encode(file.base64).decode() for name, file in result.files.items() if file},
    )


def _left_out(result: ToolResult) -> str:
    names = [name for name, file in result.files.items() if file is None]
    return f"too large to be returned: {', '.join(names)}" if names else ""


def to_notebook(cells: Sequence[str], result: ToolResult) -> RunJupyterResponse:
    """What came of the call of these cells, in the words of `/run_jupyter`. Raises QueueTimeout."""
    ran = to_response(result)
    pod = ran.executor_pod_name
    if ran.run_result is None:
        return RunJupyterResponse(status="SandboxError", message=ran.message, executor_pod_name=pod)
    found = [to_cell(cell) for cell in read_cells(cells, result) if cell.status != "not_run"]
    # The streams are the cells'; what is left for the driver is why it was ended.
    driver = ran.run_result.model_copy(update={"stdout": "", "stderr": _reason(result)})
    return RunJupyterResponse(
        status=ran.status,
        message=ran.message,
        driver=driver,
        cells=found,
        executor_pod_name=pod,
        files=ran.files,
    )


def to_cell(cell: CellResult) -> CellRunResult:
    """What came of a cell."""
    error = cell.error
    return CellRunResult(
        stdout=cell.stdout,
        stderr=cell.stderr,
        display=[] if cell.value is None else [{"text/plain": cell.value}],
        error=[]
        if error is None
        else [{"ename": error.type, "evalue": error.message, "traceback": error.traceback}],
    )


def to_stage(result: ToolResult) -> CommandRunResult:
    """What came of a call that has a verdict."""
    timed_out = result.status is CallStatus.TIMEOUT
    return CommandRunResult(
        status="TimeLimitExceeded" if timed_out else "Finished",
        execution_time=result.usage.wall_s,
        return_code=None if timed_out else return_code(result),
        stdout=result.stdout,
        stderr=_with_reason(result),
    )


def return_code(result: ToolResult) -> int:
    """As Python's `subprocess` has it. Never 0 for a failure: a program may exit 0 though a child was its ruin."""
    if result.status is CallStatus.OK:
        return 0
    if result.signal is not None:
        return -result.signal
    return result.exit_code or -9


def _with_reason(result: ToolResult) -> str:
    reason = _reason(result)
    gap = "\n" if reason and result.stderr and not result.stderr.endswith("\n") else ""
    return f"{result.stderr}{gap}{reason}"


def _reason(result: ToolResult) -> str:
    """Why a program was ended, where the language has no word for it."""
    return {
        CallStatus.MEMORY_LIMIT: "Killed: it used more memory than its limit\n",
        CallStatus.OUTPUT_LIMIT: "Killed: it wrote more than its limit on output; what came before is kept\n",
    }.get(result.status, "")


def _answer(response: BaseModel) -> Answer:
    return Answer(response.model_dump_json().encode())


def refuse(error: SandboxError) -> Answer:
    """What a request without a result is answered: `detail`, as FastAPI has it."""
    if isinstance(error, InvalidCall):
        field, _, rule = error.message.partition(": ")
        place = ["body"] if field == "body" else ["body", field]
        detail = [{"type": "value_error", "loc": place, "msg": rule}]
        return Answer(json.dumps({"detail": detail}).encode(), error.http_status)
    status = QueueTimeout.http_status if isinstance(error, _RETRY) else error.http_status
    return Answer(json.dumps({"detail": error.message}).encode(), status, retry_after(error))
