"""Of an ended call nothing is left in memory: not for the next program, and not in the forkserver."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sandbox.jail.box import Box, program

from .probe import probe
from .test_forging import FIND_NOTE

#: In a program's text only these halves stand, so that a search does not find itself.
MARK, HALVES = "residue-of-4711-", "'residue' + '-of-' + '4711-'"

#: Searches all memory that a program has, for everything that begins with the mark.
_SEARCH = f"""
import ctypes, re
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # else its own memory would be closed to it
mark = ({HALVES}).encode()
found = set()
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    for line in maps.read().splitlines():
        span, mode, *_ = line.split()
        low, high = (int(end, 16) for end in span.split("-"))
        if mode[0] != "r" or line.endswith(("[vvar]", "[vsyscall]", "[vvar_vclock]")):
            continue
        memory.seek(low)
        block = memory.read(high - low)
        found |= set(re.findall(re.escape(mark) + rb"[a-z]+", block))
print(sorted(found))
"""


def leave(box: Box) -> None:
    """A call that spreads marks: in code, input, files, output, names, and whatever the worker handles of it."""
    result = box.run(
        f"secret = '{MARK}code'  # {MARK}comment\nimport os, sys\nos.environ['X'] = '{MARK}environment'\nsys.stdin.read()\n"
        f"open('/dev/shm/x', 'w').write('{MARK}shm' * 1000)\nprint('{MARK}output' * 100, file=sys.stderr)\n"
        f"raise ValueError('{MARK}exception')",
        stdin=f"{MARK}stdin" * 100,
        files={f"{MARK}name.txt": f"{MARK}file" * 100},
    )
    assert result.exit_code == 1
    assert f"{MARK}exception" in result.stderr


def test_the_search_finds_what_is_there(box: Box) -> None:
    """The search of the tests below sees what a program itself holds."""
    assert "residue-of-4711-here" in box.out(f"x = ({HALVES} + 'here').encode()\n" + _SEARCH)


def test_no_later_program_finds_it(box: Box) -> None:
    """A program in the same slot, or in another, finds nothing of an earlier call in its memory."""
    for slot in (0, 0, 1):
        leave(box)
        assert box.out(_SEARCH, slot=slot, wall_s=20) == "[]\n"


#: What a program does with each library, so that its marks pass through that library's caches, tables and buffers.
_USE = {
    "numpy_box": "import numpy as np\nnp.savetxt('x', [1, 2], header='MARKheader')\nprint(np.array(['MARKarray' * 20] * 9), np.frombuffer(b'MARKbuffer' * 9, 'u1'))\n",
    "sympy_box": "import sympy as sp\nx = sp.Symbol('MARKsymbol')\nsp.solve(x**2 - 2, x); sp.expand((x + 1)**9); sp.latex(x); sp.simplify(sp.sympify('MARKname'.replace('-', '_')))\n",
    "data_box": "import networkx as nx, pandas as pd\npd.DataFrame({'MARKcolumn': ['MARKcell'] * 99}).to_csv('y'); nx.Graph([('MARKnode', 1)])\n",
}


@pytest.mark.parametrize("name", _USE)
def test_nor_in_a_jail_with_libraries(name: str, request: pytest.FixtureRequest) -> None:
    """Nothing of a call stays where a library keeps what it has seen, for later programs or in the forkserver."""
    box: Box = request.getfixturevalue(name)
    code = "".join(_USE[each] for each in list(_USE)[: list(_USE).index(name) + 1]).replace("MARK", MARK)
    limits = {"wall_s": 30, "cpu_s": 30, "memory_bytes": 2 << 30}
    result = box.run(code + f"raise ValueError('{MARK}exception')", stdin=f"{MARK}stdin", **limits)
    assert f"ValueError: {MARK}exception" in result.stderr
    for slot in (0, 1):
        assert box.out(_SEARCH, slot=slot, **limits) == "[]\n"
    assert find_in(box.forkserver_pid(), MARK.encode()) == []


def test_the_forkserver_does_not_hold_it(box: Box) -> None:
    """Whoever could read all of the forkserver would find no code, input, file or output of any call."""
    for _ in range(3):
        leave(box)
    assert find_in(box.forkserver_pid(), MARK.encode()) == []


def test_no_uninitialised_memory(box: Box) -> None:
    """Fresh memory, files and pipes are zeros, whatever was in the pages before."""
    leave(box)
    code = """
import mmap
block = mmap.mmap(-1, 64 << 20)
print("map", any(block[n : n + 4096] != bytes(4096) for n in range(0, len(block), 1 << 16)))
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
print("malloc", ctypes.string_at(_libc.malloc(8 << 20), 8 << 20).count(b"residue"))
os.truncate(os.open("/tmp/sparse", os.O_CREAT | os.O_RDWR), 16 << 20)
print("file", open("/tmp/sparse", "rb").read().strip(b"\\0"))
"""
    assert box.out(probe(code)) == "map False\nmalloc 0\nfile b''\n"


def test_how_others_ended_is_not_there(box: Box) -> None:
    """The forkserver's records of ended and running calls are not in a program's memory, nor what it left on its stack."""
    ended = box.run_together([program("import os\nos._exit(77)")] * 8)
    assert [result.exit_code for result in ended] == [77] * 8
    code = """
import ctypes, struct
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", buffering=0) as memory:
    spans = [line.split() for line in maps]
    low = min(int(fields[0].split("-")[0], 16) for fields in spans if fields[-1] == "/jail/libfork.so")
    with open("/jail/libfork.so", "rb") as library:  # its last segment is its data, as far as it is no code
        header = library.read(64)
        offset, size, count = struct.unpack("=Q14xHH", header[32:58])
        library.seek(offset)
        segments = [struct.unpack_from("=IIQQQQQ", library.read(size)) for _ in range(count)]
    start, length = max((address, length) for kind, _, _, address, _, _, length in segments if kind == 1)
    memory.seek(low + start)
    records = memory.read(length)
    low, high = (int(end, 16) for fields in spans if fields[-1] == "[stack]" for end in fields[0].split("-"))
    memory.seek(low)
    stack = memory.read(high - low)
print(len(records) > 100_000, records.count(struct.pack("=i", 77 << 8)), stack.count(struct.pack("=q", 77 << 8)))
"""
    assert box.out(code) == "True 0 0\n"


@pytest.mark.parametrize("kind", ["rw-s", "-w-s"])
def test_no_memory_is_shared(box: Box, kind: str) -> None:
    """No page that a program can write is the same page in another call: it shares its note, with the worker alone."""
    maps = box.out("print(open('/proc/self/maps').read())", output_bytes=1 << 20).splitlines()
    shared = [line.split(maxsplit=5) for line in maps if kind in line]
    assert [fields[5] for fields in shared] == ["/memfd:note (deleted)"] * (kind == "rw-s")


def test_a_note_is_new(box: Box) -> None:
    """What one call wrote into its note, where our record would go and behind it, no later one finds in its own."""
    look = FIND_NOTE + "print(len(note), bytes(note).strip(b'\\0'))\n"
    for end in ("os._exit(3)", "os.kill(os.getpid(), 9)", "pass"):
        box.run(look + f"write(b'{MARK}note' * 500)\n{end}")
        assert box.out(look) == "8192 b''\n"
    assert find_in(box.forkserver_pid(), f"{MARK}note".encode()) == []


def find_in(pid: int, mark: bytes) -> list[bytes]:
    """What stands around the mark wherever it is in the memory of a process."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="ascii").splitlines():
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            if line.split()[1].startswith("r") and not line.endswith(
                ("[vvar]", "[vsyscall]", "[vvar_vclock]")
            ):
                memory.seek(low)
                found += re.findall(re.escape(mark) + rb".{0,20}", memory.read(high - low), re.DOTALL)
    return found
