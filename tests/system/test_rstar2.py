"""What rStar2-Agent's trainer does to code-judge, done to a whole stack: its tools' way and its rewards' way.

The clients here are ours, after the public description: connections for one request each, batches that are sent when
something is there, wrapped programs, and repetition of whatever may be repeated.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from .stack import Stack

ATTEMPTS = 4

#: Runs a model's code, shows the value of its last expression, says an exception in a line and leaves at once.
WRAPPED = """
import ast, base64, os, sys
names = {{"__name__": "__main__"}}
try:
    tree = ast.parse(base64.b64decode("{}").decode())
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<string>", "exec"), names)
    value = last and eval(compile(ast.Expression(last.value), "<string>", "eval"), names)
    if value is not None:
        print(repr(value))
except Exception as exc:
    print(f"{{type(exc).__name__}}: {{exc}}", file=sys.stderr)
    os._exit(1)
"""
REWARD = """
from {} import compute_score
import base64
response = base64.b64decode("{}".encode()).decode()
truth = base64.b64decode("{}".encode()).decode()
print(f"<result>{{compute_score(response, truth)}}</result>")
"""
PATHS = ("fused_compute_score", "recipe.rstar2_agent.fused_compute_score")


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def tool_call(code: str, stdin: str | None = "") -> dict[str, Any]:
    return {"type": "python", "solution": WRAPPED.format(encoded(code)), "input": stdin}


@dataclass
class Client:
    """Sends batches to one service, each on a connection of its own, and again what may be sent again."""

    url: str
    connections: int
    sent: int = 0
    refused: list[str] = field(default_factory=list)
    _session: aiohttp.ClientSession = field(init=False)

    async def __aenter__(self) -> Client:
        connector = aiohttp.TCPConnector(limit=self.connections, force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, submissions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The results of a batch, in order."""
        results: dict[int, dict[str, Any]] = {}
        for _ in range(ATTEMPTS):
            left = [n for n in range(len(submissions)) if n not in results]
            self.sent += len(left)
            body = {"type": "batch", "submissions": [submissions[n] for n in left]}
            async with self._session.post(f"{self.url}/run/long-batch", json=body) as response:
                if response.status != 200:
                    self.refused.append(await response.text())
                    continue
                answered = (await response.json())["results"]
            results |= {
                n: one for n, one in zip(left, answered, strict=True) if one["reason"] != "queue_timeout"
            }
            if len(results) == len(submissions):
                return [results[n] for n in range(len(submissions))]
        left = len(submissions) - len(results)
        raise AssertionError(f"{left} calls came to nothing in {ATTEMPTS} attempts: {self.refused}")

    async def run_all(self, submissions: Sequence[dict[str, Any]], size: int) -> list[dict[str, Any]]:
        """The results of many, by as many senders as there are connections, each of which waits for its batch."""
        batches = [submissions[at : at + size] for at in range(0, len(submissions), size)]
        senders = asyncio.Semaphore(self.connections)

        async def send(batch: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
            async with senders:
                return await self.run(batch)

        return [result for batch in await asyncio.gather(*map(send, batches)) for result in batch]


def mixed(number: int) -> tuple[dict[str, Any], tuple[bool, str, str]]:
    """A tool call and what comes of it: whether it succeeds, its stdout and its stderr."""
    return [
        (tool_call(f"print({number})"), (True, f"{number}\n", "")),
        (tool_call(f"x = {number}\nx * 2"), (True, f"{number * 2}\n", "")),
        (tool_call("print(int(input()) + 1)", f"{number}\n"), (True, f"{number + 1}\n", "")),
        (tool_call(f"import numpy as np\nnp.arange({number} % 9).sum().item()"), (True, f"{number % 9 * (number % 9 - 1) // 2}\n", "")),
        (tool_call(f"print({number})\n1 / 0"), (False, f"{number}\n", "ZeroDivisionError: division by zero\n")),
        (tool_call("input()"), (False, "", "EOFError: EOF when reading a line\n")),
    ][number % 6]  # fmt: skip


@pytest.mark.parametrize(("senders", "size", "calls"), [(8, 32, 256), (32, 8, 256)])
async def test_tool_calls_of_a_trainer(the_stack: Stack, senders: int, size: int, calls: int) -> None:
    """As many at once as its settings, and as its paper, have in flight: each gets its own answer, and none fails."""
    submissions, expected = zip(*map(mixed, range(calls)), strict=True)
    async with Client(the_stack.url, senders) as client:
        results = await client.run_all(submissions, size)
    assert [(one["success"], one["stdout"], one["stderr"]) for one in results] == list(expected)
    assert {one["reason"] for one in results} == {""}
    assert client.sent == calls, "nothing had to be sent again"


async def test_what_a_model_is_shown_of_a_program_that_was_ended(the_stack: Stack) -> None:
    """What it printed until then, and a line with the word by which GRPO-RoC counts a failed call."""
    ended = {
        "print(1)\nwhile True: pass": ("worker_timeout", "TimeoutError: ended after "),
        "print(1)\nx = bytearray(1 << 30)": ("", "MemoryError"),
        "print(1)\nwhile True: print('x' * 9999)": ("", "OutputError: ended for printing more than it may"),
        "print(1)\nimport os, signal\nos.kill(os.getpid(), signal.SIGSEGV)": (
            "",
            "error: ended by signal 11",
        ),
    }
    async with Client(the_stack.url, 1) as client:
        results = await client.run(
            [tool_call(code) | ({"timeout": 1} if "True: pass" in code else {}) for code in ended]
        )
    for result, (reason, words) in zip(results, ended.values(), strict=True):
        assert (result["success"], result["run_success"], result["reason"]) == (False, False, reason)
        assert result["stdout"].startswith("1\n")
        assert words in result["stderr"]
        assert "error" in result["stderr"].lower()


#: A response and the reference, and whether that is right.
ANSWERS = [
    (r"<answer>\boxed{42}</answer>", "42", 1.0),
    (r"first \boxed{41}, no: \boxed{42}", "42", 1.0),
    (r"\boxed{42} <tool_response>41</tool_response>", "42", 1.0),
    (r"\boxed{42}, no: \boxed{41}", "42", 0.0),
    (r"\boxed{ 1{,}024 }", "1024", 1.0),
    (r"\boxed{1,024}", "1024", 1.0),
    (r"\boxed{-7}", "7", 0.0),
    (r"\boxed{0.50}", r"\frac{1}{2}", 1.0),
    (r"\boxed{\dfrac{2}{4}}", "1/2", 1.0),
    (r"\boxed{$\pi$}", r"\pi", 1.0),
    (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}", 1.0),
    (r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{3}", 0.0),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
    (r"\boxed{x = 5}", "5", 1.0),
    (r"<answer>42</answer>", "42", 1.0),
    (r"the answer is 42", "42", 0.0),
    (r"\boxed{42", "42", 0.0),
    (r"\boxed{}", "", 0.0),
    (r"\boxed{" + "9" * 5000 + "}", "42", 0.0),
    ("", "42", 0.0),
]  # fmt: skip


async def test_rewards_of_a_trainer(the_stack: Stack) -> None:
    """Its reward programs find what they import, by both names, and their scores are right: 64 at a time, in turn."""
    asked = [(path, answer) for path in PATHS for answer in ANSWERS]
    asked += [
        (path, (rf"So \boxed{{{n}}}.", str(n - n % 2), float(n % 2 == 0)))
        for n in range(43)
        for path in PATHS
    ]
    programs = [
        REWARD.format(path, encoded(response), encoded(truth)) for path, (response, truth, _) in asked
    ]
    async with Client(the_stack.url, 32) as client:
        results: list[dict[str, Any]] = []
        for at in range(0, len(programs), 64):
            submissions = [
                {"type": "python", "solution": code, "input": None} for code in programs[at : at + 64]
            ]
            results += await client.run(submissions)
    expected = [f"<result>{score}</result>\n" for _, (*_, score) in asked]
    assert [(one["success"], one["stdout"]) for one in results] == [(True, text) for text in expected], (
        results
    )
    assert client.sent == len(asked) == 128


async def test_the_type_math_grades(the_stack: Stack) -> None:
    """What theirs only has a name for: whether the solution is the expected output, as mathematics."""
    asked = [("(x+1)^2", True), (r"\boxed{x^2+2x+1}", True), ("x^2+2x", False)]
    submissions = [{"type": "math", "solution": text, "expected_output": "x^2+2x+1"} for text, _ in asked]
    async with Client(the_stack.url, 1) as client:
        results = await client.run(submissions)
    assert [(one["success"], one["run_success"], one["reason"]) for one in results] == [
        (right, True, "") for _, right in asked
    ]


async def test_a_checker_of_ones_own_can_bound_itself(the_stack: Stack) -> None:
    """Where a trainer's own checker forks a process, waits for its queue, and sets an alarm, these work."""
    checker = """
import multiprocessing, signal

def check(queue):
    queue.put(6 * 7)

def late(*_):
    print("late")

signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.pause()
fork = multiprocessing.get_context("fork")
queue = fork.Queue()
process = fork.Process(target=check, args=(queue,))
process.start()
print(queue.get(timeout=5))
process.join()
"""
    async with Client(the_stack.url, 1) as client:
        [result] = await client.run([{"type": "python", "solution": checker}])
    assert (result["success"], result["stdout"], result["stderr"]) == (True, "late\n42\n", "")
