"""What is the same answer, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.grading.compare import Comparison, Numbers, matches

WORDS: tuple[Comparison, ...] = ("exact", "stripped", "tokens", "numbers", "unordered_lines")
BIG = "9" * 1_000_000

SAME: list[tuple[Any, str, str]] = [
    ("exact", "a b\n", "a b\n"),
    ("stripped", "\n  1 \r\n2\t\n\n", "1\n2"),
    ("stripped", "", " \n"),
    ("tokens", "1  2\n\t3", "1 2 3\n"),
    ("tokens", "a\u00a0b", "a b"),
    ("numbers", "1.0000001 x", "1 x"),
    ("numbers", "+007 -0", "7 0"),
    ("numbers", "1e3 .5 5.", "1000 0.5 5"),
    ("numbers", "NaN -inf Infinity", "nan -INF inf"),
    ("numbers", "1000000.5", "1000001.4"),
    ("numbers", "1e25", "10000000000000000000000001"),
    ("numbers", "0" + BIG, BIG),
    (Numbers(relative=0, absolute=0.25), "1.25", "1"),
    (Numbers(relative=0.1, absolute=0), "-11.0", "-10"),
    ("unordered_lines", "b \na\n", "a\nb"),
]
DIFFERENT: list[tuple[Any, str, str]] = [
    ("exact", "a b", "a b\n"),
    ("stripped", "a  b", "a b"),
    ("stripped", "1\n\n2", "1\n2"),
    ("stripped", "1\n 2", "1\n2"),
    ("tokens", "1.0", "1"),
    ("tokens", "1 2", "12"),
    ("numbers", "1000001", "1000000"),
    ("numbers", "9007199254740993", "9007199254740992"),
    ("numbers", BIG + "8", BIG + "7"),
    ("numbers", "1e999", "inf"),
    ("numbers", "inf", "-inf"),
    ("numbers", "nan", "1"),
    ("numbers", "1_0", "10.0"),
    ("numbers", "\u0661.0", "1.0"),
    ("numbers", "0x10", "16.0"),
    ("numbers", "1 2", "1"),
    ("numbers", "1.0 ", "x"),
    (Numbers(relative=0, absolute=0), "1.0000001", "1"),
    ("unordered_lines", "a\na\nb", "a\nb\nb"),
    ("unordered_lines", "a b", "b a"),
]


@pytest.mark.parametrize(("comparison", "output", "expected"), SAME)
def test_the_same(comparison: Comparison, output: str, expected: str) -> None:
    """These outputs will do."""
    assert matches(output, expected, comparison)


@pytest.mark.parametrize(("comparison", "output", "expected"), DIFFERENT)
def test_different(comparison: Comparison, output: str, expected: str) -> None:
    """These outputs will not do."""
    assert not matches(output, expected, comparison)


@given(st.text("01.e+-nainf \n\r\t", max_size=30), st.text("01.e+-nainf \n\r\t", max_size=30))
def test_what_is_looser_takes_more(output: str, expected: str) -> None:
    """Each way of comparing takes itself, and whatever a stricter one takes."""
    taken = [matches(output, expected, way) for way in ("exact", "stripped", "tokens", "numbers")]
    assert taken == sorted(taken)
    assert all(matches(output, output, way) for way in WORDS)


@given(
    st.floats() | st.integers(-(2**53), 2**53).map(float),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_numbers_are_read_as_python_writes_them(value: float, expected: float) -> None:
    """A printed float means what it was, within the tolerance around what was expected."""
    near = abs(value - expected) <= 1e-6 + 1e-6 * abs(expected)
    assert matches(repr(value), repr(expected), "numbers") == near


@pytest.mark.parametrize("hostile", [BIG, "1." + BIG, "1e" + BIG, "-" * 1_000_000, "." * 1_000_000])
@pytest.mark.parametrize("comparison", WORDS)
def test_a_megabyte_of_digits_is_compared(comparison: Comparison, hostile: str) -> None:
    """What would take minutes as a number, or by a pattern that goes back, ends within the test's time."""
    assert matches(hostile, hostile + " ", comparison) == (comparison != "exact")
    assert not matches(hostile, "1.5", comparison)
