"""What the garbage collector does while very many requests stay open."""

from __future__ import annotations

import subprocess
import sys

# A process of its own, since what is frozen stays so. An object as a request holds them, two million times.
PROGRAM = """
import gc
from gateway.__main__ import spare_the_collector

spare_the_collector()
looked_at = []

def count(phase, info):
    if phase == "start":
        looked_at.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))

gc.callbacks.append(count)
held = [[] for _ in range(2_000_000)]
print(len(looked_at), max(looked_at))
"""


def test_no_collection_looks_at_all_that_is_open() -> None:
    """However many objects stay, one collection looks at an eighth of what 25,000 requests hold, and there are few."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    collections, most = map(int, done.stdout.split())
    assert 0 < collections <= 40
    assert most <= 250_000
