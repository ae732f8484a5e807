"""Plain numbers and tidy texts. `test_math_verify.py` holds what is said of numbers against math-verify."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.grading.plain import compare_numbers, tidy


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("5", "5.0", True),
        ("007", "7", True),
        ("1,000", "1000", True),
        ("1,000", "1.000", False),
        ("-0", "0", True),
        ("1/2", ".5", True),
        (r"-\frac{3}{4}", "-0.75", True),
        (r"\frac{10}{4}", "5/2", True),
        ("3", "4", False),
        ("1/3", "0.3333", False),
        ("1/3", "0.333333", None),
        ("123456789012345.1", "123456789012345.2", None),
        ("9" * 60, "9" * 60 + ".0", True),
        ("9" * 61, "9" * 61 + ".0", None),
        ("1/0", "1/0", None),
        ("50%", "0.5", None),
        ("1e3", "1000", None),
        ("1 2", "12", None),
        ("٣", "3", None),
        ("x", "3", None),
        ("", "3", None),
    ],
)
def test_plain_numbers(gold: str, answer: str, same: bool | None) -> None:
    """Exact where it is plain, and nothing said where it is not."""
    assert compare_numbers(gold, answer, None) is same


@pytest.mark.parametrize(
    ("gold", "answer", "tolerance", "same"),
    [
        ("100", "101", 0.01, True),
        ("100", "101.0001", 0.01, False),
        ("-100", "-99", 0.01, True),
        ("0", "0.001", 0.01, False),
        ("3", "3", 0.0, True),
        ("2/3", "0.667", 0.001, True),
    ],
)
def test_a_tolerance_is_a_share_of_the_gold(gold: str, answer: str, tolerance: float, same: bool) -> None:
    """To the bound, and of the reference's size, so that nothing is near zero."""
    assert compare_numbers(gold, answer, tolerance) is same


@pytest.mark.parametrize(
    ("text", "tidied"),
    [
        (" $5$ ", "5"),
        ("$$ 5 $$.", "5"),
        (r"\(x\)", "x"),
        (r"\[ x \]", "x"),
        ("5.", "5"),
        ("$5$ and $6$", "$5$ and $6$"),
        (r"\dfrac{1}{2}", r"\frac{1}{2}"),
        (r"\left( 1,  2 \right)", "( 1, 2 )"),
        (r"\left. x \right|", r"\left. x |"),
        (r"\leftarrow", r"\leftarrow"),
        ("1{,}000", "1,000"),
        ("\N{MINUS SIGN}3", "-3"),
        ("$", "$"),
        (".", "."),
        ("", ""),
    ],
)
def test_tidying_leaves_the_meaning(text: str, tidied: str) -> None:
    """What goes away are wrappings, and what stays is as it was."""
    assert tidy(text) == tidied


@given(st.text("$.\\()[]{},5x \n"))
def test_tidying_never_fails(text: str) -> None:
    """Whatever a model writes."""
    assert isinstance(tidy(text), str)
