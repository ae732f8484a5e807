"""SandboxClient when slow calls hold its requests open: they are handed over, and hold up nobody."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from sandbox import CallTooLarge, Forbidden, SandboxClient, ToolCall, ToolResult, Unavailable

from .fake_gateway import FakeGateway, Request, result

BATCHES = 11  # that are open before one takes along what others wait for


class Service:
    """Answers each call at once, but those whose code is `slow`: these when they are released."""

    def __init__(self) -> None:
        self.released = asyncio.Event()
        self.seen: Counter[str] = Counter()  # how often each id was sent
        self.open: list[Request] = []
        self.moves: list[Request] = []
        #: What is done instead with a request that takes calls along, by its number among these; then it is over.
        self.instead: dict[int, Callable[[Request], Awaitable[None]]] = {}
        self._news = asyncio.Condition()

    async def answer(self, request: Request) -> None:
        if request.handed_over:
            self.moves.append(request)
            if (instead := self.instead.get(len(self.moves) - 1)) is not None:
                await instead(request)
                return
        self.open.append(request)
        async with self._news:
            self.seen.update(call["id"] for call in request.calls)
            self._news.notify_all()
        try:
            await self._serve(request)
        finally:
            self.open.remove(request)
            async with self._news:
                self._news.notify_all()

    async def _serve(self, request: Request) -> None:
        await request.head()
        if request.handed_over:
            await request.known()
        slow = [index for index, call in enumerate(request.calls) if call["code"] == "slow"]
        for index in set(range(len(request.calls))) - set(slow):
            await request.line(index, result(request.calls[index]))
        if slow:
            await request.until(self.released)
        for index in slow:
            await request.line(index, result(request.calls[index]))
        await request.end()

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(is_so)

    async def occupy(self, client: SandboxClient, count: int) -> list[asyncio.Task[ToolResult]]:
        """So many slow calls, each sent when the one before has arrived, and so in another request."""
        tasks = []
        for number in range(count):
            call = ToolCall(id=f"slow-{number}", code="slow")
            tasks.append(asyncio.create_task(client.run(call)))
            await self.until(partial(self._has_seen, call.id))
        return tasks

    def _has_seen(self, call_id: str) -> bool:
        return self.seen[call_id] > 0


async def all_fast(client: SandboxClient, count: int) -> None:
    """So many calls that are answered at once."""
    codes = [f"print({n})" for n in range(count)]
    assert [one.stdout for one in await asyncio.gather(*map(client.run, codes))] == codes


async def released(service: Service, slow: list[asyncio.Task[ToolResult]]) -> None:
    """Every slow call is answered, now and not before."""
    assert not any(task.done() for task in slow)
    service.released.set()
    assert [one.id for one in await asyncio.gather(*slow)] == [f"slow-{n}" for n in range(len(slow))]


async def test_slow_calls_hold_no_fast_ones() -> None:
    """Three times as many slow calls as connections, each in a batch of its own, and fast ones are answered meanwhile.

    No slow call moves often, nothing is told to end, and there are no more than 16 connections.
    """
    service = Service()
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, 48)
        for _ in range(20):
            await all_fast(client, 50)
        await released(service, slow)
    assert gateway.most_connections <= 16
    assert 1 < max(service.seen[f"slow-{n}"] for n in range(48)) < 8
    assert gateway.cancels == []


async def test_slow_calls_in_every_batch_of_a_full_client_hold_no_fast_ones() -> None:
    """All that may be in flight but one place are slow calls, and a fast one still leaves."""
    service = Service()
    async with (
        FakeGateway(service.answer) as gateway,
        SandboxClient(gateway.url, max_in_flight=400) as client,
    ):
        slow = [asyncio.create_task(client.run(ToolCall(id=f"slow-{n}", code="slow"))) for n in range(399)]
        await service.until(lambda: len(service.seen) == 399)
        for _ in range(20):
            await all_fast(client, 1)
        await released(service, slow)
    assert gateway.most_connections <= 16


async def test_large_requests_are_left_alone() -> None:
    """Few slow calls move again and again, and the many of one batch stay where they are."""
    service = Service()
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        large = [asyncio.create_task(client.run(ToolCall(id=f"large-{n}", code="slow"))) for n in range(120)]
        await service.until(lambda: len(service.seen) == 120)
        slow = await service.occupy(client, 48)
        await all_fast(client, 50)
        await released(service, slow)
        await asyncio.gather(*large)
    assert {service.seen[f"large-{n}"] for n in range(120)} == {1}
    assert max(service.seen[f"slow-{n}"] for n in range(48)) > 1


async def test_a_gateway_that_takes_small_batches_gets_small_ones() -> None:
    """What is refused with 413 takes along half as many calls the next time."""
    service = Service()

    async def at_most_four(request: Request) -> None:
        if len(request.calls) > 4:
            await request.refuse(413, "CallTooLarge")
        else:
            await service.answer(request)

    async with FakeGateway(at_most_four) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        await all_fast(client, 4)
        await released(service, slow)


async def test_there_are_never_more_than_16_connections() -> None:
    """Thousands of calls, slow ones among them, with callers that leave, jobs that are waited for, and new ones."""
    service = Service()
    waiting = 0

    async def job(request: Request) -> None:
        nonlocal waiting
        waiting += 1
        if "?wait=" in request.path and not request.path.endswith("=0"):
            await request.until(service.released)
        await request.whole(200 if request.method == "DELETE" else 202, b"{}")

    async with FakeGateway(service.answer, job) as gateway, SandboxClient(gateway.url) as client:
        slow = [asyncio.create_task(client.run(ToolCall(id=f"slow-{n}", code="slow"))) for n in range(500)]
        questions = [asyncio.create_task(client.result(f"job-{n}", wait_s=50)) for n in range(40)]
        for _ in range(10):
            await all_fast(client, 200)
        for task in slow[250:]:
            task.cancel()
        for n in range(20):
            await client.submit(f"print({n})")
        await all_fast(client, 200)
        for question in questions:
            question.cancel()
        await asyncio.gather(*questions, *slow[250:], return_exceptions=True)
        await released(service, slow[:250])
    assert gateway.most_connections <= 16


def refuse(status: int, name: str) -> Callable[[Request], Awaitable[None]]:
    async def instead(request: Request) -> None:
        await request.refuse(status, name)

    return instead


async def drop(request: Request) -> None:
    request.drop()


async def drop_after_head(request: Request) -> None:
    await request.head()
    request.drop()


@pytest.mark.parametrize(
    "instead",
    [
        refuse(429, "Overloaded"),
        refuse(413, "CallTooLarge"),
        refuse(503, "Unavailable"),
        drop,
        drop_after_head,
    ],
)
async def test_a_request_that_cannot_take_calls_along_leaves_them(
    instead: Callable[[Request], Awaitable[None]],
) -> None:
    """Refused or broken, it loses nothing: the old requests stay open, and its own calls are sent again."""
    service = Service()
    service.instead[0] = instead
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        first = list(service.open)
        fast = asyncio.create_task(all_fast(client, 3))
        await service.until(lambda: len(service.moves) == 2)
        assert service.open[:BATCHES] == first
        await fast
        await released(service, slow)


async def test_old_requests_stay_until_their_calls_are_known() -> None:
    """An answer of one that comes meanwhile counts, and the second one of the same call is dropped."""
    service = Service()
    moving, go_on = asyncio.Event(), asyncio.Event()

    async def known_late(request: Request) -> None:
        await request.head()
        moving.set()
        await go_on.wait()
        await request.known()
        for index, call in enumerate(request.calls):
            await request.line(index, result(call, stdout="from the second"))
        await request.end()

    service.instead[0] = known_late
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        fast = asyncio.create_task(client.run("fast"))
        await moving.wait()
        one = next(request for request in service.open if request.calls[0]["id"] == "slow-3")
        await one.line(0, result(one.calls[0], stdout="from the first"))
        await one.end()
        assert (await slow[3]).stdout == "from the first"
        one.drop()
        await service.until(lambda: len(service.open) == BATCHES - 1)
        assert not any(task.done() for task in (*slow[:3], *slow[4:]))
        go_on.set()
        answers = await asyncio.gather(*slow, fast)
        assert Counter(answer.stdout for answer in answers) == {
            "from the first": 1,
            "from the second": BATCHES,
        }
        assert client._wire._in_flight == 0
    assert gateway.cancels == []


async def test_a_connection_that_breaks_while_its_calls_move_loses_none() -> None:
    """The new request has them; where that is refused after all, they are sent again, whatever it was refused for."""
    service = Service()

    async def break_the_old(request: Request) -> None:
        for old in list(service.open):
            old.drop()
        await service.until(lambda: not service.open)
        await request.refuse(403, "Forbidden")

    service.instead[0] = break_the_old
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        with pytest.raises(Forbidden):
            await client.run("fast")
        await released(service, slow)


async def test_what_moves_without_loss_is_sent_once_more_only() -> None:
    """When the old connections break after the new request has come, it is enough that it has the calls."""
    service = Service()

    async def break_the_old(request: Request) -> None:
        for old in list(service.open):
            old.drop()
        await service.until(lambda: not service.open)
        await request.head()
        await request.known()
        for index, call in enumerate(request.calls):
            await request.line(index, result(call))
        await request.end()

    service.instead[0] = break_the_old
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        await all_fast(client, 1)
        await asyncio.gather(*slow)
    assert len(gateway.requests) == BATCHES + 1


async def test_a_caller_that_leaves_while_its_call_moves_ends_it() -> None:
    """The gateway is told of its end when it is known to the new request, for before that it could be queued anew."""
    service = Service()
    moving, go_on, order = asyncio.Event(), asyncio.Event(), []

    async def known_late(request: Request) -> None:
        await request.head()
        moving.set()
        await go_on.wait()
        order.append("known")
        await request.known()
        await request.line(0, result(request.calls[0]))
        await request.until(service.released)
        for index, call in enumerate(request.calls[1:], start=1):
            await request.line(index, result(call))
        await request.end()

    async def cancel(request: Request) -> None:
        order.append(request.path)
        await request.whole(200, b"{}")
        service.released.set()

    service.instead[0] = known_late
    async with FakeGateway(service.answer, cancel) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        fast = asyncio.create_task(client.run("fast"))
        await moving.wait()
        slow[3].cancel()
        await asyncio.wait({slow[3]})
        await client.status()  # comes after what was asked before
        assert gateway.cancels == []
        go_on.set()
        await asyncio.gather(*slow[:3], *slow[4:], fast)
    assert order == ["known", "/v1/jobs/slow-3"]


async def test_a_client_that_closes_while_calls_move_tells_everybody() -> None:
    """Whoever waits, by one request or two, is told once."""
    service = Service()
    moving = asyncio.Event()

    async def never(request: Request) -> None:
        moving.set()
        await request.until(asyncio.Event())

    service.instead[0] = never
    async with FakeGateway(service.answer) as gateway:
        async with SandboxClient(gateway.url) as client:
            slow = await service.occupy(client, BATCHES)
            fast = asyncio.create_task(client.run("fast"))
            await moving.wait()
        ends = await asyncio.gather(*slow, fast, return_exceptions=True)
    assert all(isinstance(end, Unavailable) for end in ends)
    assert client._wire._in_flight == 0


async def test_a_call_that_the_new_request_does_not_get_stays_with_the_old_one() -> None:
    """Another gateway may refuse one alone, since it does not know that it runs: its old request goes on."""
    service = Service()

    async def refuse_one(request: Request) -> None:
        place = next(n for n, call in enumerate(request.calls) if call["id"] == "slow-3")
        await request.head()
        await request.line(place, {"error": {"name": "Overloaded", "message": "full"}})
        await request.known()
        await request.until(service.released)
        for index in set(range(len(request.calls))) - {place}:
            await request.line(index, result(request.calls[index]))
        await request.end()

    service.instead[0] = refuse_one
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        fast = asyncio.create_task(client.run("fast"))
        await service.until(lambda: len(service.open) == 1)
        await released(service, slow)
        await fast
    assert service.seen["slow-3"] == 1


async def test_a_gateway_that_has_few_places_left_gets_few_calls_again() -> None:
    """A call counts twice while it moves. So many as have no place beside the others are not asked for again."""
    service, in_flight = Service(), 0

    async def at_most_twenty(request: Request) -> None:
        nonlocal in_flight
        if in_flight + len(request.calls) > 20:
            await request.refuse(429, "Overloaded")
            return
        in_flight += len(request.calls)
        try:
            await service.answer(request)
        finally:
            in_flight -= len(request.calls)

    async with FakeGateway(at_most_twenty) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        async with asyncio.timeout(10):
            await all_fast(client, 1)
        await released(service, slow)


async def test_calls_that_are_known_late_still_free_the_old_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that was frozen goes on: else all connections would be taken until a slow call ends."""
    monkeypatch.setattr("sandbox.wire._KNOWN_S", 0.2)
    service = Service()
    moving, go_on = asyncio.Event(), asyncio.Event()

    async def known_late(request: Request) -> None:
        moving.set()
        await go_on.wait()
        await service._serve(request)

    service.instead[0] = known_late
    async with FakeGateway(service.answer) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        fast = asyncio.create_task(client.run("fast"))
        await moving.wait()
        await asyncio.sleep(0.5)
        assert len(service.open) == BATCHES
        go_on.set()
        await fast
        async with asyncio.timeout(10):
            await all_fast(client, 3)
        await released(service, slow)


async def test_a_call_that_fits_nowhere_holds_up_no_other() -> None:
    """It is refused for itself, not for what it was to take along, and others leave meanwhile."""
    service = Service()

    async def without_huge_ones(request: Request) -> None:
        if any(call["code"] == "huge" for call in request.calls):
            await request.refuse(413, "CallTooLarge")
        else:
            await service.answer(request)

    async with FakeGateway(without_huge_ones) as gateway, SandboxClient(gateway.url) as client:
        slow = await service.occupy(client, BATCHES)
        async with asyncio.timeout(10):
            with pytest.raises(CallTooLarge):
                await client.run("huge")
            await all_fast(client, 3)
        await released(service, slow)


async def test_an_open_client_can_be_opened_again() -> None:
    """Whatever waited when it was closed."""
    async with FakeGateway() as gateway:
        client = SandboxClient(gateway.url, max_in_flight=1)
        async with client:
            calls = [asyncio.create_task(client.run("x")) for _ in range(3)]
            await asyncio.sleep(0)
        await asyncio.gather(*calls, return_exceptions=True)
        async with client, asyncio.timeout(5):
            await all_fast(client, 3)


async def test_a_call_that_waits_to_be_sent_again_is_told_of_the_close() -> None:
    """By the refusal that it had, as others are."""
    refused = asyncio.Event()

    async def no(request: Request) -> None:
        await request.refuse(503, "Unavailable", retry_after="1")
        refused.set()

    async with FakeGateway(no) as gateway:
        async with SandboxClient(gateway.url) as client:
            call = asyncio.create_task(client.run("x"))
            await refused.wait()
            await asyncio.sleep(0.1)
        with pytest.raises(Unavailable):
            await call
