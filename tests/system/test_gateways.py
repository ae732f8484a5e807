"""Two gateways behind one port: both serve, and one may die while the other goes on."""

from __future__ import annotations

import http.client
import json
import os
import signal
from urllib.parse import urlsplit

from .processes import until
from .stack import Stack, stack


class Connection:
    """One connection, which the kernel gives to one gateway for its whole life."""

    def __init__(self, running: Stack) -> None:
        self._http = http.client.HTTPConnection(urlsplit(running.url).netloc, timeout=50)
        self._http.connect()
        self.gateway = self._ask_which()

    def _ask_which(self) -> float:
        """The moment at which its gateway made its metrics, which tells gateways apart."""
        return metric(self._get("/metrics"), 'sandbox_gateway_calls_created{status="ok"}')

    def served(self) -> float:
        """How many calls its gateway has served."""
        return metric(self._get("/metrics"), 'sandbox_gateway_calls_total{status="ok"}')

    def run(self, number: int) -> str:
        """What a program prints that prints this number."""
        self._http.request("POST", "/v1/run", json.dumps({"code": f"print({number})"}))
        answer = json.loads(self._http.getresponse().read())
        assert "stdout" in answer, answer
        return str(answer["stdout"])

    def _get(self, path: str) -> str:
        self._http.request("GET", path)
        return self._http.getresponse().read().decode()

    def close(self) -> None:
        self._http.close()


def metric(text: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name} "))


def connect_to_another(running: Stack, known: set[float]) -> Connection:
    """A connection to a gateway that is none of these; the kernel spreads connections by chance."""
    while True:
        connection = Connection(running)
        if connection.gateway not in known:
            return connection
        connection.close()


def test_gateways_share_a_port_and_die_alone() -> None:
    """Both take connections; one that is killed is replaced, while every call at the other is answered.

    What waits in a socket while its gateway starts is served as well, and not refused for want of news of Redis.
    """
    with stack("--gateways", "2") as running:
        one = Connection(running)
        two = connect_to_another(running, {one.gateway})
        for number, connection in enumerate((one, two) * 10):
            assert connection.run(number) == f"{number}\n"
        assert (one.served(), two.served()) == (10, 10)

        mark = len(running.log)
        before = running.gateways
        os.kill(before[0], signal.SIGKILL)
        until(lambda: before[0] not in running.gateways, "its end")
        survivor = next(connection for connection in (one, two) if not is_cut(connection))
        number = 100
        while not any(line["event"] == "listening" for line in running.log[mark:]):
            assert survivor.run(number) == f"{number}\n"
            number += 1
        third = connect_to_another(running, {one.gateway, two.gateway})
        assert third.run(7) == "7\n"
        assert len(running.gateways) == 2
        assert before[1] in running.gateways
        for connection in (one, two, third):
            connection.close()


def is_cut(connection: Connection) -> bool:
    """Whether its gateway is gone."""
    try:
        connection.served()
    except (ConnectionError, http.client.HTTPException):
        return True
    return False
