"""What a fork of a warm interpreter costs when nothing stands around it. The runtime's Python runs this for costs.py.

Reads one JSON object from stdin: the runtime's `root`, `modules` and `warm_up` of a preload, the `codes` to run and how
`often`. Prints one JSON object: for each code, and each fork, the CPU milliseconds of the child and of the parent.

The forkserver's own functions warm it up, so that the two differ by the walls alone. Standard library only.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path


def main() -> None:
    """Warm up, fork, print."""
    asked = json.load(sys.stdin)
    jail = Path(asked["root"], "jail")
    sys.path.insert(0, str(jail))
    import forkserver  # type: ignore[import-not-found] # noqa: PLC0415 - the line above finds it

    heap = ctypes.PyDLL(str(jail / "libheap.so"))
    heap.keep_together()
    forkserver.warm_up(asked["modules"], asked["warm_up"])
    forkserver.freeze(heap)
    ctypes.PyDLL(str(jail / "libfork.so")).collapse_heap()
    print(json.dumps({code: [fork(code) for _ in range(asked["often"])] for code in asked["codes"]}))


def fork(code: str) -> tuple[float, float]:
    """CPU of child and parent in ms: fork, run the code, read its output, wait."""
    before = time.process_time()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writer, 1)
        os.close(reader)
        os.close(writer)
        gc.enable()
        exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - that is what we measure
        sys.stdout.flush()
        os._exit(0)
    os.close(writer)
    while os.read(reader, 65536):
        pass
    os.close(reader)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{code!r} ended with {status}")
    return cpu_ms(usage), (time.process_time() - before) * 1e3


def cpu_ms(usage: resource.struct_rusage) -> float:
    """User and system milliseconds."""
    return (usage.ru_utime + usage.ru_stime) * 1e3


if __name__ == "__main__":
    main()
