"""Client processes (`crowd.py`) as their parent sees them.

They are in process groups of their own, so that Ctrl-C reaches us alone, but in our session: where the kernel shares
cores out by session (autogroup), they have one share, and the service has one. They end when we do, for their stdin
ends with us.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict

from loadtest.crowd import Report, Spec
from sandbox import Unavailable
from sandbox.calls import MIB

_ANSWERS_S = 120.0  # from when answers may come to the last one
_LONGEST_LINE = 256 * MIB  # of a report


class Crowd:
    """One client process."""

    def __init__(self, spec: Spec, process: asyncio.subprocess.Process) -> None:
        self.spec = spec
        self.process = process
        self.trouble: str | None = None
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> Report:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said = json.loads(line)
            if "report" in said:
                fields = said["report"]
                return Report(**fields | {"errors": Counter(fields["errors"])})
            self.trouble = said["trouble"]
        raise Unavailable(f"a client process ended without a report (exit code {await self.process.wait()})")

    def finish(self) -> None:
        """Let it stop and report what it has."""
        assert self.process.stdin is not None
        self.process.stdin.close()


@asynccontextmanager
async def started(specs: Iterable[Spec]) -> AsyncIterator[list[Crowd]]:
    """A process for each, from their start to their end."""
    crowds: list[Crowd] = []
    try:
        for spec in specs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "loadtest.crowd", json.dumps(asdict(spec))),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                limit=_LONGEST_LINE,
                process_group=0,
            )
            crowds.append(Crowd(spec, process))
        yield crowds
    finally:
        for crowd in crowds:
            crowd.reading.cancel()
            if crowd.process.returncode is None:
                crowd.process.kill()
            await crowd.process.wait()


async def all_reports(crowds: list[Crowd]) -> list[tuple[Crowd, Report]]:
    """What the clients have, at the latest when patience ends."""
    readings = [crowd.reading for crowd in crowds]
    await asyncio.wait(readings, timeout=_ANSWERS_S)
    for crowd in crowds:
        crowd.finish()
    return list(zip(crowds, await asyncio.gather(*readings), strict=True))
