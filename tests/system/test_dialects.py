"""Programs in four other services' languages, in real jails: where the originals go wrong and ours must not.

`gateway/dialects/README.md` has the table of what the originals were measured to do.
"""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

import pytest

from .processes import alive, until
from .stack import Stack


@pytest.fixture
def fusion(the_stack: Stack) -> Any:
    """Runs a program by SandboxFusion's `/run_code`; the outer status and what came of the run."""

    def run(code: str, **fields: Any) -> tuple[str, dict[str, Any]]:
        answer = post(the_stack, "/run_code", {"code": code, "run_timeout": 20} | fields)
        assert answer["message"] == ""
        return answer["status"], answer["run_result"]

    return run


@pytest.fixture
def nemo(the_stack: Stack) -> Any:
    """Runs a program by the NeMo-Skills sandbox's `/execute`."""

    def run(code: str, **fields: Any) -> dict[str, Any]:
        return post(the_stack, "/execute", {"generated_code": code, "timeout": 20} | fields)

    return run


@pytest.fixture
def piston(the_stack: Stack) -> Any:
    """Runs a program by Piston's `/api/v2/execute`; what came of the stage `run`."""

    def run(code: str, **fields: Any) -> dict[str, Any]:
        body = {"language": "python", "version": "*", "files": [{"content": code}], "run_timeout": 20_000}
        stage: dict[str, Any] = post(the_stack, "/api/v2/execute", body | fields)["run"]
        return stage

    return run


@pytest.fixture
def judge(the_stack: Stack) -> Any:
    """Runs a program by code-judge's `/run/batch`, beside one that is no submission; its result."""

    def run(code: str, **fields: Any) -> dict[str, Any]:
        submissions = [{"type": "python", "solution": code} | fields, {"type": "no language"}]
        result, other = post(the_stack, "/run/batch", {"type": "batch", "submissions": submissions})[
            "results"
        ]
        assert other["reason"] == "invalid_input"
        assert isinstance(result, dict)
        return result

    return run


def post(stack: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("session", [False, True], ids=["child", "child in a session of its own"])
def test_a_child_holds_nothing_up_and_is_gone_with_its_call(
    fusion: Any, nemo: Any, piston: Any, judge: Any, session: bool
) -> None:
    """A child that lives on, with the program's stdout in its hands, neither delays the answer nor survives it."""
    code = f"import subprocess\nsubprocess.Popen(['sleep', '31.4159'], start_new_session={session})\nprint('started')"
    status, run = fusion(code)
    assert (status, run["status"], run["stdout"]) == ("Success", "Finished", "started\n")
    assert nemo(code, language="python3")["process_status"] == "completed"
    assert piston(code)["status"] is None
    assert judge(code)["reason"] == ""
    until(lambda: not [p for p in alive() if "31.4159" in p.command], "the end of the children")


def test_more_output_than_the_limit(fusion: Any, nemo: Any, piston: Any) -> None:
    """Its head is kept and the answer says why the program was ended: no time-out, no text lost, no bare signal."""
    flood = "while True: print('x' * 1000)"
    status, run = fusion(flood)
    assert (status, run["status"], run["return_code"]) == ("Failed", "Finished", -9)
    assert run["stdout"].startswith("x" * 1000)
    assert run["stderr"] == "Killed: it wrote more than its limit on output; what came before is kept\n"
    answer = nemo(flood)
    mark = re.fullmatch(r"x{1000}<output cut: 1000 characters of (\d+) bytes>", answer["stdout"])
    assert mark is not None
    assert int(mark[1]) >= 1 << 20
    assert answer["stderr"] == "Execution was ended: it wrote more than its limit on output\n"
    stage = piston(flood)
    assert (stage["status"], stage["signal"], stage["message"]) == ("OL", "SIGKILL", "stdout length exceeded")
    assert len(stage["stdout"]) == 1 << 20


def test_much_output_below_the_limit(fusion: Any, nemo: Any) -> None:
    """All of it comes, and soon."""
    status, run = fusion("print('x' * 1_000_000)")
    assert (status, len(run["stdout"])) == ("Success", 1_000_001)
    answer = nemo("print('ä' * 400_000)", max_output_characters=10)
    assert answer["process_status"] == "completed"
    assert answer["stdout"] == "ä" * 10 + "<output cut: 10 characters of 800001 bytes>"


def test_bytes_that_are_no_text(fusion: Any, nemo: Any, piston: Any, judge: Any) -> None:
    """They become U+FFFD, and what is text beside them stays."""
    code = "import sys\nsys.stdout.buffer.write(b'a\\xff\\xfeb');"
    assert fusion(code)[1]["stdout"] == "a\ufffd\ufffdb"
    assert nemo(code)["stdout"] == "a\ufffd\ufffdb"
    assert piston(code)["stdout"] == judge(code)["stdout"] == "a\ufffd\ufffdb"


def test_what_was_printed_before_a_time_out(fusion: Any, nemo: Any, piston: Any) -> None:
    """It is there, though the program never flushed it, and time is what the answer blames."""
    code = "print('before')\nimport sys\nprint('e', file=sys.stderr)\nwhile True: pass"
    status, run = fusion(code, run_timeout=1)
    assert (status, run["status"], run["return_code"]) == ("Failed", "TimeLimitExceeded", None)
    assert (run["stdout"], run["stderr"]) == ("before\n", "e\n")
    assert nemo(code, timeout=1) == {
        "process_status": "timeout", "stdout": "before\n", "stderr": "e\nExecution timed out after 1 seconds\n",
        "new_session_created": True,
    }  # fmt: skip
    stage = piston(code, run_timeout=1000)
    assert (stage["status"], stage["code"], stage["signal"]) == ("TO", None, "SIGKILL")
    assert (stage["stdout"], stage["output"]) == ("before\n", "before\ne\n")


def test_the_end_of_the_input(fusion: Any, nemo: Any, piston: Any) -> None:
    """A program without input that asks for some meets the end of it."""
    code = "try:\n    input()\nexcept EOFError:\n    print('end')"
    assert fusion(code)[1]["stdout"] == nemo(code)["stdout"] == piston(code)["stdout"] == "end\n"


def test_exit_codes(fusion: Any, nemo: Any, piston: Any) -> None:
    """A program that ends with a code that is not 0 has failed, however it does so."""
    for code in ("import sys; sys.exit(3)", "import os; os._exit(3)"):
        status, run = fusion(code)
        assert (status, run["status"], run["return_code"], run["stderr"]) == ("Failed", "Finished", 3, "")
        for language in ("ipython", "python3"):
            assert nemo(code, language=language)["process_status"] == "error"
        stage = piston(code)
        assert (stage["code"], stage["status"], stage["message"]) == (3, "RE", "Exited with error status 3")


def test_signals(fusion: Any, nemo: Any, piston: Any) -> None:
    """A program that a signal ends has failed by that signal, though it is the first of its namespace."""
    for number, name in ((11, "SIGSEGV"), (15, "SIGTERM")):
        code = f"import os; os.kill(os.getpid(), {number})"
        status, run = fusion(code)
        assert (status, run["status"], run["return_code"]) == ("Failed", "Finished", -number)
        answer = nemo(code)
        assert answer["process_status"] == "error"
        assert answer["stderr"] == f"Execution was ended by signal {number}\n"
        stage = piston(code)
        assert (stage["code"], stage["signal"], stage["status"]) == (None, name, "SG")


def test_more_memory_than_the_limit(fusion: Any, piston: Any) -> None:
    """The limit that a request names holds, and the answer blames it: no time-out, no silence, no bare signal."""
    code = "import time\nx = bytearray(400 << 20)\nx[::4096] = bytes(len(x[::4096]))\ntime.sleep(20)"
    status, run = fusion(code, memory_limit_MB=256)
    assert (status, run["status"], run["return_code"]) == ("Failed", "Finished", -9)
    assert run["stderr"] == "Killed: it used more memory than its limit\n"
    stage = piston(code, run_memory_limit=256 << 20)
    assert (stage["status"], stage["signal"], stage["message"]) == ("SG", "SIGKILL", "Memory limit exceeded")


def test_numpy_within_verl_s_limit(fusion: Any) -> None:
    """A program of verl's, which has 1024 MB, can import numpy, and no text of RLIMIT_NPROC turns up."""
    code = "import numpy as np\nprint((np.ones((300, 300)) @ np.ones((300, 300))).sum())"
    status, run = fusion(code, memory_limit_MB=1024)
    assert (status, run["stdout"], run["stderr"]) == ("Success", "27000000.0\n", "")


def test_recursion_without_bound(fusion: Any, nemo: Any, piston: Any) -> None:
    """It is Python's own error, at once."""
    code = "def f(): return f()\nf()"
    status, run = fusion(code)
    assert (status, run["return_code"]) == ("Failed", 1)
    for stderr in (run["stderr"], nemo(code)["stderr"], piston(code)["stderr"]):
        assert "RecursionError: maximum recursion depth exceeded" in stderr


def test_tracebacks(fusion: Any, nemo: Any, piston: Any, judge: Any) -> None:
    """Line numbers and text are those that the caller sent, and the file is the same each time."""
    code = "x = 1\n\nraise ValueError('é')"
    said = "Traceback (most recent call last):\n  File \"/tmp/main.py\", line 3, in <module>\n    raise ValueError('é')\nValueError: é\n"
    assert (
        fusion(code)[1]["stderr"]
        == nemo(code)["stderr"]
        == piston(code)["stderr"]
        == judge(code)["stderr"]
        == said
    )


def test_programs_as_a_script_finds_them(fusion: Any, nemo: Any, piston: Any, judge: Any) -> None:
    """`__main__` guards, `from __future__`, process pools, a coding line and `/dev/null` work in each language."""
    code = """# -*- coding: latin-1 -*-
from __future__ import annotations
import multiprocessing, subprocess
def double(x): return 2 * x
if __name__ == "__main__":
    subprocess.run(["true"], stdout=subprocess.DEVNULL)
    with multiprocessing.Pool(2) as pool:
        print("é", pool.map(double, [1, 2]))
"""
    assert fusion(code)[1]["stdout"] == nemo(code)["stdout"] == piston(code)["stdout"] == "é [2, 4]\n"
    assert judge(code)["stdout"] == "é [2, 4]\n"


def test_output_that_looks_like_a_runner_s(fusion: Any, judge: Any) -> None:
    """Marks by which runners tell output from their own words are a program's text like any other."""
    code = "print('##RUNCODE-END##')\nprint('\\x1e0000{}\\x1e', '<output cut>', 'queue_timeout')"
    said = "##RUNCODE-END##\n\x1e0000{}\x1e <output cut> queue_timeout\n"
    assert fusion(code)[1]["stdout"] == judge(code)["stdout"] == said
    assert (judge(code)["success"], judge(code)["reason"]) == (True, "")


def test_nothing_of_the_service_can_be_seen(fusion: Any, nemo: Any, piston: Any) -> None:
    """No password file of the host, and no environment of the service."""
    code = """
import os
print(os.path.exists("/etc/shadow"), sorted(name for name in os.environ if "SANDBOX" in name or "REDIS" in name))
"""
    assert fusion(code)[1]["stdout"] == nemo(code)["stdout"] == piston(code)["stdout"] == "False []\n"


def test_the_next_program_sees_nothing_of_this_one(fusion: Any, nemo: Any) -> None:
    """Neither names, nor modules that were changed, nor files."""
    fusion("import builtins\nbuiltins.X = 42\nopen('/tmp/left', 'w').close()")
    nemo("import builtins\nbuiltins.X = 42\nopen('/tmp/left', 'w').close()")
    code = "import builtins, os\nprint(hasattr(builtins, 'X'), os.path.exists('/tmp/left'))"
    assert [fusion(code)[1]["stdout"] for _ in range(3)] == ["False False\n"] * 3
    assert nemo(code)["stdout"] == "False False\n"


def test_the_last_expression(fusion: Any, nemo: Any, piston: Any) -> None:
    """Only `ipython` shows its value, and a semicolon silences it there."""
    assert nemo("x = 6\nx * 7")["stdout"] == "42\n"
    assert nemo("x = 6\nx * 7;")["stdout"] == ""
    assert nemo("x = 6\nx * 7", language="python3")["stdout"] == ""
    assert fusion("x = 6\nx * 7")[1]["stdout"] == piston("x = 6\nx * 7")["stdout"] == ""


def test_files(fusion: Any, piston: Any) -> None:
    """Files of a request lie in the working directory, in folders too, byte for byte."""
    code = "print(open('a/b.bin', 'rb').read(), open('c.txt').read())"
    sent = {"a/b.bin": "/wA=", "c.txt": "dGV4dA=="}
    assert fusion(code, files=sent)[1]["stdout"] == "b'\\xff\\x00' text\n"
    files = [
        {"name": "a/b.bin", "content": "ff00", "encoding": "hex"},
        {"name": "solve.py", "content": code},
        {"name": "c.txt", "content": "text"},
    ]
    assert piston("", files=files)["stdout"] == "b'\\xff\\x00' text\n"


def test_files_that_are_fetched(the_stack: Stack) -> None:
    """What a program, or a cell, has left comes back as base64; what had no room is named, what is not there is not."""
    code = "open('out.bin', 'wb').write(bytes(range(256)))\nopen('huge', 'wb').write(bytes(1 << 21))"
    wanted = ["out.bin", "huge", "none"]
    expected = ("too large to be returned: huge", {"out.bin": b64encode(bytes(range(256))).decode()})
    for path, program in [("/run_code", {"code": code}), ("/run_jupyter", {"cells": [code]})]:
        answer = post(the_stack, path, program | {"fetch_files": wanted})
        assert (answer["status"], answer["message"], answer["files"]) == ("Success", *expected)


def test_piston_s_version_is_that_of_the_program(the_stack: Stack) -> None:
    """What `/runtimes` lists is what a program finds, and can be asked for."""
    [runtime] = the_stack.http.get("/api/v2/runtimes").json()
    code = "import platform\nprint(platform.python_version())"
    body = {"language": "python", "version": runtime["version"], "files": [{"content": code}]}
    answer = post(the_stack, "/api/v2/execute", body)
    assert answer["run"]["stdout"].strip() == answer["version"] == runtime["version"]


def test_usage(piston: Any, fusion: Any) -> None:
    """Times and memory are measured, in ms and bytes for the one and in seconds for the other."""
    stage = piston("import time\ntime.sleep(0.2)")
    assert stage["wall_time"] >= 200
    assert fusion("import time\ntime.sleep(0.2)")[1]["execution_time"] >= 0.2


CELL = {"stdout": "", "stderr": "", "display": [], "error": []}


def notebook(stack: Stack, cells: list[str], **fields: Any) -> dict[str, Any]:
    return post(stack, "/run_jupyter", {"cells": cells, "total_timeout": 20} | fields)


def test_a_notebook(the_stack: Stack) -> None:
    """Cells share what they define; each has its own output, its value and its error; a failure stops none of them."""
    cells = [
        "a = 123",
        "a",
        "print(a)",
        "import sys; sys.stderr.write('said');",
        "raise RuntimeError('no')",
        "a + 1",
    ]
    answer = notebook(the_stack, cells, files={"x.txt": "aGk="})
    assert (answer["status"], answer["message"], answer["files"]) == ("Success", "", {})
    assert list(answer) == ["status", "message", "driver", "cells", "executor_pod_name", "files"]
    driver = answer["driver"]
    assert (driver["status"], driver["return_code"], driver["stdout"], driver["stderr"]) == (
        "Finished",
        0,
        "",
        "",
    )
    error = answer["cells"][4]["error"][0]
    assert (error["ename"], error["evalue"]) == ("RuntimeError", "no")
    assert error["traceback"][-1] == "RuntimeError: no"
    assert answer["cells"] == [
        CELL,
        CELL | {"display": [{"text/plain": "123"}]},
        CELL | {"stdout": "123\n"},
        CELL | {"stderr": "said"},
        CELL | {"error": [error]},
        CELL | {"display": [{"text/plain": "124"}]},
    ]


def test_a_notebook_s_limits(the_stack: Stack) -> None:
    """The time of all cells ends them, and the time of a cell ends that one; what was said before stays."""
    late = notebook(the_stack, ["print(1)", "print(2)\nwhile True: pass", "print(3)"], total_timeout=1.5)
    assert (late["status"], late["driver"]["status"]) == ("Failed", "TimeLimitExceeded")
    assert late["cells"] == [CELL | {"stdout": "1\n"}, CELL | {"stdout": "2\n"}]
    slow = notebook(the_stack, ["while True: pass", "print(3)"], cell_timeout=0.5)
    assert (slow["status"], slow["cells"][0]["error"][0]["ename"]) == ("Success", "TimeoutError")
    assert slow["cells"][1] == CELL | {"stdout": "3\n"}
    dead = notebook(the_stack, ["print(1)", "import os\nos._exit(9)"])
    assert (dead["status"], dead["driver"]["return_code"]) == ("Failed", 9)
    assert dead["cells"] == [CELL | {"stdout": "1\n"}, CELL]
