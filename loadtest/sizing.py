"""How many processes so many connections take on this machine.

Three bounds of the kernel count. A process has a hard limit on open files. A pair of addresses has as many
connections to one port as there are ephemeral ports, so each client process has a loopback address of its own. And a
listening socket keeps no more connections that wait to be accepted than net.core.somaxconn.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path

from sandbox import ConfigError

#: Files that a process opens beside its connections, by far.
RESERVE = 256
#: More would be a measurement of interpreters that start.
MOST_GATEWAYS = 32
#: Of the ephemeral ports: near the last one, to find a free one takes long.
_SHARE_OF_PORTS = 0.75
#: The kernel deals connections out to the gateways by a hash, so their numbers differ as if by chance. Once in a
#: billion times one gets so many standard deviations more than its share.
_SPREAD = 6
_LARGEST_BURST = 32
#: A gateway accepts all that wait in one turn of its loop, in which nothing else is done; more at once would measure
#: that its loop stands still, and that comes of how we open and not of how many are open.
_LONGEST_QUEUE = 128


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What one process, one address and one listening socket may have."""

    descriptors: int
    ports: int
    backlog: int

    @classmethod
    def read(cls) -> HostLimits:
        """Those of this machine and process."""
        settings = Path("/proc/sys/net")
        first, last = map(int, (settings / "ipv4/ip_local_port_range").read_text(encoding="ascii").split())
        return cls(
            descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            ports=last - first + 1,
            backlog=int((settings / "core/somaxconn").read_text(encoding="ascii")),
        )

    @property
    def connections(self) -> int:
        """Most connections of a process."""
        return self.descriptors - RESERVE


@dataclass(frozen=True, slots=True)
class Plan:
    """Who opens how many connections to whom."""

    gateways: int
    crowds: tuple[int, ...]  # connections of each client process
    burst: int  # connections that a client opens before it looks at the queue of accepts again
    queue: int  # connections in it at which a client waits
    note: str = ""  # what had to differ from what was asked for

    @property
    def connections(self) -> int:
        """Those of all clients."""
        return sum(self.crowds)


def plan(connections: int, gateways: int, limits: HostLimits) -> Plan:
    """Spread connections over processes; more gateways than asked for where those have too few files, and a note then.

    Raises ConfigError, with what would fit, when that does not do.
    """
    if limits.connections < 1:
        raise ConfigError(
            f"a process may open {limits.descriptors} files here, and that is too few for any of this"
        )
    needed = next(
        (n for n in range(gateways, MOST_GATEWAYS + 1) if _most_of_one(connections, n) <= limits.connections),
        None,
    )
    why = (
        f"{connections} connections are up to {_most_of_one(connections, gateways)} for each of {gateways} gateway "
        f"process(es), and a process may open {limits.descriptors} files (ulimit -Hn)"
    )
    if needed is None:
        fits = MOST_GATEWAYS * limits.connections // 2
        raise ConfigError(f"{why}; {fits} connections would fit over {MOST_GATEWAYS} gateways")
    most = min(limits.connections, int(limits.ports * _SHARE_OF_PORTS))
    clients = ceil(connections / most)
    return Plan(
        gateways=needed,
        crowds=tuple((connections + n) // clients for n in range(clients)),
        burst=max(1, min(_LARGEST_BURST, limits.backlog // (4 * clients))),
        queue=min(_LONGEST_QUEUE, limits.backlog // 2),
        note=f"{why}: {needed} gateways instead" if needed > gateways else "",
    )


def _most_of_one(connections: int, gateways: int) -> int:
    """How many connections one of the gateways can get."""
    share = connections / gateways
    return ceil(min(connections, share + _SPREAD * sqrt(share * (1 - 1 / gateways))))
