"""The language of the NeMo-Skills sandbox, field by field."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.dialects.nemo_skills import ExecuteRequest, ExecuteResponse, cut, to_response
from gateway.readiness import Obstacle
from gateway.tenants import ANONYMOUS
from sandbox.calls import MIB, CallStatus, ToolResult

from ..conftest import Serve, Service

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: What its client sends for a program that stands alone.
SENT = {
    "generated_code": "echo", "std_input": "", "timeout": 10.0, "language": "ipython", "max_output_characters": 1000,
    "traceback_verbosity": "Plain",
}  # fmt: skip
DONE = {"process_status": "completed", "stdout": "", "stderr": "", "new_session_created": True}


async def answer(service: Service, **changed: Any) -> dict[str, Any]:
    """What a request is answered that has a result."""
    response = await service.http.post("/execute", json=SENT | changed, headers={"x-session-id": "1"})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_every_field_of_an_answer(service: Service) -> None:
    """A program that ends well is `completed`, in a session that is always a new one."""
    assert await answer(service, generated_code="echo hé") == DONE | {"stdout": "hé"}


async def test_a_failing_program(service: Service) -> None:
    """A program that fails is `error`, also in `python3`, where the original says `completed`."""
    for language in ("ipython", "python3", "python"):
        given = await answer(service, generated_code="fail", language=language)
        assert given == DONE | {"process_status": "error"}


async def test_defaults(service: Service) -> None:
    """Code and a time limit are enough: it is `ipython`, without input, without a session."""
    response = await service.http.post(
        "/execute", json={"generated_code": "echo " + "x" * 1001, "timeout": 3}
    )
    assert response.json() == DONE | {"stdout": "x" * 1000 + "<output cut: 1000 characters of 1001 bytes>"}
    delivery = service.worker.seen[-1]
    call = delivery.call
    assert (call.stdin, call.echo_last_value, call.limits.wall_s) == ("", True, 3.0)
    assert (call.limits.memory_bytes, call.limits.output_bytes) == (2048 * MIB, MIB)
    assert call.keep_bytes == 2 * 4 * 1000, "the first 1000 characters, however wide, and the last"
    assert (delivery.deadline_ms - delivery.accepted_ms) / 1000 == 3 + 4, "its client waits 3 + 5 s"


async def test_every_field_of_a_request(service: Service) -> None:
    """What a request says reaches the program; plain Python echoes nothing."""
    given = await answer(
        service, generated_code="echo abc", language="python3", std_input="in", max_output_characters=2,
        traceback_verbosity="Verbose", unknown=1,
    )  # fmt: skip
    assert given["stdout"] == "ab<output cut: 2 characters of 3 bytes>"
    call = service.worker.seen[-1].call
    assert (call.stdin, call.echo_last_value) == ("in", False)


async def test_what_is_refused(service: Service) -> None:
    """A request that cannot be served is 400, in a shape that its client can show."""
    for changed, words in [
        ({"language": "shell"}, "language: this service runs ipython, python and python3, not 'shell'"),
        ({"language": "lean4"}, "language: this service runs ipython, python and python3, not 'lean4'"),
        ({"timeout": 61}, "timeout: 61 s is above this service's ceiling of 60 s"),
        ({"timeout": 0}, "timeout: Input should be greater than 0"),
        ({"timeout": int("9" * 400)}, "timeout: Input should be less than or equal to 86400"),
        ({"generated_code": None}, "generated_code: Input should be a valid string"),
        (
            {"traceback_verbosity": "Loud"},
            "traceback_verbosity: Input should be 'Minimal', 'Plain', 'Context'",
        ),
    ]:
        response = await service.http.post("/execute", json=SENT | changed)
        body = response.json()
        assert response.status_code == 400
        assert body["error"].startswith(words)
        assert body == {
            "error": body["error"], "process_status": "error", "stdout": "", "stderr": f"{body['error']}\n",
            "new_session_created": False,
        }  # fmt: skip
    missing = await service.http.post("/execute", json={"generated_code": ""})
    assert (missing.status_code, missing.json()["error"]) == (400, "timeout: Field required")


async def test_what_is_no_verdict_is_502(start: Serve) -> None:
    """A fault, a call that waited too long and a full service have no `process_status` that could be read."""
    service = await start(gateway={"max_in_flight": 1})
    for code, words in [("fault", "the jail broke"), ("late", "no slot was free in time")]:
        response = await service.http.post("/execute", json=SENT | {"generated_code": code})
        assert (response.status_code, response.json()) == (502, {"error": words})
    with service.gateway.admission.enter(ANONYMOUS):
        full = await service.http.post("/execute", json=SENT)
        assert (full.status_code, full.headers["retry-after"]) == (502, "1")
        assert (await service.http.get("/health")).status_code == 200


async def test_sessions(service: Service) -> None:
    """There is never a session, and one that is to be deleted is gone already, in the original's words."""
    listed = await service.http.get("/sessions")
    assert listed.json() == {"sessions": {}, "backend": "ipython"}
    deleted = await service.http.delete("/sessions/a-b")
    assert (deleted.status_code, deleted.json()) == (404, {"error": "IPython session a-b not found"})


async def test_health(start: Serve) -> None:
    """It is 200 as long as a program would be run."""
    service = await start()
    assert (await service.http.get("/health")).json() == {"status": "healthy", "worker": "roc-sandbox"}
    service.gateway.readiness.refusing = Obstacle("draining", "this gateway ends")
    response = await service.http.get("/health")
    assert (response.status_code, response.json()["error"]) == (503, "this gateway ends")


async def test_too_large(start: Serve) -> None:
    """A body over the bound is 413."""
    service = await start(gateway={"max_body_bytes": 2048})
    response = await service.http.post("/execute", json=SENT | {"generated_code": "x" * 4096})
    assert (response.status_code, response.json()["process_status"]) == (413, "error")


def came(status: str, **fields: Any) -> ExecuteResponse:
    result = ToolResult(id="a", status=CallStatus(status), stdout="o", stderr="e", **fields)
    return to_response(result, ExecuteRequest(generated_code="", timeout=2.5))


async def test_the_words_for_each_end() -> None:
    """A time-out keeps what was printed, and every end by force says why behind the program's own stderr."""
    for status, word, stderr in [
        ("timeout", "timeout", "e\nExecution timed out after 2.5 seconds\n"),
        ("memory_limit", "error", "e\nExecution was ended: it used more memory than its limit\n"),
        ("output_limit", "error", "e\nExecution was ended: it wrote more than its limit on output\n"),
        ("signaled", "error", "e\nExecution was ended by signal 11\n"),
    ]:
        given = came(status, signal=11)
        assert (given.process_status, given.stdout, given.stderr) == (word, "o", stderr)
    whole = ExecuteRequest.model_validate({"generated_code": "", "timeout": 10})
    late = to_response(ToolResult(id="a", status=CallStatus.TIMEOUT), whole)
    assert late.stderr == "Execution timed out after 10 seconds\n"


async def test_a_cut_says_how_much_there_was() -> None:
    """The mark begins as the original's, and has both numbers."""
    assert cut("äbc", 3, 4) == "äbc"
    assert cut("äbcd", 3, 5) == "äbc<output cut: 3 characters of 5 bytes>"
    assert cut("a", 0, 9_000_000) == "<output cut: 0 characters of 9000000 bytes>"
