"""The jail: what a worker needs to run a stranger's program. Only the worker opens one.

host.py      what the host offers, settled once        policy.py, policy.seccomp   the walls, to read
jail.py      one warm jail and the calls in it         cgroups.py, watched.py      bounds and counts of a slot
preload.py   what is warm, and who wants it            runtime.py, rootfs.py       the file system that programs see
fork.c, forkserver.py, init.c                          what runs inside
"""

from sandbox.jail.host import Host, Slot, Slots, prepare
from sandbox.jail.jail import Jail
from sandbox.jail.preload import PRELOADS, choose

__all__ = ["PRELOADS", "Host", "Jail", "Slot", "Slots", "choose", "prepare"]
