"""Network `loopback`: sockets that reach the call's own processes, and nothing else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from .box import Box, program
from .conftest import whole

EXCHANGE = """
import socket, threading
def exchange(family, address, kind=socket.SOCK_STREAM):
    server = socket.socket(family, kind)
    server.bind(address)
    server.listen()
    threading.Thread(target=lambda: server.accept()[0].sendall(b"hello")).start()
    client = socket.socket(family, kind)
    client.connect(server.getsockname())
    return client.recv(5)
"""


@pytest.fixture(scope="module")
def _loopback() -> Iterator[Box]:
    with closing(Box(network="loopback")) as box:
        yield box


@pytest.fixture
def loopback(_loopback: Box) -> Iterator[Box]:
    """A jail whose calls have a loopback device."""
    yield from whole(_loopback)


@pytest.mark.parametrize(
    "what",
    [
        'socket.AF_INET, ("127.0.0.1", 0)',
        'socket.AF_INET6, ("::1", 0)',
        'socket.AF_UNIX, "\\0abstract"',
        'socket.AF_UNIX, "/tmp/path"',
        'socket.AF_UNIX, "/tmp/seq", socket.SOCK_SEQPACKET',
    ],
)
def test_a_program_talks_to_itself(loopback: Box, what: str) -> None:
    """Each family that programs use works among the processes of one call."""
    assert loopback.out(f"{EXCHANGE}\nprint(exchange({what}))") == "b'hello'\n"


def test_datagrams(loopback: Box) -> None:
    """UDP as well."""
    code = """
import socket
here = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
here.bind(("127.0.0.1", 0))
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"hello", here.getsockname())
print(here.recv(9))
"""
    assert loopback.out(code) == "b'hello'\n"


def test_a_web_server(loopback: Box) -> None:
    """What the profile is for: a server and its client in one program."""
    code = """
import http.server, threading, urllib.request
server = http.server.HTTPServer(("127.0.0.1", 8000), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen("http://127.0.0.1:8000/main.py").status)
"""
    assert loopback.out(code) == "200\n"


def test_multiprocessing_manager(loopback: Box) -> None:
    """Its server listens on a unix socket."""
    code = """
import multiprocessing
if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        shared = manager.list([1])
        shared.append(2)
        print(list(shared))
"""
    assert loopback.out(code) == "[1, 2]\n"


def test_nothing_else_is_there(loopback: Box) -> None:
    """One device, no route away from it, and no name server."""
    code = """
import errno, socket
print([line.split(":")[0].strip() for line in open("/proc/self/net/dev").read().splitlines()[2:]])
for address in ("10.0.0.1", "192.168.0.1", "169.254.169.254", "8.8.8.8"):
    try:
        socket.create_connection((address, 80), timeout=1)
    except OSError as exc:
        print(errno.errorcode[exc.errno])
"""
    assert loopback.out(code) == "['lo']\n" + 4 * "ENETUNREACH\n"


def test_the_host_is_not_behind_the_address(loopback: Box) -> None:
    """A server of the host on 127.0.0.1 is somewhere else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection({server.getsockname()}, timeout=1)"
        assert "ConnectionRefusedError" in loopback.run(code).stderr


LISTEN = """
import socket, sys, time
tcp, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
try:
    tcp.bind(("127.0.0.1", 7777)); tcp.listen()
    abstract.bind("\\0meeting"); abstract.listen()
    print("listening", flush=True)
    time.sleep(60)
except OSError as exc:
    print(exc, flush=True)
"""
MEET = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", 7777)), (socket.AF_UNIX, "\\0meeting")):
    try:
        socket.socket(family).connect(address)
    except ConnectionRefusedError:
        print("alone")
print([line for line in open("/proc/self/net/unix").read().splitlines()[1:] if "meeting" in line])
print(open("/proc/self/net/tcp").read().count("\\n"))
"""


def test_calls_at_one_time_do_not_meet(loopback: Box) -> None:
    """Each has the same addresses to itself, and sees no socket of another."""

    async def together() -> list[str]:
        listening = [
            asyncio.create_task(loopback.jail.run(program(LISTEN, wall_s=3.0), loopback.slots.free[number]))
            for number in (0, 1)
        ]
        seen = []
        while not all(call.done() for call in listening):
            result = await loopback.jail.run(program(MEET), loopback.slots.free[2])
            seen.append(result.stdout)
        assert [(await call).stdout for call in listening] == 2 * ["listening\n"]
        return seen

    assert set(loopback.do(together())) == {"alone\nalone\n[]\n1\n"}


def test_nothing_is_left_for_the_next_call(loopback: Box) -> None:
    """Not even ports that wait for their end: the next call, in the same slot, binds them at once."""
    code = f"""{EXCHANGE}
print(len(open("/proc/self/net/tcp").read().splitlines()))
print(exchange(socket.AF_INET, ("127.0.0.1", 7777)))
"""
    assert {loopback.out(code) for _ in range(20)} == {"1\nb'hello'\n"}


def test_more_calls_than_namespaces_in_the_pool(loopback: Box) -> None:
    """A burst that empties the pool waits for further ones, and every call is alone."""
    calls = [program(EXCHANGE + 'print(exchange(socket.AF_INET, ("127.0.0.1", 7777)))')] * len(
        loopback.slots.free
    )
    for _ in range(5):
        assert {result.stdout for result in loopback.run_together(calls)} == {"b'hello'\n"}


FAMILIES = """
import socket
allowed = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6}
for family in range(0, 50):
    for kind in range(1, 11):
        for protocol in (0, 1, 2, 6, 17, 33, 58, 132, 136, 255, 262):
            try:
                made = socket.socket(family, kind, protocol)
            except OSError:
                continue
            if family not in allowed or kind not in (1, 2) and family != socket.AF_UNIX or protocol not in (0, 6, 17):
                print("BREACH", family, kind, protocol)
            made.close()
"""


def test_no_other_family_type_or_protocol(loopback: Box) -> None:
    """Of some five thousand combinations those of the profile can be made, and no other."""
    assert loopback.out(FAMILIES) == ""


def test_options_that_programs_use(loopback: Box) -> None:
    """What servers and event loops set is there."""
    code = """
import socket
made = socket.socket(socket.AF_INET6)
for level, names in (
    (socket.SOL_SOCKET, "REUSEADDR REUSEPORT KEEPALIVE BROADCAST SNDBUF RCVBUF"),
    (socket.IPPROTO_TCP, "NODELAY CORK KEEPIDLE KEEPINTVL KEEPCNT QUICKACK USER_TIMEOUT"),
):
    for name in names.split():
        made.setsockopt(level, getattr(socket, ("SO_" if level == 1 else "TCP_") + name), 1)
made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
made.settimeout(1)
print(made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
"""
    assert loopback.out(code) == "1\n"


def test_no_other_option(loopback: Box) -> None:
    """All others are refused on every level, whatever their argument: filters, ciphers, flow labels, a least TTL."""
    code = """
import errno, socket
allowed = {
    1: {2, 6, 7, 8, 9, 10, 13, 15, 16, 18, 20, 21}, 6: {1, 3, 4, 5, 6, 12, 18}, 41: {26},
}
stream, datagram = socket.socket(socket.AF_INET6), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
for level in (0, 1, 6, 17, 41, 58, 136, 255, 262, 263, 268, 270, 271, 273, 282, 283, 284):
    for option in range(256):
        if option in allowed.get(level, ()):
            continue
        for made in (stream, datagram):
            for value in (1, bytes(64)):
                try:
                    made.setsockopt(level, option, value)
                except PermissionError:
                    continue
                except OSError as exc:
                    print(level, option, exc)
                else:
                    print("BREACH", level, option, value)
"""
    assert loopback.out(code) == ""


QUEUES = """
import os, socket, time
listening = [socket.create_server(("127.0.0.1", 0), backlog=4096) for _ in range(200)]
made = 0
try:
    for server in listening:
        for _ in range(128):
            socket.create_connection(server.getsockname(), timeout=0.2).close()
            made += 1
except TimeoutError:
    print("full after", made, flush=True)
time.sleep(60)
"""


def test_connections_that_nobody_accepts(loopback: Box) -> None:
    """They are made by the kernel and charged to nobody, so a call that has thousands of them ends."""
    result = loopback.run(QUEUES, wall_s=20, cpu_s=20)
    assert result.status == "memory_limit", result
    assert loopback.out('print(open("/proc/self/net/sockstat").read().splitlines()[1].split()[2])') == "0\n"


def test_backlogs_are_short(loopback: Box) -> None:
    """One listener holds as many as the namespace allows, whatever it asks for."""
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0), backlog=4096)
made = 0
try:
    while made < 1000:
        socket.create_connection(server.getsockname(), timeout=0.2).close()
        made += 1
except TimeoutError:
    pass
print(made < 200)
"""
    assert loopback.out(code) == "True\n"


def test_nothing_outlives_in_the_kernel(loopback: Box) -> None:
    """Connections whose ends were closed in any way end with the call, and their namespace with them."""
    code = """
import socket
server = socket.create_server(("127.0.0.1", 0), backlog=64)
for level, option, value in ((0, 21, 255), (41, 73, 255), (1, 47, 1), (1, 47, 0), (6, 37, 10**6)):
    for _ in range(200):
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        for end in (one, other):
            try:
                end.setsockopt(level, option, value)
            except OSError:
                pass
        one.close()
        other.close()
print("closed")
"""

    def orphans() -> int:
        return int(Path("/proc/net/sockstat").read_text(encoding="ascii").split("orphan ")[1].split()[0])

    before = orphans()
    assert loopback.out(code, wall_s=20) == "closed\n"
    assert orphans() - before < 100


def test_the_device_is_not_the_programs(loopback: Box) -> None:
    """It cannot take the device down, add an address, or change how the network works."""
    code = """
import errno, fcntl, socket, struct
made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for request in (0x8914, 0x8916, 0x8922, 0x890B):  # SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFMTU, SIOCADDRT
    try:
        fcntl.ioctl(made, request, struct.pack("16sH62x", b"lo", 0))
        print("BREACH", hex(request))
    except OSError as exc:
        print(errno.errorcode[exc.errno])
"""
    assert loopback.out(code) == 4 * "EPERM\n"


def test_without_it_there_are_no_sockets(box: Box) -> None:
    """A jail of the ordinary kind refuses the same program."""
    assert "PermissionError" in box.run(f'{EXCHANGE}\nexchange(socket.AF_INET, ("127.0.0.1", 0))').stderr
