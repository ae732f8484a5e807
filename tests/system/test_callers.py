"""What `SandboxClient` promises its callers, over a whole stack: nothing runs for nobody, nothing runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest
import redis

from sandbox import Limits, NotFound, SandboxClient, ToolCall, ToolResult
from sandbox.keys import Keys

from .processes import LOOK_S
from .stack import Stack, stack

LONG = Limits(wall_s=60)
KEYS = Keys("sandbox")


@pytest.fixture(scope="module")
def the_stack() -> Iterator[Stack]:
    """Two gateways and one worker."""
    with stack("--gateways", "2", "--slots", "16") as running:
        yield running


def calls_put(running: Stack) -> int:
    """How many calls were ever queued."""
    [socket] = running.directory.glob("sandbox-redis-*/redis.sock")
    with redis.Redis(unix_socket_path=str(socket)) as client:
        return int(client.xinfo_stream(KEYS.calls("tool"))["entries-added"])


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Return when it is so; the test's time limit bounds it."""
    while not await is_so():  # noqa: ASYNC110 - nobody tells us
        await asyncio.sleep(LOOK_S)


async def runs(client: SandboxClient, count: int) -> bool:
    """Whether so many programs run."""
    backlog = (await client.status())["backlog"]
    return isinstance(backlog, dict) and (backlog["waiting"], backlog["running"]) == (0, count)


async def test_calls_of_a_gateway_that_is_killed_are_joined(the_stack: Stack) -> None:
    """Their connections break, the client sends them again by other gateways, and not one is queued twice."""
    before = calls_put(the_stack)
    calls = [ToolCall(id=f"join-{n}", code=f"import time\ntime.sleep(2)\nprint({n})") for n in range(12)]
    async with SandboxClient(the_stack.url) as client:
        asked = asyncio.create_task(client.run_many(calls))
        await until(lambda: runs(client, 12))
        for gateway in the_stack.gateways:  # one of them has all of these
            os.kill(gateway, signal.SIGKILL)
        assert not asked.done()
        answers = await asked
    assert [one.stdout for one in answers if isinstance(one, ToolResult)] == [f"{n}\n" for n in range(12)]
    assert calls_put(the_stack) == before + len(calls)


async def test_a_program_ends_with_the_caller_that_waits_for_it(the_stack: Stack) -> None:
    """A cancelled call ends long before its time, alone of its request; the end of the client ends the rest."""
    async with SandboxClient(the_stack.url) as client:
        one, other = (
            asyncio.create_task(client.run("import time\ntime.sleep(50)", limits=LONG)) for _ in range(2)
        )
        await until(lambda: runs(client, 2))
        one.cancel()
        await until(lambda: runs(client, 1))
        assert not other.done()
    await asyncio.gather(one, other, return_exceptions=True)
    async with SandboxClient(the_stack.url) as client:
        await until(lambda: runs(client, 0))


async def test_a_call_can_be_cancelled_and_sent_again(the_stack: Stack) -> None:
    """A caller that timed out and tries once more under the same id gets a result, not its own cancellation."""
    call = ToolCall(id="again", code="import time\ntime.sleep(1)\nprint(1)")
    async with SandboxClient(the_stack.url) as client:
        other = asyncio.create_task(client.run("import time\ntime.sleep(50)", limits=LONG))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await client.run(call)
        assert (await client.run(call)).stdout == "1\n"
        other.cancel()
        await asyncio.wait({other})


async def test_a_job_is_run_while_nobody_waits(the_stack: Stack) -> None:
    """Its result is there when it is asked for, from another client too, and an unknown id is NotFound."""
    async with SandboxClient(the_stack.url) as client:
        job = await client.submit("import time\ntime.sleep(0.5)\nprint(6 * 7)")
        assert await client.result(job) is None
    async with SandboxClient(the_stack.url) as client:
        result = await client.result(job, wait_s=30)
        assert result is not None
        assert result.stdout == "42\n"
        with pytest.raises(NotFound):
            await client.result("never-sent")


async def test_slow_calls_hold_no_fast_ones(the_stack: Stack) -> None:
    """More of them than the client has connections, each sent alone: what is fast is answered while they all run.

    They are handed over between the gateways meanwhile, and not one is queued twice or ended by that; but each ends
    when its caller leaves.
    """
    before = calls_put(the_stack)
    async with SandboxClient(the_stack.url) as client:
        slow = []
        for count in range(1, 15):
            slow.append(asyncio.create_task(client.run("import time\ntime.sleep(50)", limits=LONG)))
            await until(lambda count=count: runs(client, count))  # type: ignore[misc]
        for n in range(12):
            assert (await client.run(f"print({n})")).stdout == f"{n}\n"
        answers = await asyncio.gather(*(client.run(f"print({n})") for n in range(100)))
        assert [answer.stdout for answer in answers] == [f"{n}\n" for n in range(100)]
        assert calls_put(the_stack) == before + len(slow) + 112
        assert not any(task.done() for task in slow)
        assert await runs(client, len(slow))
        slow.pop().cancel()
        await until(lambda: runs(client, len(slow)))
        for task in slow:
            task.cancel()
        await until(lambda: runs(client, 0))
        await asyncio.gather(*slow, return_exceptions=True)


async def test_calls_that_were_handed_over_are_answered_once(the_stack: Stack) -> None:
    """Each by what its own program printed, whichever request and gateway it came by."""
    before = calls_put(the_stack)
    calls = [f"import time\ntime.sleep({1 + n % 3})\nprint({n})" for n in range(14)]
    async with SandboxClient(the_stack.url) as client:
        slow = []
        for code in calls:
            slow.append(asyncio.create_task(client.run(code)))
            await client.run("print()")
        answers = await asyncio.gather(*slow)
    assert [answer.stdout for answer in answers] == [f"{n}\n" for n in range(14)]
    assert calls_put(the_stack) == before + 2 * len(calls)
