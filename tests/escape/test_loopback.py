"""With loopback a program has sockets, which reach itself; they open no further part of the kernel, and have a bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from sandbox.calls import MIB
from tests.sandbox.jail.box import Box

from .probe import outcomes, probe


@pytest.fixture(scope="module")
def loopback_box() -> Iterator[Box]:
    """A jail whose programs have sockets."""
    with closing(Box(slots=1, network="loopback")) as box:
        yield box


def test_no_further_protocol(loopback_box: Box) -> None:
    """No family, type or protocol but those of TCP, UDP and unix sockets, by raw calls."""
    code = """
allowed = {(1, kind) for kind in (1, 2, 3, 5)} | {(family, kind) for family in (2, 10) for kind in (1, 2)}
for family in (*range(1, 64), 40 | 1 << 32):
    for kind in range(1, 11):
        if (family, kind) not in allowed:
            attempt(f"{family}-{kind}", lambda: syscall("socket", family, kind, 0))
for protocol in (1, 2, 33, 50, 58, 132, 136, 255, 262):
    for kind in (1, 2, 3):
        attempt(f"protocol-{protocol}-{kind}", lambda: syscall("socket", 2, kind, protocol))
for protocol in (6, 17):
    attempt(f"raw-{protocol}", lambda: syscall("socket", 2, 3, protocol))
"""
    assert set(outcomes(loopback_box, code).values()) <= {"EPERM", "EPROTONOSUPPORT", "ESOCKTNOSUPPORT"}


def test_no_further_machinery(loopback_box: Box) -> None:
    """No option brings filters, ciphers, record layers, tunnels or tables of the kernel to a socket."""
    code = """
import socket
stream, datagram = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
for name, level, option in (
    ("filter", 1, 26), ("bpf", 1, 50), ("group-filter", 1, 51), ("group-bpf", 1, 52), ("md5", 6, 14), ("md5-more", 6, 32),
    ("signed", 6, 38), ("tls", 6, 31), ("repair", 6, 19), ("tables", 0, 64), ("counters", 0, 65), ("policy", 0, 17),
    ("tunnel", 17, 100),
):
    for one in (stream, datagram):
        attempt(name, lambda: one.setsockopt(level, option, bytes(256)))
        attempt(name + "-number", lambda: one.setsockopt(level, option, 2))
"""
    assert set(outcomes(loopback_box, code).values()) <= {"EPERM", "ENOPROTOOPT"}


def test_what_lies_in_sockets(loopback_box: Box) -> None:
    """Messages that nobody reads are bounded for the call as a whole, not only for each of its many sockets."""
    if not loopback_box.slots.free[0].group.enter_fds:
        pytest.skip("this host gives no cgroup")
    code = """
import signal, socket
told, tell = os.pipe()
for _ in range(7):
    if os.fork():
        continue
    kept = []
    try:
        while True:
            one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            one.bind(("127.0.0.1", 0))
            one.setblocking(False)
            kept.append(one)
            for _ in range(200):
                one.sendto(bytes(2000), one.getsockname())
    except OSError:
        os.write(tell, b".")
        signal.pause()
for _ in range(7):
    os.read(told, 1)
print(*(line.split()[-1] for line in open("/proc/self/net/sockstat") if line.startswith("UDP:")))
"""
    result = loopback_box.run(probe(code), wall_s=10, cpu_s=30, memory_bytes=128 * MIB, processes=32)
    # The kernel's count is the host's, in pages. Where sockets are charged as memory, they end the call.
    assert result.status == "memory_limit" or int(result.stdout) * 4096 < 96 * MIB
