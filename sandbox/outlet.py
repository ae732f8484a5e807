"""A way out for what is said, at which nobody need listen."""

from __future__ import annotations

import asyncio
import logging
import os
import select
from typing import Self

log = logging.getLogger(__name__)

#: Waits here for a reader that is slow: some ten thousand lines.
_MOST_BYTES = 1 << 20


class Outlet:
    """Writes to a descriptor without ever waiting for whoever reads it.

    A pipe or a terminal that nobody reads (`2>&1 | less`, Ctrl-S) makes a write wait. A supervisor that waits
    empties no pipe of its children, these wait for it in turn, and calls are late because of a log. So what does
    not fit now is kept for when it does, `_MOST_BYTES` of it; further lines are lost, and their number is logged.

    The descriptor is often shared with others, a shell for one, and must not be made non-blocking. But where poll
    sees room, a write of at most PIPE_BUF bytes does not wait.
    """

    def __init__(self, fd: int) -> None:
        """Needs a running loop, which is the one that may not be stalled."""
        self._fd = fd
        self._room = select.poll()
        self._room.register(fd, select.POLLOUT)
        self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        self._kept = bytearray()
        self._lost = 0

    def __enter__(self) -> Self:
        """Nothing to do."""
        return self

    def __exit__(self, *exc_info: object) -> None:
        """From here on only what fits is written."""
        assert self._loop is not None
        self._loop.remove_writer(self._fd)
        self._loop = None

    def write(self, text: str) -> None:
        """As a stream of the logging module: whole lines."""
        self.pass_on(text.encode(errors="replace"))

    def flush(self) -> None:
        """What can be written is written at once."""

    def pass_on(self, lines: bytes) -> None:
        """Write whole lines, now or later; or lose them."""
        if len(self._kept) + len(lines) > _MOST_BYTES:
            self._lost += lines.count(b"\n")
            return
        self._kept += lines
        self._write()

    def _write(self) -> None:
        while self._kept and self._room.poll(0):
            try:
                del self._kept[: os.write(self._fd, self._kept[: select.PIPE_BUF])]
            except OSError:  # the reader is gone, and with it whoever could be told
                self._kept.clear()
        if self._loop is None:
            return
        if self._kept:
            self._loop.add_writer(self._fd, self._write)
        else:
            self._loop.remove_writer(self._fd)
            if self._lost:
                lost, self._lost = self._lost, 0
                log.warning("nobody read the log for a while", extra={"lines_lost": lost})
