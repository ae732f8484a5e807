"""The outer wall, as the command line that a reviewer reads."""

from __future__ import annotations

import itertools
from pathlib import Path

from sandbox.jail.policy import MAX_SLOTS, Identity, nsjail_argv

NSJAIL, ROOT = Path("/x/nsjail"), Path("/srv/root")


def line(identity: Identity) -> str:
    return " ".join(nsjail_argv(NSJAIL, ROOT, identity))


def test_the_whole_line_for_a_worker_that_runs_as_root() -> None:
    """Nothing is opened beyond what stands here."""
    assert line(Identity(200_000, 200_000, 200_001)) == (
        "/x/nsjail --mode o --quiet --time_limit 0 --disable_rlimits"
        " --user 0:200000:1 --group 0:200000:1"
        f" --user 1:200001:{MAX_SLOTS} --group 1:200001:{MAX_SLOTS}"
        " --chroot /srv/root --iface_no_lo --tmpfsmount /tmp --pass_fd 3 --hostname sandbox"
        " --bindmount_ro /dev/null --bindmount_ro /dev/full --bindmount_ro /dev/zero"
        " --bindmount_ro /dev/random --bindmount_ro /dev/urandom"
        " --cap CAP_SYS_ADMIN --cap CAP_SETUID --cap CAP_SETGID --cap CAP_SETPCAP --cap CAP_KILL"
        " --env PYTHONPATH=/python/site --env PYTHONUTF8=1 --env LANG=C.UTF-8"
        " --env OPENBLAS_NUM_THREADS=1 --env OMP_NUM_THREADS=1"
        " -- /python/bin/python3 -s -B /jail/forkserver.py"
    )


def test_what_a_level_or_a_network_adds() -> None:
    """Two capabilities over the forkserver's own namespaces, and its own /proc to write user mappings in."""
    identity = Identity(200_000, 200_000, 200_001)
    plain = set(nsjail_argv(NSJAIL, ROOT, identity))
    strict = nsjail_argv(NSJAIL, ROOT, identity, level="strict")
    loopback = nsjail_argv(NSJAIL, ROOT, identity, network="loopback")
    assert set(strict) - plain == {"--proc_rw", "CAP_SETFCAP"}
    assert set(loopback) - plain == {"--proc_rw", "CAP_NET_ADMIN"}


def test_an_ordinary_user_gives_only_itself() -> None:
    """A worker without root maps its own user and group, and no other."""
    words = nsjail_argv(NSJAIL, ROOT, Identity(1000, 1001, None))
    maps = [value for flag, value in itertools.pairwise(words) if flag in {"--user", "--group"}]
    assert maps == ["0:1000:1", "0:1001:1"]


def test_the_host_user_behind_the_forkserver_is_never_root() -> None:
    """Whoever escapes the user namespace as its root is an ordinary user outside."""
    assert ":0:" not in line(Identity(200_000, 200_000, 200_001)).replace("1:", "")


def test_no_wall_of_nsjail_is_taken_down() -> None:
    """No namespace is shared with the host, and no file system of the host but five devices is mounted."""
    words = nsjail_argv(NSJAIL, ROOT, Identity(200_000, 200_000, 200_001))
    flags = {word for word in words[: words.index("--")] if word.startswith("-")}
    assert not any(flag.startswith("--disable_clone") for flag in flags)
    assert not flags & {"--rw", "--keep_env", "--keep_caps", "--disable_no_new_privs", "--bindmount"}
