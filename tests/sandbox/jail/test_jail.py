"""Verdicts, counts, cancellation, and many calls at once, in the real jail."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time

import pytest

from loadtest.held import descendants
from sandbox.calls import MIB, CallStatus, ToolResult
from sandbox.jail.cgroups import Place

from .box import SLEEP, SPIN, Box, program, until


class TestVerdicts:
    """One test for each way in which a program ends."""

    def test_ok(self, box: Box) -> None:
        """Exit code 0 is ok, and has no signal."""
        result = box.run("print('hi')")
        assert (result.status, result.exit_code, result.signal, result.stdout) == ("ok", 0, None, "hi\n")

    @pytest.mark.parametrize("code", [1, 3, 70, 71, 119, 120, 137, 199, 255])
    def test_error(self, box: Box, code: int) -> None:
        """Every other exit code is an error and is told, also those that we use inside, and 137."""
        for leave in (f"import sys; sys.exit({code})", f"import os; os._exit({code})"):
            result = box.run(leave)
            assert (result.status, result.exit_code, result.signal) == ("error", code, None)

    @pytest.mark.parametrize("number", [s for s in signal.Signals if s.name in {"SIGTERM", "SIGKILL", "SIGSEGV", "SIGABRT", "SIGXCPU", "SIGSYS", "SIGHUP"}])  # fmt: skip
    def test_signaled(self, box: Box, number: int) -> None:
        """A signal of the program's own is told as such, also the one that the kernel ends CPU hogs with."""
        result = box.run(f"import os\nos.kill(os.getpid(), {number})")
        assert (result.status, result.exit_code, result.signal) == ("signaled", None, number)

    def test_wall_clock(self, box: Box) -> None:
        """A program that waits too long is ended at its limit."""
        result = box.run(SLEEP, wall_s=0.4)
        assert (result.status, result.exit_code, result.signal) == ("timeout", None, signal.SIGKILL)
        assert 0.35 < result.usage.wall_s < 1.5

    @pytest.mark.parametrize(
        "code",
        [
            SPIN,
            "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n" + SPIN,
            "import threading\nfor _ in range(4): threading.Thread(target=exec, args=['while True: pass']).start()",
            "import os\nos.fork()\n" + SPIN,
            # Many short children, each far below any limit of its own.
            "import os\nwhile True:\n    if not os.fork():\n        for _ in range(300_000): pass\n        os._exit(0)\n    os.wait()",
            # The same, reaped by the kernel, so that their time is never added to a parent's.
            (
                "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n    if not os.fork():\n"
                "        for _ in range(300_000): pass\n        os._exit(0)\n    time.sleep(0.004)"
            ),
        ],
        ids=["one", "ignoring", "threads", "fork", "short children", "children nobody waits for"],
    )
    def test_cpu(self, box: Box, code: str) -> None:
        """CPU time of all processes together is bounded, long before the wall clock."""
        result = box.run(code, cpu_s=0.3, wall_s=10)
        assert result.status == "timeout"
        assert 0.3 <= result.usage.cpu_s < 1.2
        assert result.usage.wall_s < 5

    def test_cpu_after_the_fact(self, box: Box) -> None:
        """A program that ends between two looks over its limit is over its limit."""
        result = box.run("import time\nwhile time.process_time() < 0.08: pass", cpu_s=0.05)
        assert result.status == "timeout"

    @pytest.mark.parametrize(
        "code",
        [
            "x = []\nwhile True: x.append(bytearray(4 << 20))",
            "import mmap\nm = mmap.mmap(-1, 200 << 20)\nfor n in range(0, len(m), 4096): m[n] = 1",
            "import os\nfor _ in range(4): os.fork()\nx = bytearray(40 << 20)\nimport time\ntime.sleep(60)",
            # The main process stays small and waits for the one that is killed.
            "import os\nif not os.fork():\n    x = []\n    while True: x.append(bytearray(4 << 20))\nos.wait()\nimport time\ntime.sleep(60)",
            (
                "import os\nfor folder in ('/tmp', '/dev/shm'):\n    f = open(folder + '/x', 'wb')\n    for _ in range(30): f.write(bytes(1 << 20)); f.flush()\n"
                "x = bytearray(50 << 20)"
            ),
            (
                "import socket\nkept = []\nwhile True:\n    a, b = socket.socketpair()\n    a.setblocking(False)\n    kept.append((a, b))\n"
                "    try:\n        while True: a.send(bytes(1 << 16))\n    except BlockingIOError: pass\n"
                "    if len(kept) > 60: import os; os.fork(); kept.clear()"
            ),
        ],
        ids=["one process", "shared mapping", "many processes", "child", "scratch files", "sockets"],
    )
    def test_memory(self, box: Box, code: str) -> None:
        """Memory of all processes, files in memory and the kernel's buffers count together against one limit."""
        if not box.slots.free[0].group.enter_fds:
            pytest.skip("this host gives no cgroup")
        result = box.run(code, memory_bytes=64 * MIB, wall_s=20)
        assert result.status == "memory_limit"
        assert result.usage.memory_peak_bytes <= 64 * MIB

    @pytest.mark.parametrize(("stream", "other"), [(1, 2), (2, 1)])
    def test_output(self, box: Box, stream: int, other: int) -> None:
        """A flood on either stream ends the program; what was within the limit is kept, of the other stream too."""
        code = f"import os\nos.write({other}, b'before')\nwhile True: os.write({stream}, b'x' * 4096)"
        result = box.run(code, output_bytes=10_000)
        flood, rest = (result.stdout, result.stderr) if stream == 1 else (result.stderr, result.stdout)
        assert (result.status, flood, rest) == ("output_limit", "x" * 10_000, "before")
        assert (result.stdout_truncated, result.stderr_truncated) == (stream == 1, stream == 2)

    @pytest.mark.parametrize("limit", [0, 1, 4096, 65_536, 65_537, 200_000])
    def test_output_exactly_at_the_limit(self, box: Box, limit: int) -> None:
        """As many bytes as the limit are ok; one more is not, even when the program ends right after it."""
        code = (
            "import os, sys\ndata = b'x' * int(sys.stdin.read())\nwhile data: data = data[os.write(1, data):]"
        )
        exact = box.run(code, stdin=str(limit), output_bytes=limit)
        assert (exact.status, len(exact.stdout), exact.stdout_truncated) == ("ok", limit, False)
        over = box.run(code, stdin=str(limit + 1), output_bytes=limit)
        assert (over.status, len(over.stdout), over.stdout_truncated) == ("output_limit", limit, True)

    @pytest.mark.parametrize("limit", range(1, 9))
    def test_a_character_cut_at_the_limit(self, box: Box, limit: int) -> None:
        """A character that the limit cuts in two is left out; none is made up."""
        text = box.run("print('é' + '🎉' + '語' + 'x')", output_bytes=limit).stdout
        assert text == "é🎉語x".encode()[:limit].decode("utf-8", "ignore")

    def test_half_a_character_at_the_end(self, box: Box) -> None:
        """Half a character that the program itself ended with is replaced."""
        assert box.run("import os\nos.write(1, 'é'.encode()[:1])").stdout == "\ufffd"


class TestUsage:
    """Numbers that a trainer may rely on."""

    def test_sleeping_costs_wall_and_no_cpu(self, box: Box) -> None:
        """A program that sleeps for 0.3 s used 0.3 s of wall clock and next to no CPU time."""
        usage = box.run("import time\ntime.sleep(0.3)").usage
        assert 0.3 <= usage.wall_s < 1
        assert usage.cpu_s < 0.1

    def test_working_costs_cpu(self, box: Box) -> None:
        """CPU time is that of the program, its children and what these left behind."""
        work = "import time\nwhile time.process_time() < 0.2: pass\n"
        assert 0.2 <= box.run(work).usage.cpu_s < 0.4
        # It waits until nobody holds the other end, and so for the orphan, however busy the machine is.
        orphan = (
            "import os\nours, theirs = os.pipe()\nif not os.fork():\n    if not os.fork():\n"
            f"        exec({work!r})\n    os._exit(0)\nos.close(theirs)\nos.read(ours, 1)"
        )
        assert 0.2 <= box.run(orphan).usage.cpu_s < 0.4

    def test_memory_peak(self, box: Box) -> None:
        """The peak is this call's, also when the memory was given back, and also after a larger call in the slot."""
        if box.host.place.kind != "v1":
            pytest.skip("only v1 and a new v2 tell the peak of each call")
        big = box.run("x = bytearray(200 << 20)\ndel x").usage.memory_peak_bytes
        small = box.run("x = bytearray(50 << 20)\ndel x").usage.memory_peak_bytes
        none = box.run("pass").usage.memory_peak_bytes
        assert 200 * MIB < big < 230 * MIB
        assert 50 * MIB < small < 80 * MIB
        assert 0 < none < 20 * MIB

    @pytest.mark.parametrize("fixture", ["box", "numpy_box", "sympy_box", "data_box"])
    def test_the_smallest_memory_limit_suffices(self, fixture: str, request: pytest.FixtureRequest) -> None:
        """What is warm is not charged to the call: 16 MiB are enough for a small program in each jail."""
        box: Box = request.getfixturevalue(fixture)
        assert box.run("print(sum(range(10)))", memory_bytes=16 * MIB).stdout == "45\n"

    def test_the_smallest_memory_limit_after_a_large_call(self, box: Box) -> None:
        """A slot that just held files and much memory takes a small call next."""
        for _ in range(3):
            large = (
                "for n in range(60): open(f'/tmp/{n}', 'wb').write(bytes(1 << 20))\nx = bytearray(300 << 20)"
            )
            assert box.run(large, memory_bytes=512 * MIB).status == "ok"
            assert box.run("print(1)", memory_bytes=16 * MIB).status == "ok"


class TestTogether:
    """Calls that run at the same time."""

    def test_outputs_stay_apart(self, box: Box) -> None:
        """Eight programs that print at the same time each get their own output, input and files."""
        code = (
            "import sys, time\nname = open('name').read()\nassert sys.stdin.read() == name\n"
            "for n in range(200):\n    print(name, n)\n    print(n, name, file=sys.stderr)\n    time.sleep(0.001)"
        )
        results = box.run_together(program(code, stdin=f"p{n}", files={"name": f"p{n}"}) for n in range(8))
        for number, result in enumerate(results):
            assert result.status == "ok"
            assert result.stdout == "".join(f"p{number} {n}\n" for n in range(200))
            assert result.stderr == "".join(f"{n} p{number}\n" for n in range(200))

    def test_every_kind_at_once(self, box: Box) -> None:
        """Calls that end in every way at the same time do not take each other's verdict."""
        codes = [
            ("print(1)", {}, "ok"),
            (SPIN, {"cpu_s": 0.3}, "timeout"),
            ("while True: print('x' * 1000)", {}, "output_limit"),
            ("x = []\nwhile True: x.append(bytearray(4 << 20))", {"memory_bytes": 32 * MIB}, "memory_limit"),
            ("import os\nos.abort()", {}, "signaled"),
            ("1 / 0", {}, "error"),
            (SLEEP, {"wall_s": 0.3}, "timeout"),
            ("import os\ntry:\n    while True: os.fork()\nexcept OSError: print('bounded')", {"processes": 20, "wall_s": 2}, "timeout"),
        ]  # fmt: skip
        for _ in range(3):
            results = box.run_together(program(code, **limits) for code, limits, _ in codes)
            # The copies of the fork bomb that fail to fork print and end; the first to end may be the program itself.
            assert [r.status for r in results[:-1]] == [status for _, _, status in codes[:-1]]
            assert results[-1].status in {"ok", "timeout"}

    def test_more_requests_than_the_socket_holds(self) -> None:
        """A worker that starts calls faster than the forkserver forks loses none: the rest waits its turn."""
        calls = 400
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard < 16 * calls:
            pytest.skip(f"this host allows {hard} open files")
        resource.setrlimit(resource.RLIMIT_NOFILE, (16 * calls, hard))
        box = Box(slots=calls, place=Place("none", {}, "a test"))
        try:
            forkserver = box.forkserver_pid()
            os.kill(forkserver, signal.SIGSTOP)

            async def flood() -> list[ToolResult]:
                tasks = [
                    asyncio.create_task(box.jail.run(program(f"print({n})", wall_s=30), box.slots.free[n]))
                    for n in range(calls)
                ]
                await asyncio.sleep(0)
                assert box.jail._outbox, "the socket took all of them; the test proves nothing"
                tasks[-1].cancel()  # one that has not even been sent
                os.kill(forkserver, signal.SIGCONT)
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert isinstance(results.pop(), asyncio.CancelledError)
                return results  # type: ignore[return-value]

            results = box.do(flood())
            assert [result.stdout for result in results] == [f"{n}\n" for n in range(calls - 1)]
        finally:
            box.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class TestCancellation:
    """A caller that goes away takes its program along."""

    @pytest.mark.parametrize("times", [1, 3])
    def test_kills_the_call(self, box: Box, times: int) -> None:
        """However often a call is cancelled: when `run` returns, nothing of it is left, and the slot serves the next."""
        code = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\nprint('up')\ntime.sleep(60)"

        async def cancel() -> None:
            task = asyncio.create_task(box.jail.run(program(code), box.slots.free[0]))
            await until(lambda: len(descendants(box.forkserver_pid())) == 3)
            for _ in range(times):
                task.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await task
            assert descendants(box.forkserver_pid()) == []
            assert box.slots.free[0].group.is_empty()

        box.do(cancel())
        assert box.out("print(1)") == "1\n"

    def test_before_it_began(self, box: Box) -> None:
        """A call cancelled in the same moment in which it was sent is gone as well."""

        async def cancel() -> None:
            task = asyncio.create_task(box.jail.run(program(SLEEP), box.slots.free[0]))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert descendants(box.forkserver_pid()) == []

        box.do(cancel())


def test_a_pause_of_ours_makes_no_time_limit(box: Box) -> None:
    """A program that ended in time keeps its verdict, also if we could not look until its time was over."""

    async def pause() -> ToolResult:
        loop = asyncio.get_running_loop()
        running = asyncio.create_task(box.jail.run(program("print(1)", wall_s=0.3), box.slots.free[0]))
        loop.call_later(
            0.0, time.sleep, 0.7
        )  # as a stopped worker: the loop stands still, the program does not
        return await running

    result = box.do(pause())
    assert (result.status, result.stdout) == (CallStatus.OK, "1\n")
