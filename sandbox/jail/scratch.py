"""Scratch folders at level `process`, where no mount of a call's own can hold them: real ones on the host.

Theory of operation. All slots of a worker have theirs below one folder of the worker in the host's temporary folder:
made when a call begins, given to the slot's user, closed to everybody else, and removed when nothing of the call lives.
The worker holds a lock on its folder. A killed worker leaves the folder without its lock, and the next one on the host
sweeps it. As root the folder's name is that of the worker's range of uids, so the lock also keeps two workers from
running programs as the same users.

What stands in a scratch folder was shaped by a program: links to anywhere, trees of any depth, names of any bytes,
folders without rights. So no path below it is ever resolved: every step is relative to a descriptor, follows no link,
and a folder's folders are moved up to the top instead of being entered, one after the other.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from sandbox.errors import ConfigError

PREFIX = "roc-sandbox-"

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: What a folder that is to be moved may find under its new name.
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


class Scratch:
    """The scratch folder of one slot."""

    def __init__(self, path: Path, uid: int | None) -> None:
        self.path = path
        self._uid = uid

    def begin(self) -> int:
        """Make it, empty, and return a descriptor on it. Raises OSError."""
        if self.path.exists():  # it could not be removed after an earlier call
            self.remove()
        self.path.mkdir(mode=0o700)
        if self._uid is not None:
            os.chown(self.path, self._uid, self._uid)
        return os.open(self.path, os.O_PATH | _FOLDER)

    def is_gone(self) -> bool:
        """Remove what most calls leave, which is no more than their own text. False when there is more."""
        try:
            (self.path / "main.py").unlink(missing_ok=True)
            self.path.rmdir()
        except FileNotFoundError:  # the call did not come this far
            return True
        except OSError:
            return False
        return True

    def remove(self) -> None:
        """Remove it with all that is in it. Nothing of the call may live any more. Raises OSError."""
        remove_tree(self.path)


class ScratchFolders:
    """The folder of one worker."""

    def __init__(self, path: Path) -> None:
        """Make and lock it, and sweep those of workers that were killed. Raises ConfigError where another has it."""
        self._path = path
        try:
            self._lock = _make(path)
        except BlockingIOError as exc:
            raise ConfigError(
                f"another worker has {path} and its range of uids: start again, or set SANDBOX_JAIL__FIRST_UID"
            ) from exc
        except OSError as exc:
            raise ConfigError(
                f"cannot make scratch folders in {path}: {exc}; TMPDIR names another place"
            ) from exc
        _sweep(path)

    def add(self, number: int, uid: int | None) -> Scratch:
        """The folder of one slot."""
        return Scratch(self._path / str(number), uid)

    def close(self) -> None:
        """Remove the folder."""
        remove_tree(self._path)
        os.close(self._lock)


def _make(path: Path) -> int:
    """A descriptor that holds the lock on the folder. What a killed worker left in it is removed."""
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if (fd := _locked(path)) is None:
            raise ConfigError(f"somebody else made {path}; TMPDIR names another place for scratch folders")
        if path.exists() and path.samefile(f"/proc/self/fd/{fd}"):
            for left in path.iterdir():
                remove_tree(left)
            path.chmod(0o711)  # slots reach their own folder, and cannot list
            return fd
        os.close(fd)  # somebody has swept it before it was locked


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the lock on a folder, if it is ours. Raises OSError, BlockingIOError for a busy one."""
    fd = os.open(folder, os.O_RDONLY | _FOLDER)
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _sweep(own: Path) -> None:
    """Remove the folders of workers that were killed. A busy one has a worker, or its programs are just dying."""
    for folder in own.parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if (fd := _locked(folder)) is not None:
                try:
                    remove_tree(folder)
                finally:
                    os.close(fd)


# ---- removing what a program has shaped ----


def remove_tree(path: Path) -> None:
    """Remove a folder that strangers have filled. Raises OSError, also when somebody still fills it."""
    fresh = map(str, itertools.count())
    with _folder(path) as top:
        while _empty_once(top, top, fresh):
            pass
    path.rmdir()


def _empty_once(fd: int, top: int, fresh: Iterator[str]) -> bool:
    """Remove the files, and take away the folders. False when there was nothing."""
    found = False
    with os.scandir(fd) as entries:
        for entry in entries:
            found = True
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=fd)
                continue
            with _folder(entry.name, fd) as folder:
                if fd != top:
                    _move_up(entry.name, fd, top, fresh)
                    continue
                while _empty_once(folder, top, fresh):
                    pass
            os.rmdir(entry.name, dir_fd=top)
    return found


def _move_up(name: str, fd: int, top: int, fresh: Iterator[str]) -> None:
    for target in fresh:
        try:
            os.rename(name, target, src_dir_fd=fd, dst_dir_fd=top)
        except OSError as exc:
            if exc.errno not in _TAKEN:
                raise
        else:
            return


@contextlib.contextmanager
def _folder(name: str | Path, parent: int | None = None) -> Iterator[int]:
    """A folder to list, with the rights for it; a program may have taken them away."""
    handle = os.open(name, os.O_PATH | _FOLDER, dir_fd=parent)
    try:
        Path(f"/proc/self/fd/{handle}").chmod(0o700)
        fd = os.open(".", os.O_RDONLY | _FOLDER, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield fd
    finally:
        os.close(fd)
