"""Every key that the service writes to Redis, built here and nowhere else.

| key                      | type       | written by        | read by      | expires                              |
|--------------------------|------------|-------------------|--------------|--------------------------------------|
| `{ns}:calls:tool`        | stream     | gateways          | workers      | never: it carries the consumer group |
| `{ns}:calls:judge`       | stream     | gateways          | workers      | never: it carries the consumer group |
| `{ns}:call:<tenant>|<id>`| hash       | gateways, workers | both         | `KEEP_S` after deadline or result      |
| `{ns}:replies:<gateway>` | stream     | workers           | that gateway | `MAIL_TTL_S` after the last entry    |
| `{ns}:orders:<worker>`   | stream     | gateways          | that worker  | `MAIL_TTL_S` after the last entry    |
| `{ns}:dead`              | stream     | workers           | gateways     | never; it holds the last 1,000       |
| `{ns}:workers`           | sorted set | workers           | gateways     | with the longest announcement in it  |
| `{ns}:worker:<id>`       | string     | that worker       | gateways     | with its announcement                |

`{ns}` is the namespace, and its braces are part of the key: a Redis cluster hashes only what stands between
them, so all keys of one service share a slot and may meet in one transaction.

The two streams of calls are trimmed to the oldest call that still runs, so a permanent key is not a growing one.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Replies and orders wait this long for their reader, who reads at once. What lies there for several times as long
#: as a failover of Redis takes (some 30 s) belongs to a process that is gone.
MAIL_TTL_S = 120

#: For so long a call that is sent again gets the result that is there: a caller whose connection broke comes back
#: within seconds. Less while Redis fills up.
KEEP_S = 60
#: The same for a job, whose caller may have been away for long.
KEEP_JOB_S = 600

#: The one consumer group of both streams. The autoscaler reads its lag by this name.
GROUP = "workers"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one namespace."""

    namespace: str

    def calls(self, priority: str) -> str:
        """Stream of the calls of one priority, one entry a call, which workers share by a consumer group."""
        return f"{{{self.namespace}}}:calls:{priority}"

    def call(self, tenant: str, call_id: str) -> str:
        """Hash: the record of a call, from its put until its result is forgotten (see `queue.lua`).

        Neither part holds a `|`, so no two calls share a record.
        """
        return f"{{{self.namespace}}}:call:{tenant}|{call_id}"

    @staticmethod
    def tenant(record: str) -> str:
        """The tenant in the key of a record."""
        return record.partition("}:call:")[2].partition("|")[0]

    def replies(self, gateway: str) -> str:
        """Stream of what one gateway process waits for; an entry holds records with their results.

        The result of a call that somebody has stopped is empty.
        """
        return f"{{{self.namespace}}}:replies:{gateway}"

    def orders(self, worker: str) -> str:
        """Stream of entries that one worker shall stop running, because nobody waits for them any more."""
        return f"{{{self.namespace}}}:orders:{worker}"

    @property
    def dead(self) -> str:
        """Stream of calls that no worker survived, a DeadLetter as JSON each."""
        return f"{{{self.namespace}}}:dead"

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
        return frozenset({self.calls("tool"), self.calls("judge"), self.dead})
