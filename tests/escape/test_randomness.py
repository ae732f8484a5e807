"""No two calls draw the same random numbers, though all are copies of one forkserver."""

from __future__ import annotations

import pytest

from tests.sandbox.jail.box import Box, program

BOXES = ["standard_box", "numpy_box", "sympy_box", "data_box"]

#: One line for each source that programs draw from without a seed.
_DRAW = """
import asyncio, email.generator, multiprocessing, random, secrets, ssl, tempfile, uuid
print("random", random.random())
print("bytes", random.randbytes(8).hex())
print("system", random.SystemRandom().random())
print("instance", random.Random().random())
print("secrets", secrets.token_hex())
print("ssl", ssl.RAND_bytes(8).hex())
print("uuid4", uuid.uuid4())
print("node", uuid.uuid1().node)
print("clock", uuid.uuid1().clock_seq, uuid.uuid1().node)
print("temporary", tempfile.mktemp(), next(tempfile._get_candidate_names()))
print("authkey", bytes(multiprocessing.current_process().authkey).hex())
print("boundary", email.generator._make_boundary())
"""

_DRAW_NUMPY = """
import numpy
print("numpy", numpy.random.rand())
print("numpy-normal", numpy.random.randn())
print("numpy-default", numpy.random.default_rng().random())
print("numpy-state", numpy.random.RandomState().random_sample())
print("numpy-shared", numpy.random.mtrand._rand.random_sample())
"""

_DRAW_SYMPY = """
import mpmath, pickle, sympy, sympy.core.random
print("sympy", sympy.core.random.random(), sympy.core.random.rng.random())
print("sympy-matrix", sympy.randMatrix(4, 4, 0, 10**9)[0])
print("sympy-prime", sympy.randprime(10**40, 10**41))
print("sympy-dummy", sympy.Dummy().dummy_index)
print("mpmath", mpmath.rand())
"""

_DRAW_DATA = """
import networkx, pandas, scipy.stats
print("pandas", list(pandas.Series(range(10**6)).sample(3)))
print("networkx", sorted(networkx.gnp_random_graph(100, 0.5).edges)[:200])
print("scipy", scipy.stats.norm.rvs())
print("scipy-sobol", scipy.stats.qmc.Sobol(2).random(2).tolist())
print("scipy-group", scipy.stats.special_ortho_group.rvs(3)[0][0])
print("scipy-bootstrap", scipy.stats.uniform.rvs(size=2).tolist())
"""

DRAWS = {
    "standard_box": _DRAW,
    "numpy_box": _DRAW + _DRAW_NUMPY,
    "sympy_box": _DRAW + _DRAW_NUMPY + _DRAW_SYMPY,
    "data_box": _DRAW + _DRAW_NUMPY + _DRAW_SYMPY + _DRAW_DATA,
}

#: The state of every generator that is alive, named by where it is found, also of those that no source above draws from.
_STATES = """
import gc, random, sys
gc.unfreeze()
numpy = sys.modules.get("numpy")
kinds = (random.Random,) + ((numpy.random.RandomState, numpy.random.BitGenerator) if numpy else ())
alive = gc.get_objects()
for one in [*alive]:
    if isinstance(one, dict):
        alive += one.values()
for one in {id(one): one for one in alive if isinstance(one, kinds) and not isinstance(one, random.SystemRandom)}.values():
    places = [key for other in gc.get_referrers(one) if isinstance(other, dict) for key, value in list(other.items()) if value is one]
    state = one.getstate() if isinstance(one, random.Random) else one.get_state(legacy=False) if hasattr(one, "get_state") else one.state
    print(sorted(map(str, places)), "state", hash(str(state)))
"""


@pytest.mark.parametrize("name", BOXES)
def test_every_source(name: str, request: pytest.FixtureRequest) -> None:
    """Two calls one after the other, and two at the same time, draw differently from each source there is."""
    box: Box = request.getfixturevalue(name)
    call = program(DRAWS[name], wall_s=30, cpu_s=30)
    results = [*box.run_together([call, call]), *box.run_together([call])]
    assert [result.status for result in results] == ["ok"] * 3, results
    for lines in zip(*(result.stdout.splitlines() for result in results), strict=True):
        assert len(set(lines)) == 3, lines[0]


@pytest.mark.parametrize("name", BOXES)
def test_every_generator(name: str, request: pytest.FixtureRequest) -> None:
    """No generator that a library made when it was loaded is in the same state in two calls."""
    box: Box = request.getfixturevalue(name)
    one, two = (box.out(_STATES, wall_s=30, cpu_s=30, memory_bytes=1 << 30).splitlines() for _ in range(2))
    assert len(one) == len(two)
    assert len(one) >= {"standard_box": 1, "numpy_box": 3, "sympy_box": 6, "data_box": 6}[name]
    assert not set(one) & set(two)


def test_a_child_of_the_program(box: Box) -> None:
    """What a program forks draws other numbers than it does itself."""
    code = """
import os, random, sys, tempfile
read_end, write_end = os.pipe()
if not os.fork():
    os.write(write_end, f"{random.random()} {next(tempfile._get_candidate_names())}".encode())
    os._exit(0)
os.wait()
theirs = os.read(read_end, 1000).decode().split()
mine = f"{random.random()} {next(tempfile._get_candidate_names())}".split()
print([a == b for a, b in zip(mine, theirs)])
"""
    assert box.out(code) == "[False, False]\n"
