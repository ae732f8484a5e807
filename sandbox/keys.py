"""Every key that the service writes to Redis, built here and nowhere else.

| key                      | type       | written by  | read by      | expires                              |
|--------------------------|------------|-------------|--------------|--------------------------------------|
| `{ns}:calls:tool`        | stream     | gateways    | workers      | never: it carries the consumer group |
| `{ns}:calls:judge`       | stream     | gateways    | workers      | never: it carries the consumer group |
| `{ns}:replies:<gateway>` | list       | workers     | that gateway | `REPLY_TTL_S` after the last push    |
| `{ns}:workers`           | sorted set | workers     | gateways     | with the longest announcement in it  |
| `{ns}:worker:<id>`       | string     | that worker | gateways     | with its announcement                |

`{ns}` is the namespace, and its braces are part of the key: a Redis cluster hashes only what stands between
them, so all keys of one service share a slot and may meet in one transaction.

The two streams are trimmed to the oldest call that still runs, so a permanent key is not a growing one.
"""

from __future__ import annotations

from dataclasses import dataclass

#: A reply waits this long for its gateway, which reads at once. What lies there for several times as long as
#: a failover of Redis takes (some 30 s) belongs to a gateway that is gone.
REPLY_TTL_S = 120

#: The one consumer group of both streams. The autoscaler reads its lag by this name.
GROUP = "workers"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one namespace."""

    namespace: str

    def calls(self, priority: str) -> str:
        """Stream of the calls of one priority, one entry a call, which workers share by a consumer group."""
        return f"{{{self.namespace}}}:calls:{priority}"

    def replies(self, gateway: str) -> str:
        """List of the results that one gateway process waits for; an element is `<call id> <result JSON>`."""
        return f"{{{self.namespace}}}:replies:{gateway}"

    @property
    def workers(self) -> str:
        """Sorted set of worker ids; the score is the time at which the announcement ends, in Redis's ms."""
        return f"{{{self.namespace}}}:workers"

    def worker(self, worker_id: str) -> str:
        """What one worker announces of itself, as JSON. The key is there as long as the worker lives."""
        return f"{{{self.namespace}}}:worker:{worker_id}"

    @property
    def permanent(self) -> frozenset[str]:
        """The keys that never expire. Any other key of ours without an expiry is a leak."""
        return frozenset({self.calls("tool"), self.calls("judge")})
