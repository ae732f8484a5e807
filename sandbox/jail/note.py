"""The note that a program leaves: which exception ended it, and by which line; and the files that its caller wants.

Only the interpreter in the child knows the one and sees the other, and what it says there the program can say as well.
So it is a word of the program's like its output: it decides nothing, and of a note that is not to the letter what
forkserver.py writes nothing is taken.

It lies in memory that the worker gives to each call and the child maps before it closes all descriptors (fork.c). The
memory has a size that nobody can change, belongs to no other call, and is read when no process of the call is left; of
a program that ended well only the files are looked at, if any are wanted. Zeros are no note.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Sequence

from sandbox.calls import Base64File, ProgramException

#: NOTE_BYTES of forkserver.py; has room for the characters that forkserver.py takes of each text, four bytes each.
_BYTES = 8192
_MOST = (200, 1000, 500)
#: The line, 0 for none, and the bytes of type, message and source, which follow.
_HEAD = struct.Struct("=I3H")


#: FETCHED_BYTES of forkserver.py: of all files of a call together.
FETCHED_BYTES = 1 << 20
#: Of each file, before its content: 1 and its size; 0 where it is not there.
_MARK = struct.Struct("=i")
_TOO_LARGE = -1


def blank(files: int = 0) -> int:
    """A descriptor of an empty note with room for so many files. Its pages cost nothing until one is written."""
    size = _BYTES + (FETCHED_BYTES + files * _MARK.size if files else 0)
    fd = os.memfd_create("note", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
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


def read_files(fd: int, names: Sequence[str]) -> dict[str, Base64File | None]:
    """The files that were wanted and are there; None for one that had no room."""
    note = os.pread(fd, FETCHED_BYTES + len(names) * _MARK.size, _BYTES)
    files: dict[str, Base64File | None] = {}
    start = 0
    for name in names:
        [mark] = _MARK.unpack_from(note, start)
        start += _MARK.size
        if mark == _TOO_LARGE:
            files[name] = None
        elif 0 < mark <= 1 + FETCHED_BYTES:
            files[name] = Base64File.model_construct(base64=note[start : start + mark - 1])
            start += mark - 1
            if start + _MARK.size > len(note):  # only what a program wrote itself can claim so much
                break
    return files
