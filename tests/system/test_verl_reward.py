"""verl's rewards for code, on the wire: what its SandboxFusion client sends, retries and reads, 256 callers at once.

By `verl/utils/reward_score/sandbox_fusion/utils.py` (9c523b5). A caller opens a connection for each case, waits for the
two time limits and 10 s, and tries again after a 504 and nothing else, three times in all. Of an answer it makes True
or False (the output is right or not), -1 (no verdict), -2 (the program failed), -3 (time) or -4 (no such stage here).
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, NamedTuple

import httpx

from .stack import Stack

CALLERS = 256
ATTEMPTS = 3
MEMORY_MB = 1024

DOUBLE = "print(2 * int(input()))"
WRONG = "print(3 * int(input()))"
FAILS = "n = int(input())\nraise ValueError(n)"
NO_PYTHON = "print(2 * int(input())"
SLEEPS = "import time\nprint(2 * int(input()), flush=True)\ntime.sleep(60)"
#: As verl wraps a function that it is to call: with all names of many modules, arguments as lines of JSON.
FUNCTION = """
import json, sys
from string import *
from re import *
from collections import *
from heapq import *
from math import *
from itertools import *
from functools import *
from typing import *

class Solution:
    def double(self, n: int) -> int:
        return 2 * n

if __name__ == "__main__":
    print(json.dumps(Solution().double(*[json.loads(line) for line in sys.stdin.read().split("\\n")])))
"""


class Case(NamedTuple):
    """A program, a number for it, and the time that it may run."""

    code: str
    number: int
    timeout_s: int = 10


class Reward(NamedTuple):
    """What verl makes of a case, and of how many answers."""

    score: bool | int
    statuses: tuple[int, ...]


async def reward(http: httpx.AsyncClient, url: str, case: Case) -> Reward:
    """One case, as verl's client has it judged."""
    body = {
        "compile_timeout": case.timeout_s, "run_timeout": case.timeout_s, "code": case.code,
        "stdin": f"{case.number}", "memory_limit_MB": MEMORY_MB, "language": "python", "files": {}, "fetch_files": [],
    }  # fmt: skip
    headers = {"content-type": "application/json", "accept": "application/json"}
    statuses: list[int] = []
    while len(statuses) < ATTEMPTS:
        patience_s = 2 * case.timeout_s + 10
        response = await http.post(url, content=json.dumps(body), headers=headers, timeout=patience_s)
        statuses.append(response.status_code)
        if response.status_code != 504:
            break
        await asyncio.sleep(len(statuses))  # as that client does
    read = score(response.json(), f"{2 * case.number}") if response.status_code == 200 else -1
    return Reward(read, tuple(statuses))


def score(answer: dict[str, Any], expected: str) -> bool | int:
    """What verl reads out of an answer."""
    stage = answer["compile_result"]
    run = answer["run_result"]
    if answer["status"] == "Success" and run and run["status"] == "Finished":
        return (run["stdout"] or "").rstrip("\n") == expected
    if answer["status"] != "Failed":
        return -1
    if stage and (stage["status"] != "Finished" or stage["return_code"] != 0):
        return -4
    if run and run["status"] == "TimeLimitExceeded":
        return -3
    if run and (run["status"] == "Error" or run["return_code"] != 0):
        return -2
    return -1


def test_256_callers_all_get_their_reward(the_stack: Stack) -> None:
    """Every case of 256 at once is judged as what it is; none is refused, lost, sent twice or a fault."""
    kinds = [(DOUBLE, True), (WRONG, False), (FAILS, -2), (NO_PYTHON, -2), (FUNCTION, True)]
    # First, since their callers have the least patience.
    cases = [(Case(SLEEPS, n, timeout_s=2), -3) for n in range(4)]
    cases += [(Case(kinds[n % 5][0], n), kinds[n % 5][1]) for n in range(4, CALLERS)]

    async def judge() -> list[Reward]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as http:
            url = f"{the_stack.url}/run_code"
            return await asyncio.gather(*[reward(http, url, case) for case, _ in cases])

    rewards = asyncio.run(judge())
    assert Counter(reward.statuses for reward in rewards) == {(200,): CALLERS}
    assert [reward.score for reward in rewards] == [expected for _, expected in cases]
