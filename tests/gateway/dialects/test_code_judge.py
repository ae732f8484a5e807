"""Requests to code-judge's paths and what they are answered, field by field."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from uuid import UUID

import httpx

from gateway.dialects import code_judge_words as words
from sandbox.calls import MIB
from sandbox.queue import CallQueue
from sandbox.settings import RedisSettings, Settings
from tests.gateway.conftest import Serve, Service, serving, until

FIELDS = ["sub_id", "success", "run_success", "cost", "stdout", "stderr", "reason"]
JUDGED = ["sub_id", "success", "run_success", "cost", "reason"]


def python(solution: str, **fields: Any) -> dict[str, Any]:
    return {"type": "python", "solution": solution} | fields


async def post(service: Service, path: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await service.http.post(path, content=content)


async def batch(service: Service, path: str, *submissions: object) -> list[dict[str, Any]]:
    response = await post(service, path, {"type": "batch", "submissions": submissions})
    assert response.status_code == 200, response.text
    body = response.json()
    assert list(body) == ["sub_id", "results"]
    results: list[dict[str, Any]] = body["results"]
    assert len(results) == len(submissions)
    return results


#: A submission, then success, run_success, reason, stdout, and what stderr says.
ITEMS: list[tuple[object, bool, bool, str, str | None, str | None]] = [
    (python("echo 1"), True, True, "", "1", ""),
    (python("fail 1"), False, False, "", "1", ""),
    (python("echo  1 ", expected_output="1\n"), True, True, "", " 1 ", ""),
    (python("echo 1", expected_output="2"), False, True, "", "1", ""),
    (python("fail 1", expected_output="1"), False, False, "", "1", ""),
    (python("echo", expected_output=""), True, True, "", "", ""),
    (python("echo " + 999 * "é" + "yz"), True, True, "", 999 * "é" + "y", ""),
    (python("echo " + 1001 * "x", expected_output=1001 * "x"), True, True, "", 1000 * "x", ""),
    (python("echo " + 1001 * "x", expected_output=1000 * "x"), False, True, "", 1000 * "x", ""),
    (python("echo 1", options={"a": "b"}, unknown=[]), True, True, "", "1", ""),
    (python("echo 1", timeout=5, memory_limit=256, cpu_core=2), True, True, "", "1", ""),
    (python("echo 1", timeout=None, memory_limit=None, cpu_core=None), True, True, "", "1", ""),
    (python("timeout 1"), False, False, "worker_timeout", "1", "TimeoutError: ended after 0.0 s"),
    (python("memory_limit 1"), False, False, "", "1", "MemoryError: ended for taking more memory than it may"),
    (python("output_limit 1"), False, False, "", "1", "OutputError: ended for printing more than it may"),
    (python("signaled 1"), False, False, "", "1", "error: ended by signal 11"),
    (python("late"), False, False, "queue_timeout", None, "no slot was free in time"),
    (python("fault"), False, False, "internal_error", None, "the jail broke"),
    ({"type": "cpp", "solution": ""}, False, False, "invalid_input", None, "error: type: cpp is not run here, only python"),
    ({"type": "lean", "solution": ""}, False, False, "invalid_input", None, "error: type: lean is not run here, only python"),
    ({"type": "perl", "solution": ""}, False, False, "invalid_input", None, "error: type: Input should be 'python', 'cpp', 'math' or 'lean'"),
    ({"solution": ""}, False, False, "invalid_input", None, "error: type: Field required"),
    ({"type": "python"}, False, False, "invalid_input", None, "error: solution: Field required"),
    (python(7), False, False, "invalid_input", None, "error: solution: Input should be a valid string"),  # type: ignore[arg-type]
    (python("echo", input=7), False, False, "invalid_input", None, "error: input: Input should be a valid string"),
    (python("echo", input="\ud83d"), False, False, "invalid_input", None, "error: input: Input should be a valid string, unable to parse raw data as a unicode string"),
    (python("echo", cpu_core=int("9" * 400)), False, False, "invalid_input", None, "error: cpu_core: Input should be less than or equal to 1024"),
    (python("echo", timeout=0), False, False, "invalid_input", None, "error: timeout: Input should be greater than 0"),
    (python("echo", timeout=61), False, False, "invalid_input", None, "error: timeout: 61 is above this service's ceiling of 60"),
    (python("echo", memory_limit=2049), False, False, "invalid_input", None, "error: memory_limit in bytes: 2148532224 is above this service's ceiling of 2147483648"),
    (python("echo", memory_limit=15), False, False, "invalid_input", None, "error: memory_limit in bytes: Input should be greater than or equal to 16777216"),
    (python("x", type="math", expected_output="x"), True, True, "", "x", ""),
    (python(r"so \boxed{1/2}", type="math", expected_output=r"\frac{2}{4}"), True, True, "", "1/2", ""),
    (python("42", type="math", expected_output="41"), False, True, "", "42", ""),
    (python("<answer>1,000</answer>", type="math", expected_output="1000"), True, True, "", "1,000", ""),
    (python("not plain", type="math", expected_output="1"), False, False, "internal_error", "not plain", "error: grader_failed"),
    (python("1", type="math"), False, False, "invalid_input", None, "error: expected_output: of the type math it is the reference, and needed"),
    (python("1", type="math", expected_output="x", timeout=61), False, False, "invalid_input", None, "error: timeout: Input should be less than or equal to 60"),
    (7, False, False, "invalid_input", None, "error: body: Input should be a valid dictionary or instance of Submission"),
    (None, False, False, "invalid_input", None, "error: body: Input should be a valid dictionary or instance of Submission"),
]  # fmt: skip


async def test_each_item_of_a_batch_gets_its_own_answer(serve: Serve) -> None:
    """In the order sent, with every field, whatever is wrong with others; only stdout's first characters are shown."""
    service = await serve()
    for path in ("/run/batch", "/run/long-batch"):
        results = await batch(service, path, *(item for item, *_ in ITEMS))
        assert all(list(result) == FIELDS and isinstance(result["cost"], float) for result in results)
        assert [_told(result) for result in results] == [tuple(expected) for _, *expected in ITEMS]


def _told(result: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(result[name] for name in ("success", "run_success", "reason", "stdout", "stderr"))


async def test_judging_leaves_out_what_was_printed(serve: Serve) -> None:
    """The same answers without stdout and stderr."""
    service = await serve()
    for path in ("/judge/batch", "/judge/long-batch"):
        results = await batch(service, path, *(item for item, *_ in ITEMS))
        assert all(list(result) == JUDGED for result in results)
        answers = [(result["success"], result["run_success"], result["reason"]) for result in results]
        assert answers == [(success, ran, reason) for _, success, ran, reason, *_ in ITEMS]


async def test_a_submission_of_its_own(serve: Serve) -> None:
    """Any that can be read is answered 200, as it would be in a batch; where one cannot, the request is wrong."""
    service = await serve()
    for item, *expected in ITEMS:
        run, judged = await asyncio.gather(post(service, "/run", item), post(service, "/judge", item))
        if run.status_code == judged.status_code == 422:
            assert expected[2] == "invalid_input"
            assert expected[4] != "error: type: cpp is not run here, only python"
            continue
        assert run.status_code == judged.status_code == 200
        assert list(run.json()) == FIELDS
        assert _told(run.json()) == tuple(expected)
        assert list(judged.json()) == JUDGED
        assert judged.json()["reason"] == expected[2]


async def test_names_come_back_and_what_has_none_gets_one(serve: Serve) -> None:
    """A sub_id is only a name: two items may share it. An item that cannot be read keeps its own."""
    service = await serve()
    body = {
        "sub_id": "all",
        "submissions": [python("echo", sub_id="a"), python("fail", sub_id="a"), {"sub_id": "b"}],
    }
    answer = (await post(service, "/run/batch", body)).json()
    assert answer["sub_id"] == "all"
    assert [result["sub_id"] for result in answer["results"]] == ["a", "a", "b"]
    nameless = [python("echo"), python("echo", sub_id=""), {"sub_id": 7}, {"sub_id": "\udc00"}]
    answer = (await post(service, "/run/batch", {"submissions": nameless})).json()
    assert len({UUID(answer["sub_id"]), *(UUID(result["sub_id"]) for result in answer["results"])}) == 5


#: A path and a submission, then what of the call comes of it.
CALLS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("/run", {}, {"wall_s": 10, "cpu_s": 10, "memory_bytes": 512 * MIB, "deadline_s": 14, "stdin": "", "priority": "tool"}),
    ("/run/batch", {"timeout": 2}, {"wall_s": 2, "cpu_s": 2, "deadline_s": 6, "priority": "tool"}),
    ("/run/batch", {"timeout": 2.5, "cpu_core": 4}, {"wall_s": 2.5, "cpu_s": 10}),
    ("/run/batch", {"timeout": 60, "cpu_core": 4}, {"wall_s": 60, "cpu_s": 60, "deadline_s": 64}),
    ("/run/long-batch", {}, {"wall_s": 10, "deadline_s": 50, "priority": "tool"}),
    ("/run/long-batch", {"timeout": 60}, {"wall_s": 60, "deadline_s": 64}),
    ("/run/batch", {"memory_limit": 128}, {"memory_bytes": 128 * MIB}),
    ("/run/batch", {"input": None}, {"stdin": ""}),
    ("/run/batch", {"input": ""}, {"stdin": ""}),
    ("/run/batch", {"input": "a\n"}, {"stdin": "a\n"}),
    ("/run/batch", {}, {"output_bytes": MIB, "keep_bytes": 8000}),
    ("/run/batch", {"expected_output": "1"}, {"output_bytes": MIB, "keep_bytes": None}),
    ("/judge", {}, {"deadline_s": 14, "priority": "judge"}),
    ("/judge/batch", {}, {"deadline_s": 14, "priority": "judge"}),
    ("/judge/long-batch", {}, {"deadline_s": 50, "priority": "judge"}),
]  # fmt: skip


async def test_what_a_submission_asks_for_is_what_its_call_gets(serve: Serve) -> None:
    """Limits, stdin and deadline of each are theirs, or the defaults of this service."""
    service = await serve()
    for number, (path, fields, _) in enumerate(CALLS):
        submission = python(f"echo {number}", **fields)
        body = {"submissions": [submission]} if path.endswith("batch") else submission
        assert (await post(service, path, body)).status_code == 200
    for delivery, (_, _, wanted) in zip(service.worker.seen, CALLS, strict=True):
        call = delivery.call
        got = {**call.model_dump(), **call.limits.model_dump()}
        got["deadline_s"] = round((delivery.deadline_ms - delivery.accepted_ms) / 1000)
        got["priority"] = delivery.stream.rpartition(":")[2]
        assert {name: got[name] for name in wanted} == wanted, call.code


async def test_ceilings_bound_what_nobody_asked_for(serve: Serve) -> None:
    """Where a ceiling is below what a dialect would take, it takes the ceiling; none of its callers named it."""
    service = await serve(ceilings={"wall_s": 3, "cpu_s": 2, "output_bytes": 100, "deadline_s": 5})
    [result] = await batch(service, "/run/long-batch", python("echo 1"))
    assert result["success"]
    [delivery] = service.worker.seen
    limits = delivery.call.limits
    assert (limits.wall_s, limits.cpu_s, limits.output_bytes) == (3, 2, 100)
    assert delivery.deadline_ms - delivery.accepted_ms <= 5000


#: A path and a body, then the kind and the place of what is wrong with it.
REFUSED: list[tuple[str, object, str, list[str]]] = [
    ("/run", b"{", "value_error", []),
    ("/run", b"[" * 2000, "value_error", []),
    ("/run", b"\xff", "value_error", []),
    ("/run", [], "model_type", []),
    ("/run", {"solution": ""}, "missing", ["type"]),
    ("/run", {"type": "perl", "solution": ""}, "literal_error", ["type"]),
    ("/judge", python("", timeout="x"), "float_parsing", ["timeout"]),
    ("/run", python("", options={"a": 1}), "string_type", ["options", "a"]),
    ("/run/batch", [], "model_type", []),
    ("/run/batch", {}, "missing", ["submissions"]),
    ("/run/batch", {"submissions": {}}, "list_type", ["submissions"]),
    ("/run/batch", {"submissions": []}, "too_short", ["submissions"]),
    ("/run/long-batch", {"type": "single", "submissions": [1]}, "literal_error", ["type"]),
    ("/judge/long-batch", {"submissions": [1] * 1025}, "value_error", []),
    ("/judge/long-batch", {"submissions": [[]] * 60_000}, "value_error", []),
]


async def test_what_is_no_request_gets_422(serve: Serve) -> None:
    """As FastAPI words it: what is wrong, and where, without quoting the input."""
    service = await serve()
    for path, body, kind, where in REFUSED:
        response = await post(service, path, body)
        assert response.status_code == 422, (path, body)
        [complaint] = response.json()["detail"]
        assert (complaint["type"], complaint["loc"]) == (kind, ["body", *where])
        assert set(complaint) == {"type", "loc", "msg"}


async def test_a_batch_of_64_programs_of_a_quarter_megabyte(serve: Serve) -> None:
    """Bodies up to 16 MiB are read; one beyond is 413, in the same shape as other refusals."""
    service = await serve()
    results = await batch(service, "/run/long-batch", *[python("echo" + " " * 250_000 + "x")] * 64)
    assert all(result["success"] for result in results)
    refused = await post(service, "/run/long-batch", b" " * (16 * MIB + 1))
    assert (refused.status_code, list(refused.json())) == (413, ["detail"])


async def test_what_there_is_no_room_for_waits(serve: Serve) -> None:
    """A batch that a full gateway cannot hold yet is neither refused nor lost: it runs when there is room."""
    service = await serve(gateway={"max_in_flight": 4})
    held = asyncio.create_task(batch(service, "/run/batch", *[python("hold")] * 3))
    await service.worker.has_seen(3)
    waits = asyncio.create_task(batch(service, "/run/long-batch", *[python("echo 1")] * 2))
    await until(lambda: service.gateway.admission.held == 4)
    service.worker.released.set()
    assert all(result["success"] for result in await held + await waits)


async def test_what_the_queue_refuses_is_tried_again(serve: Serve) -> None:
    """A call for which the backlog is too long is answered when it is not, with no word of that."""
    service = await serve(gateway={"max_backlog": 1})
    answers = [
        await post(service, "/run", python("echo"))
    ]  # of which the next pulse tells that it waits no more
    answers += await asyncio.gather(*(post(service, "/run", python("echo")) for _ in range(2)))
    assert [answer.json()["reason"] for answer in answers] == ["", "", ""]


async def test_what_there_was_no_room_for_is_to_be_sent_again(serve: Serve) -> None:
    """When it has waited as long as it may it is `queue_timeout`, in all items that could run."""
    service = await serve(gateway={"max_in_flight": 4}, ceilings={"deadline_s": 10})
    held = asyncio.create_task(batch(service, "/run/batch", *[python("hold")] * 3))
    await service.worker.has_seen(3)
    results = await batch(service, "/run/long-batch", python("echo"), python("echo"), {})
    assert [result["reason"] for result in results] == ["queue_timeout", "queue_timeout", "invalid_input"]
    assert results[0]["stderr"] == "4 of 4 calls are in flight here"
    last = asyncio.create_task(post(service, "/run", python("hold")))
    await service.worker.has_seen(4)
    refused = await post(service, "/run/batch", {"submissions": [python("echo")]})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json() == {"detail": "4 of 4 calls are in flight here"}
    service.worker.released.set()
    assert all(result["success"] for result in await held)
    assert (await last).json()["success"]


async def test_a_fault_when_the_time_is_up_is_to_be_sent_again(serve: Serve) -> None:
    """A worker that took a program and did not answer in time may have had too much to do."""
    service = await serve(ceilings={"deadline_s": 1})
    [result] = await batch(service, "/run/long-batch", python("lose"))
    assert result["reason"] == "queue_timeout"
    assert result["stderr"].endswith("had it and did not answer by its deadline")


async def test_a_caller_that_gives_up_ends_its_programs(serve: Serve) -> None:
    """A batch whose client timed out does not go on beside its repetition."""
    service = await serve()
    given_up = asyncio.create_task(batch(service, "/run/long-batch", *[python("hold")] * 2))
    await service.worker.has_seen(2)
    given_up.cancel()
    await asyncio.wait({given_up})
    await until(lambda: service.gateway.admission.held == 0)
    service.worker.released.set()


async def test_the_number_of_programs_that_wait_and_can_run(serve: Serve) -> None:
    """`queue` counts what no worker has taken, `num_workers` the slots of all workers."""
    service = await serve()
    assert (await service.http.get("/status")).json() == {"queue": 0, "num_workers": 64}
    await service.worker.rest()
    waiting = asyncio.create_task(batch(service, "/run/long-batch", *[python("echo")] * 3))
    while (await service.http.get("/status")).json() != {"queue": 3, "num_workers": 64}:
        pass
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_without_a_worker(redis_of_test: RedisSettings) -> None:
    """It still says that it is there, and how many can run: none. A program is answered 503, to be sent again."""
    async with serving(Settings(), CallQueue(redis_of_test)) as (gateway, http):
        await gateway.readiness.heard.wait()
        assert (await http.get("/ping")).json() == "pong"
        assert (await http.get("/status")).json() == {"queue": 0, "num_workers": 0}
        refused = await http.post("/run", json=python("echo"))
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json() == {"detail": "no worker is alive"}


async def test_without_redis() -> None:
    """The same for a service whose Redis is away, and `/status` says that it does not know."""
    async with serving(Settings(), CallQueue(RedisSettings(url="unix:///nowhere"), timeout_s=0.1)) as (
        _,
        http,
    ):
        assert (await http.get("/ping")).json() == "pong"
        for refused in (await http.get("/status"), await http.post("/run/batch", json={})):
            assert refused.status_code == 503
            assert isinstance(refused.json()["detail"], str)


def test_a_last_line_of_ours_always_has_room() -> None:
    """However much a program said, how it ended is there, and no more than the first characters in all."""
    said = words.with_end(2000 * "x", "TimeoutError: ended after 1.0 s")
    assert len(said) == 1000
    assert said.endswith("x\nTimeoutError: ended after 1.0 s")
    assert words.with_end("a\n", "b") == "a\nb"
    assert words.with_end("", "b") == "b"
