"""What the kernel tells of TCP connections over IPv4, from /proc/net/tcp."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_ESTABLISHED, _LISTEN = "01", "0A"


def accept_queue(port: int) -> int:
    """How many connections to a port wait to be accepted, in the fullest of the sockets that listen there.

    A connection beyond the bound of that queue is dropped without a word and tried again after a second.
    """
    fullest = 0
    for local, _, state, queues in _rows():
        if state != _LISTEN:
            break  # sockets that listen come first
        if _port(local) == port:
            fullest = max(fullest, int(queues.partition(":")[2], 16))
    return fullest


def established(port: int, sources: Collection[str]) -> int:
    """How many connections from these addresses the port has."""
    wanted = {_hex(address) for address in sources}
    return sum(
        state == _ESTABLISHED and _port(local) == port and remote.partition(":")[0] in wanted
        for local, remote, state, _ in _rows()
    )


def established_to(port: int) -> int:
    """How many connections to a port there are, from whomever on this machine.

    The kernel writes a long table in pieces, and may show a connection twice where others come and go between them.
    """
    return len(
        {local for local, remote, state, _ in _rows() if state == _ESTABLISHED and _port(remote) == port}
    )


def _rows() -> Iterator[list[str]]:
    """Local address, remote address, state, both queues."""
    with _TABLE.open(encoding="ascii") as lines:
        next(lines)
        for line in lines:
            yield line.split(maxsplit=5)[1:5]


def _port(address: str) -> int:
    return int(address.partition(":")[2], 16)


def _hex(address: str) -> str:
    """As the table writes it: a word in the order of this machine's bytes."""
    return f"{int.from_bytes(ipaddress.IPv4Address(address).packed, sys.byteorder):08X}"
