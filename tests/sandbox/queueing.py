"""What the tests of the queue share: calls, results, and what a stranger sees and does in Redis.

Time is not waited for. A lease is made idle, a key made to expire, by a stranger's connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sandbox.calls import CallStatus, ToolCall, ToolResult
from sandbox.keys import GROUP, Keys
from sandbox.queue import CallQueue, Delivery, Outcome, QueuedCall, WorkerInfo

KEYS = Keys("test")
TOOL, JUDGE = KEYS.calls("tool"), KEYS.calls("judge")
TIGHT = 3.0  # seconds within which a failure must show; the slowest of ours takes 2


def calls(
    queue: CallQueue, *names: str, tenant: str = "", is_job: bool = False, **said: Any
) -> list[QueuedCall]:
    """Calls by their ids, accepted now and due in a minute."""
    now_ms = queue.now_ms()
    return [
        QueuedCall(
            ToolCall(**({"id": name, "code": f"print({name!r})"} | said)),
            queue.record(tenant, name),
            now_ms,
            now_ms + 60_000,
            is_job,
        )
        for name in names
    ]


def ok(delivery: Delivery, stdout: str = "") -> Outcome:
    """The delivery with a verdict for it."""
    return Outcome(
        delivery, ToolResult(id=delivery.call.id, status=CallStatus.OK, exit_code=0, stdout=stdout)
    )


def failed(delivery: Delivery, *, is_poison: bool = False) -> Outcome:
    """The delivery with a fault for it."""
    result = ToolResult(id=delivery.call.id, status=CallStatus.INTERNAL_ERROR, reason="the worker broke")
    return Outcome(delivery, result, is_poison)


def names(deliveries: Sequence[Delivery]) -> list[str]:
    """Ids of the calls."""
    return [delivery.call.id for delivery in deliveries]


def answered(replies: Sequence[tuple[str, bytes]]) -> list[str]:
    """Ids of the calls that these replies are for."""
    return [record.partition("|")[2] for record, _ in replies]


def stdouts(replies: Sequence[tuple[str, bytes]]) -> list[str]:
    """What the programs printed."""
    return [ToolResult.model_validate_json(result).stdout for _, result in replies]


def worker(name: str, busy: int = 0) -> WorkerInfo:
    """A worker as it announces itself."""
    return WorkerInfo(
        id=name, slots=4, busy=busy, level="namespaces", draining=False, started_at=1.5, version="0.1.0"
    )


def make_idle(redis_server: Any, delivery: Delivery, idle_s: float) -> None:
    """Let a lease look as if nobody had renewed it for so long, without touching owner or count."""
    entry_id = delivery.entry_id
    with redis_server.client() as stranger:
        (pending,) = stranger.xpending_range(delivery.stream, GROUP, entry_id, entry_id, 1)
        stranger.xclaim(
            delivery.stream, GROUP, pending["consumer"], 0, [entry_id], idle=int(idle_s * 1000), justid=True
        )


def lag(redis_server: Any, stream: str = TOOL) -> int | None:
    """What an autoscaler reads."""
    with redis_server.client() as stranger:
        (group,) = stranger.xinfo_groups(stream)
        return group["lag"]


def pending(redis_server: Any, stream: str = TOOL) -> int:
    """How many calls the workers hold."""
    with redis_server.client() as stranger:
        return stranger.xpending(stream, GROUP)["pending"]


def fill_up(redis_server: Any) -> None:
    """Leave Redis no memory."""
    with redis_server.client() as stranger:
        stranger.config_set("maxmemory", 1)


def make_room(redis_server: Any) -> None:
    """Give it what it had."""
    with redis_server.client() as stranger:
        stranger.config_set("maxmemory", 0)
