"""What goes into a program and comes out of it, as descriptors: its payload, its stdin and its two output pipes."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import struct

from sandbox.calls import Base64File, ToolCall


class Output:
    """One of the program's two output pipes: keeps its head and its tail, counts, and tells when there was too much.

    What comes first goes to the head until that is full, then to the tail, of which the oldest is dropped. Unless the
    caller wants less than the limit, the head has room for all of it and the tail for nothing.
    """

    __slots__ = ("_head", "_head_bytes", "_limit", "_tail", "_tail_bytes", "exceeded", "fd", "written")

    def __init__(self, fd: int, limit: int, keep: int | None = None) -> None:
        self.fd: int | None = fd
        self._limit = limit
        kept = limit if keep is None else min(keep, limit)
        self._tail_bytes = kept // 2 if kept < limit else 0
        self._head_bytes = kept - self._tail_bytes
        self._head, self._tail = bytearray(), bytearray()
        self.written = 0
        self.exceeded = False

    def read(self) -> bool:
        """Read what is there; False at the end of file, or when nothing more is wanted.

        Raises BlockingIOError when nothing is there yet.
        """
        assert self.fd is not None
        chunk = os.read(self.fd, 65536)
        room = self._head_bytes - len(self._head)
        self._head += chunk[:room]
        if self._tail_bytes and room < len(chunk):
            self._tail += chunk[room : self._limit - self.written]
            del self._tail[: -self._tail_bytes]
        self.written += len(chunk)
        self.exceeded = self.written > self._limit
        return bool(chunk) and not self.exceeded

    def drain(self) -> None:
        """Read what an ended program left in the pipe, without waiting, and close it."""
        with contextlib.suppress(BlockingIOError):
            while not self.exceeded and self.read():
                pass
        self.close()

    def close(self) -> None:
        """Close the pipe, of which nothing more is wanted."""
        assert self.fd is not None
        os.close(self.fd)
        self.fd = None

    @property
    def is_cut(self) -> bool:
        """Whether the program wrote more than is kept in one piece."""
        return self.written > self._head_bytes + self._tail_bytes

    def text(self) -> str:
        """All of it, or its head. UTF-8 with replacement; a character that a cut left unfinished is left out."""
        if not self.is_cut:
            return (self._head + self._tail).decode("utf-8", "replace")
        return _unfinished(self._head)

    def tail(self) -> str:
        """The end of an output of which the middle is not kept; empty for any other. Cut as the head is."""
        if not self.is_cut:
            return ""
        rest = bytes(self._tail[:3]).lstrip(_REST) + self._tail[3:]
        return _unfinished(rest) if self.exceeded else rest.decode("utf-8", "replace")


#: What a character of UTF-8 has after its first byte, three times at most.
_REST = bytes(range(0x80, 0xC0))


def _unfinished(text: bytes | bytearray) -> str:
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(text), final=False)


def output_pipe(ours: list[int], theirs: list[int]) -> None:
    """Append the two ends of a pipe: ours to read a program's output from, theirs to write it to."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    ours.append(read_end)
    theirs.append(write_end)
    os.set_blocking(read_end, False)
    os.fchmod(write_end, 0o666)  # a pipe is its maker's, and programs, other users, open /dev/stdout


def pack_payload(call: ToolCall) -> bytes:
    """Code and files in the form that `forkserver.read_payload` reads."""
    code = call.code.encode()
    seed = -1 if call.random_seed is None else call.random_seed
    wanted = "\0".join(call.fetch_files).encode()
    parts = [
        struct.pack("=IqIII", call.echo_last_value, seed, len(code), len(call.files), len(wanted)),
        code,
    ]
    for name, content in call.files.items():
        raw = content.base64 if isinstance(content, Base64File) else content.encode()
        parts += [struct.pack("=II", len(name.encode()), len(raw)), name.encode(), raw]
    return b"".join([*parts, wanted])


def sealed(name: str, content: bytes) -> int:
    """A descriptor to read the content from, which nobody can change any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        # At once, but for a signal; by offset, so that it is read from its beginning.
        while written < len(content):
            written += os.pwrite(fd, memoryview(content)[written:], written)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd
