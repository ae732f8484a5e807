"""SandboxFusion's language, held against what its public description says of each field, default and error."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from gateway.dialects.sandbox_fusion import to_stage
from gateway.readiness import Obstacle
from gateway.tenants import ANONYMOUS
from sandbox.calls import MIB, CallStatus, ToolCall, ToolResult

from ..conftest import Serve, Service

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUN = {"status": "Finished", "execution_time": 0.0, "return_code": 0, "stdout": "", "stderr": ""}
ANSWER = {
    "status": "Success", "message": "", "compile_result": None, "run_result": RUN, "executor_pod_name": "echo", "files": {},
}  # fmt: skip


async def answer(service: Service, **body: Any) -> dict[str, Any]:
    """What a request is answered that has a result."""
    response = await service.http.post("/run_code", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def last_call(service: Service) -> ToolCall:
    return service.worker.seen[-1].call


def deadline_s(service: Service) -> float:
    delivery = service.worker.seen[-1]
    return (delivery.deadline_ms - delivery.accepted_ms) / 1000


async def test_every_field_of_an_answer(service: Service) -> None:
    """A program that ends well is `Success` and `Finished`, with all fields of the original in their order."""
    response = await service.http.post("/run_code", json={"code": "echo hé", "language": "python"})
    assert response.json() == ANSWER | {"run_result": RUN | {"stdout": "hé"}}
    assert list(response.json()) == list(ANSWER)
    assert list(response.json()["run_result"]) == list(RUN)
    assert response.headers["content-type"] == "application/json"


async def test_defaults(service: Service) -> None:
    """A request with nothing but code is Python for 10 s with all that the service gives, and no input."""
    await answer(service, code="echo")
    call = last_call(service)
    assert (call.limits.wall_s, call.limits.memory_bytes, call.stdin, call.files) == (
        10.0,
        2048 * MIB,
        "",
        {},
    )
    assert (call.limits.cpu_s, call.limits.output_bytes, call.limits.processes) == (60.0, MIB, 256)
    assert deadline_s(service) == 10 + 10 + 8, "verl's client waits 30 s"


async def test_every_field_of_a_request(service: Service) -> None:
    """What a request says reaches the program, and names that nobody knows are passed over."""
    files = {"a/b.bin": base64.b64encode(b"\xff\0").decode(), "none": None, "IGNORE_THIS_FILE.txt": "?"}
    await answer(
        service, code="echo", stdin="in\n", compile_timeout=3, run_timeout=2.5, memory_limit_MB=1024, files=files,
        language="python", fetch_files=["out.png"], args=["-x"], uuid="?",
    )  # fmt: skip
    call = last_call(service)
    assert (call.stdin, call.limits.wall_s, call.limits.memory_bytes) == ("in\n", 2.5, 1024 * MIB)
    assert {name: file.base64 for name, file in call.files.items()} == {"a/b.bin": b"\xff\0"}  # type: ignore[union-attr]
    assert call.fetch_files == ["out.png"]
    assert deadline_s(service) == 3 + 2.5 + 8


async def test_a_failing_program(service: Service) -> None:
    """An exit code that is not 0 is `Failed`, and its stage is `Finished` all the same."""
    assert await answer(service, code="fail") == ANSWER | {
        "status": "Failed",
        "run_result": RUN | {"return_code": 1},
    }


async def test_a_fault_is_no_verdict(service: Service) -> None:
    """A failure of ours is `SandboxError`, without a stage that could be read as the program's."""
    assert await answer(service, code="fault") == ANSWER | {
        "status": "SandboxError",
        "message": "the jail broke",
        "run_result": None,
    }


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"language": "cpp"}, "this service runs python, and not cpp"),
        ({"language": "pytest"}, "this service runs python, and not pytest"),
    ],
)
async def test_what_the_original_has_and_we_have_not(
    service: Service, asked: dict[str, Any], message: str
) -> None:
    """It is a `SandboxError` that says so, and nothing runs."""
    before = len(service.worker.seen)
    given = await answer(service, code="echo", **asked)
    assert (given["status"], given["run_result"]) == ("SandboxError", None)
    assert given["message"].startswith(message)
    assert len(service.worker.seen) == before


@pytest.mark.parametrize(
    ("body", "place", "words"),
    [
        ({}, ["body", "code"], "Field required"),
        ({"code": 1}, ["body", "code"], "valid string"),
        ({"code": "", "language": "cobol"}, ["body", "language"], "'python'"),
        (
            {"code": "", "run_timeout": 61},
            ["body", "run_timeout"],
            "61 s is above this service's ceiling of 60 s",
        ),
        ({"code": "", "run_timeout": 0}, ["body", "run_timeout"], "greater than 0"),
        ({"code": "", "compile_timeout": -1}, ["body", "compile_timeout"], "greater than or equal to 0"),
        ({"code": "", "memory_limit_MB": 2049}, ["body", "memory_limit_MB"], "16 to 2048 MB"),
        ({"code": "", "memory_limit_MB": 1}, ["body", "memory_limit_MB"], "16 to 2048 MB"),
        ({"code": "", "files": {"/etc/x": ""}}, ["body", "files./etc/x.[key]"], "relative path"),
        ({"code": "", "files": {"x": "%"}}, ["body", "files.x"], "base64"),
        ([], ["body"], "object"),
    ],
)
async def test_a_request_that_is_wrong(service: Service, body: Any, place: list[str], words: str) -> None:
    """It is 422 with `detail`, a list of what is wrong and where, as the original answers."""
    response = await service.http.post("/run_code", json=body)
    assert response.status_code == 422
    [detail] = response.json()["detail"]
    assert detail["loc"] == place
    assert words in detail["msg"]


async def test_a_notebook_s_request(service: Service) -> None:
    """Its defaults and its errors are those of the original; the cells reach the worker as files."""
    status, answer = await notebook(service, cells=["x"])
    assert (status, answer | {"cells": []}) == (200, NOTEBOOK)
    assert list(answer) == list(NOTEBOOK)
    call = last_call(service)
    assert (call.limits.wall_s, call.limits.memory_bytes) == (45.0, 2048 * MIB)
    assert deadline_s(service) == 45 + 8
    assert call.files == {"cell_1.py": "x"}
    for body, place in [
        ({}, "cells"), ({"cells": []}, "cells"), ({"cells": ["x"], "kernel": "r"}, "kernel"), ({"cells": [1]}, "cells.0"),
        ({"cells": ["x"], "total_timeout": 61}, "total_timeout"), ({"cells": ["x"], "cell_timeout": 61}, "cell_timeout"), ({"cells": ["x"], "files": {"y": "%"}}, "files.y"),
        ({"cells": ["x"], "cell_timeout": -1}, "cell_timeout"), ({"cells": ["x"], "files": {"cell_1.py": ""}}, "files"),
    ]:  # fmt: skip
        status, answer = await notebook(service, **body)
        assert (status, answer["detail"][0]["loc"]) == (422, ["body", place])
    await notebook(service, cells=["x"], fetch_files=["a"])
    assert last_call(service).fetch_files == ["a"]


NOTEBOOK = {
    "status": "Success", "message": "", "driver": RUN, "cells": [], "executor_pod_name": "echo", "files": {},
}  # fmt: skip


async def notebook(service: Service, **body: Any) -> tuple[int, dict[str, Any]]:
    response = await service.http.post("/run_jupyter", json=body)
    return response.status_code, response.json()


async def test_what_should_be_sent_again_is_504(start: Serve) -> None:
    """A call that waited too long, a full gateway and one that ends: verl's client tries 504 again."""
    service = await start(gateway={"max_in_flight": 1})
    late = await service.http.post("/run_code", json={"code": "late"})
    assert (late.status_code, late.json()) == (504, {"detail": "no slot was free in time"})
    with service.gateway.admission.enter(ANONYMOUS):
        full = await service.http.post("/run_code", json={"code": "echo"})
        ping = await service.http.get("/v1/ping")
    assert (full.status_code, full.headers["retry-after"]) == (504, "1")
    assert (ping.status_code, ping.json()) == (200, "pong")
    service.gateway.readiness.refusing = Obstacle("draining", "this gateway ends")
    gone = await service.http.post("/run_code", json={"code": "echo"})
    assert (gone.status_code, gone.json()) == (504, {"detail": "this gateway ends"})


async def test_too_large(start: Serve) -> None:
    """A body over the bound is 413."""
    service = await start(gateway={"max_body_bytes": 2048})
    response = await service.http.post("/run_code", content=json.dumps({"code": "x" * 4096}))
    assert (response.status_code, response.json()) == (
        413,
        {"detail": "the request is larger than 2048 bytes"},
    )


REASONS = {
    "timeout": ("TimeLimitExceeded", None, "e"),
    "signaled": ("Finished", -11, "e"),
    "memory_limit": ("Finished", -9, "e\nKilled: it used more memory than its limit\n"),
    "output_limit": (
        "Finished",
        -9,
        "e\nKilled: it wrote more than its limit on output; what came before is kept\n",
    ),
}


@pytest.mark.parametrize("status", REASONS)
async def test_the_words_for_each_end(status: str) -> None:
    """Each way to end has its words, and only time is `TimeLimitExceeded`."""
    number = 11 if status == "signaled" else 9
    result = ToolResult(id="a", status=CallStatus(status), signal=number, stdout="o", stderr="e")
    stage = to_stage(result)
    assert (stage.status, stage.return_code, stage.stderr) == REASONS[status]
    assert stage.stdout == "o"


async def test_no_failure_has_return_code_0() -> None:
    """A program that exits 0 after a child was killed for its memory has failed, and says so."""
    result = ToolResult(id="a", status=CallStatus.MEMORY_LIMIT, exit_code=0)
    assert to_stage(result).return_code == -9
