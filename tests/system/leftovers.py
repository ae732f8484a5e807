"""What a service must not leave behind: in Redis when no call is open, and on the machine when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import redis

from sandbox.jail.cgroups import FOLDER, find_place
from sandbox.keys import GROUP, Keys

from .processes import LOOK_S, Process

#: Within this time the last of what ended is gone: a lease, a heartbeat, a trim, and the kernel's own work.
SETTLE_S = 30.0


def in_redis(client: redis.Redis, namespace: str = "sandbox") -> list[str]:
    """What is there beside streams without a call in them and keys that expire."""
    keys = Keys(namespace)
    left = []
    for stream in (keys.calls("tool"), keys.calls("judge")):
        infos: Any = client.xinfo_groups(stream) if client.exists(stream) else []
        [told] = [(info["lag"], info["pending"]) for info in infos if info["name"] == GROUP.encode()] or [
            (0, 0)
        ]
        if told != (0, 0):
            left.append(f"{stream}: lag {told[0]}, pending {told[1]}")
    names = [name.decode() for name in client.scan_iter(f"{{{namespace}}}:*")]
    lasting = [name for name in names if name not in keys.permanent and client.ttl(name) == -1]
    return left + [f"{name} never expires" for name in lasting]


class Ended(Protocol):
    """What is asked of a stack that has ended."""

    directory: Path

    def processes(self) -> set[Process]:
        """Those of its own that live."""


def on_machine(stack: Ended, workers: Iterable[int], mounts: set[str]) -> list[str]:
    """What is there of a stack that has ended, of all the workers that it ever had, and new mounts of its own."""
    left = [f"process {process.pid}: {process.command[:80]}" for process in stack.processes()]
    left += [f"file {path}" for path in stack.directory.rglob("*")]
    parents = find_place().parents.values()
    left += [
        f"group {folder}"
        for parent in parents
        for pid in workers
        for folder in parent.glob(f"{FOLDER}-w{pid}-*")
    ]
    left += [f"mount {line}" for line in mounts_of_ours() - mounts]
    return left


def mounts_of_ours() -> set[str]:
    """The mounts on this side of the jails' walls that are the service's."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return {line for line in lines if "sandbox" in line or "/stack-" in line}


def settled(look: Callable[[], list[str]], patience_s: float = SETTLE_S) -> list[str]:
    """What is left as soon as nothing is, or when that takes too long."""
    end = time.monotonic() + patience_s
    while (left := look()) and time.monotonic() < end:
        time.sleep(LOOK_S)
    return left
