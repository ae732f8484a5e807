"""What every long-running program of ours does about its own process."""

from __future__ import annotations

import resource


def use_all_descriptors() -> None:
    """Raise the soft limit on open files to the hard one: common systems start programs with 1,024.

    Each connection, and each slot of a worker, takes a few. Jailed programs have a limit of their own.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
