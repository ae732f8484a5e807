"""What we say, here and in the jail, against what math-verify itself says."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.grading import math
from sandbox.grading.plain import compare_numbers, tidy
from sandbox.settings import load_settings

Both = Callable[[str, str], tuple[bool, str]]

DIGITS = st.text("0123456789", min_size=1, max_size=7)
SIGNS = st.sampled_from(["", "", "-", "+"])
WHOLE = st.one_of(DIGITS, st.integers(0, 20).map(str), st.integers(1000, 10**7).map("{:,}".format))
DECIMAL = st.one_of(
    st.tuples(WHOLE, DIGITS).map(".".join),
    DIGITS.map(".{}".format),
    st.sampled_from(["0.5", "0.50", "1.0", "0.3333333", "0.333333", "2.000001", "2.0000001"]),
)
RATIO = st.tuples(st.integers(0, 12), st.integers(1, 12))
NUMBERS = st.tuples(
    SIGNS,
    st.one_of(
        WHOLE, DECIMAL, RATIO.map("{0[0]}/{0[1]}".format), RATIO.map(r"\frac{{{0[0]}}}{{{0[1]}}}".format)
    ),
).map("".join)


@pytest.fixture(scope="module")
def both(_jail_runtime: None) -> Iterator[Both]:
    """Asks both about a gold and an answer, in the runtime that programs get. The texts are ours: no jail is needed."""
    python = load_settings().jail.runtime / "root" / "python"
    program = Path(math.__file__).with_name("math_program.py")
    process = subprocess.Popen(
        [python / "bin" / "python3", "-P", Path(__file__).with_name("both.py"), program],
        env={"LD_LIBRARY_PATH": str(python / "lib"), "PYTHONPATH": str(python / "site")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )

    def ask(gold: str, answer: str) -> tuple[bool, str]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([gold, answer]) + "\n")
        original, ours = json.loads(process.stdout.readline())
        return original, ours

    with process:
        yield ask
        assert process.stdin is not None
        process.stdin.close()


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(NUMBERS, NUMBERS, st.booleans())
def test_numbers_are_what_math_verify_says(both: Both, gold: str, answer: str, near: bool) -> None:
    """Equal ones in other forms among them: never another verdict, without a jail or in it."""
    if near:
        answer = gold.replace(",", "")
    gold, answer = tidy(gold), tidy(answer)
    original, in_jail = both(gold, answer)
    here = compare_numbers(gold, answer, None)
    assert here in {None, original}, (gold, answer)
    assert (in_jail == "equivalent") == original, (gold, answer)


#: Forms that models and data sets write; each is compared with itself and with the one before it.
FORMS = [
    *(
        "12",
        "-3.5",
        r"\frac{1}{2}",
        r"50\%",
        r"2\sqrt{3}",
        r"\sqrt{12}",
        r"\frac{\pi}{4}",
        "x^2+2x+1",
        "(x+1)^2",
    ),
    *(
        "(1,2)",
        "[1,2]",
        r"\{1,2\}",
        "2, 1",
        "x=5",
        "5",
        "x>1",
        "1<x",
        r"1 < x \le 2",
        "(1,2]",
        r"\text{A}",
        "(A)",
        "a",
    ),
    *(
        r"\sin^2 x",
        r"1-\cos^2 x",
        "2+3i",
        "3i+2",
        r"x=1\text{ or }x=2",
        "a=b=12",
        r"\infty",
        r"90^\circ",
        "5!",
        "120",
    ),
    *(
        r"\begin{pmatrix}1\\2\end{pmatrix}",
        r"\begin{bmatrix}1\\2\end{bmatrix}",
        "yes",
        r"5\text{ cm}",
        r"\log_2 8",
    ),
    *(
        r"\frac{x+1}{2}",
        r"\frac{x}{2}+\frac{1}{2}",
        r"(-\infty,1)\cup(2,\infty)",
        r"2^{10}",
        "1024",
        r"\emptyset",
    ),
]


def test_forms_are_what_math_verify_says(both: Both) -> None:
    """The short way of its parser and what is left out change no verdict; what math-verify cannot read is told apart."""
    pairs = [*zip(FORMS, FORMS, strict=True), *itertools.pairwise(FORMS)]
    said = {pair: both(*pair) for pair in pairs}
    assert [pair for pair, (original, ours) in said.items() if (ours == "equivalent") != original] == []
    assert sum(original for original, _ in said.values()) > len(FORMS)
