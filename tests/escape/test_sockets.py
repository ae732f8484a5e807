"""There is no network: no socket can be made but a pair of connected ones, and those reach nobody."""

from __future__ import annotations

from tests.sandbox.jail.box import Box

from .probe import outcomes


def test_no_family(box: Box) -> None:
    """Every family of sockets there is or will be is refused, vsock, netlink and the kernel's crypto among them."""
    code = """
import socket
for family in range(64):
    for kind in (1, 2, 3, 5, 10, 1 | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
        attempt(f"{family}-{kind}", lambda: socket.socket(family, kind, 0))
    if family != 1:
        attempt(f"pair-{family}", lambda: socket.socketpair(family, 1))
"""
    found = outcomes(box, code)
    assert len(found) > 400
    assert set(found.values()) == {"EPERM"}


def test_no_family_by_the_kernel_s_own_calls(box: Box) -> None:
    """Nor by raw calls, with every family, with bits that the kernel does not look at, or by the calls of other systems."""
    code = """
for family in (*range(1, 64), 1 | 1 << 32, 2 | 1 << 32, 40 | 1 << 63, 0xffffffff):
    attempt(f"{family}", lambda: syscall("socket", family, 1, 0))
    if family & 0xffffffff != 1:
        attempt(f"pair-{family}", lambda: syscall("socketpair", family, 1, 0, ctypes.create_string_buffer(8)))
for number in ((1 << 30) + 41, (1 << 30) + 53, 425, 470):  # of x32, of a ring that could make one, and a later call
    attempt(f"call-{number}", lambda: syscall(number, 2, 1, 0))
"""
    found = outcomes(box, code)
    assert len(found) > 130
    assert set(found.values()) <= {"EPERM", "ENOSYS", "EINVAL"}


def test_a_pair_stays_a_pair(box: Box) -> None:
    """What asyncio and multiprocessing use works, and cannot be turned into more."""
    code = """
import socket
a, b = socket.socketpair()
a.send(b"through")
print("pair", b.recv(10).decode())
packets, others = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
packets.sendto(b"through", "/run/socket")  # to its other end, whatever the address
print("packets", others.recv(10).decode())
attempt("bind", lambda: a.bind("/tmp/socket"))
attempt("bind-abstract", lambda: a.bind(b"\\0name"))
attempt("listen", lambda: a.listen())
attempt("connect", lambda: a.connect(b"\\0name"))
attempt("connect-packets", lambda: packets.connect("/tmp/socket"))
attempt("send-to", lambda: a.sendto(b"x", b"\\0name"))
attempt("send-to-path", lambda: a.sendto(b"x", "/run/socket"))
attempt("accept", lambda: a.accept())
attempt("credentials", lambda: a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, struct.pack("iII", 1, 0, 0))]))
"""
    found = outcomes(box, code)
    assert found.pop("pair") == found.pop("packets") == "through"
    assert set(found.values()) <= {"EPERM", "EISCONN", "ECONNREFUSED", "ENOENT", "EINVAL", "EOPNOTSUPP"}


def test_no_pair_of_datagram_sockets(box: Box) -> None:
    """Either of them could send to any address, and where there is no namespace between, to the host's."""
    code = """
pair = ctypes.create_string_buffer(8)
for kind in (2, 3, 2 | 0x800, 2 | 0x80000):
    attempt(str(kind), lambda: syscall("socketpair", 1, kind, 0, pair))
"""
    assert set(outcomes(box, code).values()) == {"EPERM"}


def test_no_name_is_found(box: Box) -> None:
    """Libraries that want the network fail as they do without one."""
    code = """
import urllib.request, socket
for name, action in {
    "urllib": lambda: urllib.request.urlopen("http://example.com", timeout=1),
    "getaddrinfo": lambda: socket.getaddrinfo("example.com", 80),
    "connect": lambda: socket.create_connection(("127.0.0.1", 80), timeout=1),
}.items():
    try:
        action()
        print(name, "BREACH")
    except OSError as exc:
        print(name, "failed")
"""
    assert set(outcomes(box, code).values()) == {"failed"}


def test_the_namespace_is_empty(box: Box) -> None:
    """There is one device, loopback, which has sent nothing, and there is no route."""
    code = "for name in ('dev', 'route', 'tcp'): print(open('/proc/self/net/' + name).readlines()[1:])"
    devices, routes, connections = map(eval, box.out(code).splitlines())
    assert [line.split() for line in devices[1:]] == [["lo:", *["0"] * 16]]
    assert (routes, connections) == ([], [])
