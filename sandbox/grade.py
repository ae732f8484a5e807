"""Rewards for a trainer: `Grader`, over a `SandboxClient`.

It does what `POST /v1/grade/math` and `/v1/judge` do, by the same code (`sandbox/grading`): what is plain is decided in
this process, the rest are calls, which the client joins, bounds and sends again as it does all calls. What came of an
item stands in its place, whatever it is, and nothing is raised for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar, Unpack

from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import BaseModel, ValidationError

from sandbox.calls import ToolCall, ToolResult, first_error
from sandbox.client import DEFAULT_URL, ClientOptions, SandboxClient
from sandbox.errors import InvalidCall, SandboxError
from sandbox.grading.judge import judge
from sandbox.grading.math import MathCache, MathGrade, MathTask, grade_math
from sandbox.grading.task import Judgement, JudgeRequest, JudgeTask

#: Verdicts on mathematics that are kept: some 20 MB.
_MOST_KEPT = 100_000
#: Items that are worked on at a time; each has a call or a few in flight.
_MOST_AT_ONCE = 4096

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Grader:
    """Grades answers and judges programs, many at a time.

        async with Grader("http://127.0.0.1:8000") as grader:
            [grade] = await grader.math([{"answer": reply, "gold": "1/2"}])

    The options are those of `SandboxClient`.
    """

    def __init__(self, url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> None:
        self._client = SandboxClient(url, **options)
        self._kept = MathCache(_MOST_KEPT)
        self._places = asyncio.Semaphore(_MOST_AT_ONCE)

    async def __aenter__(self) -> Self:
        """Make ready; the first call connects."""
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Close all connections."""
        await self._client.__aexit__(*exc_info)

    async def math(self, items: Iterable[MathTask | Mapping[str, Any]]) -> list[MathGrade]:
        """Whether answers are the references, in order.

        `correct` is None where nobody knows: of a fault, and of an item that is no task, `error` says what was wrong.
        """
        return await asyncio.gather(*map(self._math, _listed(items)))

    async def judge(self, items: Iterable[JudgeTask | Mapping[str, Any]]) -> list[Judgement | SandboxError]:
        """What submissions are worth, in order; a SandboxError for one that got no judgement.

        `score` is None where nobody knows.
        """
        return await asyncio.gather(*map(self._judge, _listed(items)))

    @classmethod
    @contextmanager
    def blocking(cls, url: str = DEFAULT_URL, **options: Unpack[ClientOptions]) -> Iterator[BlockingGrader]:
        """The same for code without an event loop, and for many threads at a time."""
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(cls(url, **options)) as grader,
        ):
            yield BlockingGrader(grader, portal)

    async def _math(self, item: MathTask | Mapping[str, Any]) -> MathGrade:
        async with self._places:
            try:
                return await grade_math(_as(MathTask, item), self._run, self._kept)
            except SandboxError as exc:
                return MathGrade.of_error(exc)

    async def _judge(self, item: JudgeTask | Mapping[str, Any]) -> Judgement | SandboxError:
        async with self._places:
            try:
                return await judge(_as(JudgeRequest, item).root, self._run)
            except SandboxError as exc:
                return exc

    async def _run(self, call: ToolCall) -> ToolResult:
        """What came of a call, a fault too."""
        [answer] = await self._client.run_many([call])
        if isinstance(answer, SandboxError):
            raise answer
        return answer


class BlockingGrader:
    """What `Grader.blocking` lends: the grader's methods, waited for. Any thread may call them."""

    def __init__(self, grader: Grader, portal: BlockingPortal) -> None:
        self._grader = grader
        self._portal = portal

    def math(self, items: Iterable[MathTask | Mapping[str, Any]]) -> list[MathGrade]:
        """See `Grader.math`."""
        return self._portal.call(self._grader.math, items)

    def judge(self, items: Iterable[JudgeTask | Mapping[str, Any]]) -> list[Judgement | SandboxError]:
        """See `Grader.judge`."""
        return self._portal.call(self._grader.judge, items)


def _listed(items: Iterable[T]) -> Iterable[T]:
    if isinstance(items, Mapping | BaseModel):  # whose names or fields would be taken for items
        raise TypeError("a grader takes a list of items, also of a single one")
    return items


def _as(model: type[M], item: BaseModel | Mapping[str, Any]) -> M:
    """A task of this kind. Raises InvalidCall."""
    try:
        return model.model_validate(item)
    except ValidationError as exc:
        raise InvalidCall(first_error(exc)) from exc
