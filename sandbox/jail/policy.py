"""The outer wall: the command line of nsjail, once for each forkserver. A pure function; a test shows the whole line.

At level `process` there is no nsjail: the forkserver is started as it is, and bounds itself to what stands at the end.

What nsjail closes by default and we leave closed: every namespace (user, mount, pid, net, ipc, uts, cgroup) is new, the
network has not even a loopback device, the root is read-only, all capabilities but those named below are gone from
the bounding set, the environment is empty. What stands below with a reason is opened.

The inner walls, one set for each call, are put up by fork.c; the system calls are in policy.seccomp.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sandbox.calls import Network
from sandbox.settings import Level

#: Inside the jail the forkserver is 0 and slots are 1, 2, 3, ...
MAX_SLOTS = 4095

#: Each worker takes one of so many disjoint ranges of host uids, by its pid.
WORKERS_APART = 1024


_ENVIRONMENT = {
    "PYTHONPATH": "/python/site",
    "PYTHONUTF8": "1",
    "LANG": "C.UTF-8",
    # A pool of BLAS threads in the forkserver would make forking unsafe.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}

#: What a program at level `process` reads and executes of the host, beside the runtime: programs, libraries, and what
#: the loader and libc read. /usr/local is not among them: an image may have its own applications there. What a host has
#: not is left out.
SYSTEM = (
    *("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/share"),
    *("/bin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/localtime"),
)
#: And what it reads and writes, beside its scratch folder.
DEVICES = ("/dev/null", "/dev/full", "/dev/zero", "/dev/random", "/dev/urandom")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which users of the host stand behind those of the jail."""

    uid: int
    gid: int
    #: First host uid and gid of the slots; None for an ordinary user, who has just one to give.
    first_slot: int | None


def nsjail_argv(
    nsjail: Path,
    root: Path,
    identity: Identity,
    level: Level = "namespaces",
    network: Network = "none",
    hash_seed: int | None = None,
) -> list[str]:
    """The command that starts one forkserver in its jail. Descriptor 3 is its control socket."""
    argv = [
        str(nsjail),
        # One run, then exit; only warnings on stderr; no wall clock of nsjail's (it counts whole seconds, ours is
        # the worker's) and no rlimits of nsjail's (its defaults break scientific code, fork.c sets ours).
        "--mode", "o", "--quiet", "--time_limit", "0", "--disable_rlimits",
        "--user", f"0:{identity.uid}:1", "--group", f"0:{identity.gid}:1",
    ]  # fmt: skip
    if identity.first_slot is not None:
        for flag in ("--user", "--group"):
            argv += [flag, f"1:{identity.first_slot}:{MAX_SLOTS}"]
    argv += [
        "--chroot", str(root),
        "--iface_no_lo",
        # The forkserver's own; each call mounts one over it. Python looks for a writable folder while it warms up.
        "--tmpfsmount", "/tmp",  # noqa: S108
        "--pass_fd", "3",
        "--hostname", "sandbox",
        # Programs, numpy and the interpreter use these; a bind mount of the node is all of /dev there is. Read-only is
        # the node of the host, with its times: a device takes what is written all the same.
        "--bindmount_ro", "/dev/null", "--bindmount_ro", "/dev/full", "--bindmount_ro", "/dev/zero",
        "--bindmount_ro", "/dev/random", "--bindmount_ro", "/dev/urandom",
        # For the forkserver, in its own user namespace: mounts and namespaces of each call (SYS_ADMIN), its uid
        # (SETUID, SETGID), dropping the bounding set (SETPCAP), ending it (KILL). No program keeps one.
        "--cap", "CAP_SYS_ADMIN", "--cap", "CAP_SETUID", "--cap", "CAP_SETGID",
        "--cap", "CAP_SETPCAP", "--cap", "CAP_KILL",
    ]  # fmt: skip
    if level == "strict" or network == "loopback":
        argv += [
            "--proc_rw"
        ]  # the forkserver's own: there it writes user mappings, and settings of net namespaces
    if level == "strict":
        # Into each call's user namespace it maps one user, which for an ordinary user's worker is its own root.
        argv += ["--cap", "CAP_SETFCAP"]
    if network == "loopback":
        argv += [
            "--cap",
            "CAP_NET_ADMIN",
        ]  # for the loopback device and the settings of each call's net namespace
    for name, value in (_ENVIRONMENT | hashing(hash_seed)).items():
        argv += ["--env", f"{name}={value}"]
    return [*argv, "--", "/python/bin/python3", "-s", "-B", "/jail/forkserver.py"]


def hashing(seed: int | None) -> dict[str, str]:
    """What an interpreter's environment says of the hashes of text; without a seed, nothing."""
    return {} if seed is None else {"PYTHONHASHSEED": str(seed)}


def plain_command(root: Path, hash_seed: int | None = None) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a forkserver at level `process`, which sees the runtime where it lies."""
    environment = {
        **_ENVIRONMENT,
        **hashing(hash_seed),
        "PYTHONPATH": f"{root}/python/site",
        # The interpreter's own library; those of the system are the host's, as is the loader.
        "LD_LIBRARY_PATH": f"{root}/python/lib",
    }
    return [f"{root}/python/bin/python3", "-s", "-B", f"{root}/jail/forkserver.py"], environment
