"""The note that a program leaves when an exception has ended it: what it was, and the line that it came by.

Only the interpreter in the child knows that, and what it says there the program can say as well. So it is a word of
the program's like its output: it decides nothing, and of a note that is not to the letter what forkserver.py writes
nothing is taken.

It lies in memory that the worker gives to each call and the child maps before it closes all descriptors (fork.c). The
memory has a size that nobody can change, belongs to no other call, and is read when no process of the call is left; of
a program that ended well it is never looked at. Zeros are no note.
"""

from __future__ import annotations

import fcntl
import os
import struct

from sandbox.calls import ProgramException

#: NOTE_BYTES of fork.c; has room for the characters that forkserver.py takes of each text, four bytes each.
_BYTES = 8192
_MOST = (200, 1000, 500)
#: The line, 0 for none, and the bytes of type, message and source, which follow.
_HEAD = struct.Struct("=I3H")


def blank() -> int:
    """A descriptor of an empty note. Its pages cost nothing until one is written."""
    fd = os.memfd_create("note", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    except OSError:
        os.close(fd)
        raise
    return fd


def read_note(fd: int, code: str) -> ProgramException | None:
    """What a program that ran this code says; None where it says nothing, or nonsense."""
    note = os.pread(fd, _BYTES, 0)
    line, *lengths = _HEAD.unpack_from(note)
    last_line = code.count("\n") + code.count("\r") + 1
    if (
        not lengths[0]
        or line > last_line
        or any(n > 4 * most for n, most in zip(lengths, _MOST, strict=True))
    ):
        return None
    texts, start = [], _HEAD.size
    for length, most in zip(lengths, _MOST, strict=True):
        texts.append(note[start : start + length].decode("utf-8", "replace")[:most])
        start += length
    kind, message, source = texts
    return ProgramException(type=kind, message=message, line=line or None, source=source if line else None)
