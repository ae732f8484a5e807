"""What goes into a program and comes out of it, as descriptors: its payload, its stdin and its two output pipes."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import struct

from sandbox.calls import Base64File, ToolCall


class Output:
    """One of the program's two output pipes: keeps up to the limit, and tells when there was more."""

    __slots__ = ("_limit", "exceeded", "fd", "kept")

    def __init__(self, fd: int, limit: int) -> None:
        self.fd: int | None = fd
        self._limit = limit
        self.kept = bytearray()
        self.exceeded = False

    def read(self) -> bool:
        """Read what is there; False at the end of file, or when nothing more is wanted.

        Raises BlockingIOError when nothing is there yet.
        """
        assert self.fd is not None
        chunk = os.read(self.fd, 65536)
        self.kept += chunk[: self._limit - len(self.kept) + 1]
        if len(self.kept) > self._limit:
            self.exceeded = True
            del self.kept[self._limit :]
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

    def text(self) -> str:
        """UTF-8 with replacement; a character that the limit cut in two is left out."""
        if not self.exceeded:
            return self.kept.decode("utf-8", "replace")
        return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(self.kept), final=False)


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
    parts = [struct.pack("=III", call.echo_last_value, len(code), len(call.files)), code]
    for name, content in call.files.items():
        raw = content.base64 if isinstance(content, Base64File) else content.encode()
        parts += [struct.pack("=II", len(name.encode()), len(raw)), name.encode(), raw]
    return b"".join(parts)


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
