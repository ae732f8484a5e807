"""The same call twice, in different jails: the same output where it was asked for, and another where it was not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from .box import Box, settings_at

DRAW = "import random\nprint(random.random(), random.sample(range(10**6), 3), random.choice('abc'))\n"
DRAW_NUMPY = (
    DRAW + "import numpy as np\nprint(np.random.rand(), np.random.randn(), np.random.permutation(9))\n"
)
DRAW_SYMPY = DRAW_NUMPY + (
    "import sympy, sympy.core.random as rng\n"
    "print(rng.random(), rng.random_complex_number(), sympy.randprime(10**40, 10**41), rng._assumptions_rng.random())\n"
)
DRAWS = {"standard": DRAW, "numpy": DRAW_NUMPY, "sympy": DRAW_SYMPY, "data": DRAW_SYMPY}
LIMITS = {"wall_s": 20.0, "cpu_s": 20.0}

HASHES = "print(hash('a'), hash(b'b'), [*{'one', 'two', 'three', 'four', 'five', 'six'}])\n"
#: In an interpreter of its own, and in one that starts another.
SPAWNED = "import subprocess, sys\nprint(subprocess.run([sys.executable, 'look.py'], capture_output=True, text=True).stdout)"


@pytest.fixture(scope="module", params=["namespaces", "process"])
def seeded(request: pytest.FixtureRequest) -> Iterator[tuple[Box, Box]]:
    """Two jails whose interpreters hash text in one way."""
    settings = settings_at(request.param)
    with (
        closing(Box(settings=settings, hash_seed=0)) as one,
        closing(Box(settings=settings, hash_seed=0)) as two,
    ):
        yield one, two


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_starts_all_generators(name: str, request: pytest.FixtureRequest) -> None:
    """With one seed all draws are the same, in any slot; another seed, or none, gives others."""
    box: Box = request.getfixturevalue("box" if name == "standard" else f"{name}_box")
    first = box.out(DRAWS[name], random_seed=7, **LIMITS)
    assert [box.out(DRAWS[name], random_seed=7, slot=slot, **LIMITS) for slot in (0, 1)] == [first] * 2
    others = {box.out(DRAWS[name], random_seed=seed, **LIMITS) for seed in (0, 8, 2**32 - 1, None, None)}
    assert len({first, *others}) == 6
    lines = zip(*(text.splitlines() for text in (first, *others)), strict=True)
    assert all(len(set(line)) == 6 for line in lines)


def test_what_is_warm_makes_no_difference(box: Box, numpy_box: Box, sympy_box: Box, data_box: Box) -> None:
    """A seed gives the same numbers whether a library is warm or the program imports it, by whatever name."""
    drawn = {each.out(DRAW_NUMPY, random_seed=7, **LIMITS) for each in (box, numpy_box, sympy_box, data_box)}
    assert len(drawn) == 1
    drawn = {each.out(DRAW_SYMPY, random_seed=7, **LIMITS) for each in (box, sympy_box, data_box)}
    assert len(drawn) == 1


def test_a_module_of_the_same_name_is_left_alone(box: Box) -> None:
    """A file of the program's own that has a library's name is imported as it is."""
    code = "import sympy\nprint(sympy.x)"
    assert box.out(code, random_seed=7, files={"sympy.py": "x = 1"}) == "1\n"


def test_what_a_seed_leaves_alone(box: Box) -> None:
    """Names, tokens and generators that must not be guessed are as random as ever."""
    code = (
        "import os, random, secrets, tempfile, uuid\n"
        "print(os.urandom(8), random.SystemRandom().random(), secrets.token_hex(), tempfile.mktemp(), uuid.uuid4())"
    )
    assert box.out(code, random_seed=7) != box.out(code, random_seed=7)


def test_draws_are_the_documented_ones(box: Box) -> None:
    """The numbers are those of `random.seed`, so that a program can be repeated anywhere."""
    code = "import random\nfirst = random.random()\nrandom.seed(7)\nprint(first == random.random())"
    assert box.out(code, random_seed=7) == "True\n"


def test_hashes_of_one_seed(seeded: tuple[Box, Box], box: Box) -> None:
    """In jails of hash seed 0 text has the same hashes, and sets the same order; elsewhere they are others."""
    one, two = seeded
    assert one.out(HASHES) == two.out(HASHES)
    assert one.out(HASHES) != box.out(HASHES)
    look = "import os, sys\nprint(os.environ['PYTHONHASHSEED'], sys.flags.hash_randomization)"
    assert one.out(look) == "0 0\n"


def test_hashes_in_interpreters_of_its_own(seeded: tuple[Box, Box], box: Box) -> None:
    """An interpreter that the program starts has the same hashes; in other jails it has new ones each time."""
    one, two = seeded
    files: dict[str, object] = {"look.py": HASHES}
    told = {each.out(SPAWNED, files=files) for each in (one, two)}
    assert told == {one.out(HASHES) + "\n"}
    assert box.out(SPAWNED, files=files) != box.out(SPAWNED, files=files)
