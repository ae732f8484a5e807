"""What is decided without a jail, against math-verify itself."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox.grading.plain import compare_numbers, tidy
from sandbox.settings import load_settings

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
def math_verify(_jail_runtime: None) -> Iterator[subprocess.Popen[str]]:
    """The real one, of the runtime that programs get. The texts are ours, so it needs no jail here."""
    python = load_settings().jail.runtime / "root" / "python"
    process = subprocess.Popen(
        [python / "bin" / "python3", Path(__file__).with_name("math_verify.py")],
        env={
            "LD_LIBRARY_PATH": str(python / "lib"),
            "PYTHONPATH": str(python / "site"),
            "PYTHONSAFEPATH": "1",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    with process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(NUMBERS, NUMBERS, st.booleans())
def test_what_is_decided_here_is_what_math_verify_says(
    math_verify: subprocess.Popen[str], gold: str, answer: str, near: bool
) -> None:
    """Of numbers, equal ones in other forms among them: never another verdict, and few are left to it."""
    if near:
        answer = gold.replace(",", "")
    gold, answer = tidy(gold), tidy(answer)
    ours = compare_numbers(gold, answer, None)
    if ours is not None:
        assert math_verify.stdin is not None
        assert math_verify.stdout is not None
        math_verify.stdin.write(json.dumps([gold, answer]) + "\n")
        assert json.loads(math_verify.stdout.readline()) == ours, (gold, answer)


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
