"""Nothing that processes talk through outlives a call, or connects two."""

from __future__ import annotations

from tests.sandbox.jail.box import Box, program

from .probe import outcomes


def test_no_kernel_objects(box: Box) -> None:
    """Shared memory, semaphores, message queues and named pipes of the kernel are refused."""
    code = """
attempt("shm", lambda: syscall("shmget", 1234, 4096, 0o1666))
attempt("sem", lambda: syscall("semget", 1234, 1, 0o1666))
attempt("msg", lambda: syscall("msgget", 1234, 0o1666))
attempt("mq", lambda: syscall("mq_open", b"name", 0o102, 0o666, 0))
attempt("mq-folder", lambda: os.listdir("/dev/mqueue"))
attempt("fifo", lambda: os.mkfifo("/tmp/fifo"))
"""
    assert set(outcomes(box, code).values()) <= {"EPERM", "ENOENT", "EROFS", "EACCES"}


def test_posix_objects_are_the_call_s_own(box: Box) -> None:
    """Named semaphores and shared memory work, and are not there for the next call or the one beside."""
    make = (
        "from multiprocessing import shared_memory, resource_tracker\nimport time\n"
        "block = shared_memory.SharedMemory('name', create=True, size=4096)\nblock.buf[0] = 7\nprint('made')\n"
        "resource_tracker.unregister(block._name, 'shared_memory')\ntime.sleep(0.5)"
    )
    look = "import os, time\ntime.sleep(0.2)\nprint(os.listdir('/dev/shm'))"
    made, looked = box.run_together([program(make), program(look)])
    assert (made.stdout, looked.stdout) == ("made\n", "[]\n")
    assert box.out(look) == "[]\n"
