"""The jail: what a worker needs to run a stranger's program.

Only the worker, the doctor and the table of costs open one.

host.py      what the host offers, settled once        policy.py, policy.seccomp   the walls, to read
jail.py      one warm jail and the calls in it         cgroups.py, watched.py      bounds and counts of a slot
streams.py   what goes into a program and out          scratch.py                  its folder at level `process`
preload.py   what is warm, and who wants it            runtime.py, rootfs.py       the file system that programs see
selftest.py  every wall, tried at the start            hostcheck.py, trial.py      what the doctor looks at
fork.c, init.c, guardian.c, heap.c, forkserver.py      what runs inside
"""

from sandbox.jail.host import Host, Slot, Slots, prepare
from sandbox.jail.jail import Jail
from sandbox.jail.preload import PRELOADS, choose

__all__ = ["PRELOADS", "Host", "Jail", "Slot", "Slots", "choose", "prepare"]
