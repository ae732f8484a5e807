"""A host without cgroups: what the watch over /proc bounds and counts, as root and as an ordinary user."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from sandbox.calls import MIB, CallStatus
from sandbox.errors import JailError
from sandbox.jail import Slot
from sandbox.jail.cgroups import Place, find_place
from sandbox.jail.selftest import check_walls
from sandbox.jail.watched import Watched
from sandbox.settings import JailSettings

from .box import SPIN, Box, program
from .elsewhere import report_from_elsewhere

NONE = Place("none", {}, "a test")
#: Host user of the tests that want an ordinary one; `nobody` owns no file anywhere.
ORDINARY = 65534

GROW = "x = []\nwhile True: x.append(bytearray(4 << 20))"
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "print": ("print(1)", {}),
    "private memory": (GROW, {}),
    "shared memory": ("import mmap\nm = mmap.mmap(-1, 600 << 20)\nfor n in range(0, len(m), 4096): m[n] = 1", {}),
    "many processes": ("import os, time\nfor _ in range(3): os.fork()\nx = bytearray(40 << 20)\ntime.sleep(20)", {}),
    "a started program": (f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {GROW!r}])", {}),
    "memory that forks share": (
        ("import os, time\nx = bytearray(60 << 20)\nfor n in range(20):\n    if not os.fork(): time.sleep(0.4); os._exit(0)\n"
        "time.sleep(0.4)\nprint('ok')"),
        {},
    ),
    "memory that was given back": ("import time\nx = bytearray(60 << 20)\ntime.sleep(0.3)\ndel x\nprint('ok')", {}),
    "threads": (
        ("import threading, time\nmany = [threading.Thread(target=time.sleep, args=(0.3,)) for _ in range(40)]\n"
        "[t.start() for t in many]; [t.join() for t in many]\nprint('ok')"),
        {},
    ),
    "cpu": (SPIN, {"cpu_s": 0.3}),
    "cpu of children": ("import os\nos.fork(); os.fork()\n" + SPIN, {"cpu_s": 0.4}),
    "fork bomb": (
        ("import os, time\nn = 0\ntry:\n    while True:\n        if not os.fork(): time.sleep(5); os._exit(0)\n        n += 1\n"
        "except OSError as exc: print(n, exc.errno)"),
        {"processes": 30},
    ),
    "wall clock": ("import time\nprint('up')\ntime.sleep(60)", {"wall_s": 0.4}),
    "output": ("while True: print('x' * 1000)", {"output_bytes": 5000}),
}  # fmt: skip
EXPECTED = {
    "print": "ok",
    "private memory": "memory_limit",
    "shared memory": "memory_limit",
    "many processes": "memory_limit",
    "a started program": "memory_limit",
    "memory that forks share": "ok",
    "memory that was given back": "ok",
    "threads": "ok",
    "cpu": "timeout",
    "cpu of children": "timeout",
    "fork bomb": "ok",
    "wall clock": "timeout",
    "output": "output_limit",
}


def report(settings: JailSettings | None = None) -> dict[str, Any]:
    """Try the walls and run each program on a host without cgroups, whoever we are."""
    box = Box(slots=2, settings=settings, place=NONE)
    try:
        box.do(check_walls(box.jail, box.slots.free[0]))
        results = {
            name: box.run(code, **{"memory_bytes": 128 * MIB, "wall_s": 20, **limits}).model_dump(mode="json")
            for name, (code, limits) in PROGRAMS.items()
        }
        return {"uid": os.geteuid(), "place": find_place().kind, "results": results}
    finally:
        box.close()


def report_of_an_ordinary_user() -> dict[str, Any]:
    """The same from a process that is nobody on this host."""

    def command(folder: Path, python: list[str]) -> list[str]:
        # With groups of its own, as every login has some: an ordinary user cannot give them up.
        user = ["setpriv", f"--reuid={ORDINARY}", f"--regid={ORDINARY}", f"--groups={ORDINARY},100,101"]
        code = (
            "import json, pathlib\nfrom tests.sandbox.jail.test_watched import JailSettings, report\n"
            f"print(json.dumps(report(JailSettings(runtime=pathlib.Path('{folder}/runtime')))))"
        )
        return [*user, *python, code]

    return report_from_elsewhere(command, 50)


@pytest.fixture(scope="module", params=["as we are", "an ordinary user"])
def told(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What a host without cgroups said of each program."""
    if request.param == "as we are":
        return report()
    if os.geteuid() != 0:
        pytest.skip("we are an ordinary user already")
    return report_of_an_ordinary_user()


def test_who_it_was(told: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """An ordinary user may write no cgroup of this host, so nothing but the watch bounds its programs."""
    if "ordinary" in request.node.name:
        assert (told["uid"], told["place"]) == (ORDINARY, "none")


@pytest.mark.parametrize("name", PROGRAMS)
def test_verdict(told: dict[str, Any], name: str) -> None:
    """Each limit holds, and what is within it is left alone."""
    assert told["results"][name]["status"] == EXPECTED[name], told["results"][name]


@pytest.mark.parametrize("name", ["private memory", "shared memory", "many processes", "a started program"])
def test_memory_is_ended_in_time(told: dict[str, Any], name: str) -> None:
    """A hog is ended within a few looks of passing its limit."""
    assert told["results"][name]["usage"]["wall_s"] < 3


def test_counts(told: dict[str, Any]) -> None:
    """Memory at its highest, less what is warm, and CPU time of all processes are told."""
    usage = {name: result["usage"] for name, result in told["results"].items()}
    assert 40 * MIB <= usage["memory that was given back"]["memory_peak_bytes"] < 80 * MIB
    assert 40 * MIB <= usage["memory that forks share"]["memory_peak_bytes"] < 128 * MIB
    assert 0.3 <= usage["cpu"]["cpu_s"] < 0.8
    assert 0.4 <= usage["cpu of children"]["cpu_s"] < 1.2


def test_fork_bomb(told: dict[str, Any]) -> None:
    """The number of processes is bounded; where all slots share a user, a little above the limit."""
    forks, error = map(int, told["results"]["fork bomb"]["stdout"].split())
    assert error == 11
    assert 25 <= forks <= 40


def test_the_self_test_waits_for_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quickly a host hands out memory, the hog of the self-test is still there at the next look."""
    monkeypatch.setattr("sandbox.jail.jail.WATCH_S", 2.0)
    box = Box(slots=1, place=NONE)
    try:
        box.do(check_walls(box.jail, box.slots.free[0]))
    finally:
        box.close()


def test_a_watch_that_cannot_see_ends_the_jail(box: Box) -> None:
    """A call that can no longer be looked at is a fault, and does not run on unwatched."""
    slot = Slot(box.slots.free[0].uid, Blind())
    with pytest.raises(JailError, match="broke"):
        box.do(box.jail.run(program(SPIN), slot))
    box.renew()


class Blind(Watched):
    """A watch on a host that took its /proc away."""

    def exceeded(self, cpu_s: float) -> CallStatus | None:
        """Fail."""
        raise PermissionError("no /proc")
