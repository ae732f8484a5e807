"""Ranges of versions: what npm's semver says of the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.semver import parse_version, satisfies

IN = """
* x X 3 3.x 3.X.x v3 =3 3.13 3.13.x 3.13.1 =3.13.1 v3.13.1
^3 ^3.10 ^3.13.1 ~3 ~3.13 ~3.13.0 ~>3.13 >=3.8 >3.12 <4 <=3 <=3.13 <=3.13.1 >=3 >3.13.0 >3
"""
OUT = "2 4 3.12 3.13.2 ^2 ^4 ^3.14 ~3.12 ~3.13.2 >3.13 >3.13.1 <3.13.1 <3 <=3.12 <=3.13.0 <* >* >=4"
NONE = [">=3 " * 100, "latest", "3.13.1-rc.1", "3.13.1.2", "3..1", "3.13 &", ">= ", "-3", "3.13.1 -", "1e3"]


def holds(wanted: str, version: str = "3.13.1") -> bool:
    return satisfies(parse_version(version), wanted)


def test_single_comparators() -> None:
    """Each operator, with whole versions and with parts of them."""
    assert [one for one in IN.split() if not holds(one) and one != ">3"] == []
    assert [one for one in OUT.split() if holds(one)] == []
    assert not holds(">3"), "which begins at 4.0.0"


def test_several() -> None:
    """All comparators of an alternative hold, or one alternative of several; a hyphen has both ends in."""
    for wanted in [
        ">=3.8 <4",
        ">= 3.8 < 4",
        "2 || 3",
        "2||3",
        "3.10 - 3.13",
        "3.13.1 - 4",
        "",
        " 3.x ",
        "<3 || >=3.13.1",
    ]:
        assert holds(wanted), wanted
    for wanted in [">=3.8 <3.13", "2 || 4", "3.10 - 3.12", "3.13.2 - 4", ">=3.8 latest"]:
        assert not holds(wanted), wanted


def test_the_caret_holds_what_leads() -> None:
    """`^` holds fast up to the first number that is not 0."""
    assert holds("^0.2.3", "0.2.9")
    assert not holds("^0.2.3", "0.3.0")
    assert not holds("^0.0.3", "0.0.4")
    assert holds("^0.0", "0.0.9")
    assert not holds("^0.0", "0.1.0")
    assert holds("^0.x", "0.9.9")
    assert not holds("^0.x", "1.0.0")


@pytest.mark.parametrize("wanted", NONE)
def test_what_is_no_range_matches_nothing(wanted: str) -> None:
    """A text that is no range, and one with a pre-release, is of no version."""
    assert not holds(wanted)


@given(st.text("0123456789.xX*<>=~^|- v", max_size=30))
def test_any_text_has_an_answer(wanted: str) -> None:
    """Nothing that a caller writes is an error."""
    assert satisfies((3, 13, 1), wanted) in {True, False}


@given(*[st.tuples(*[st.integers(0, 3)] * 3)] * 3)
def test_an_interval_is_what_lies_between(version, low, high) -> None:
    """`>=a <b` says what the numbers say."""
    a, b = (".".join(map(str, one)) for one in (low, high))
    assert satisfies(version, f">={a} <{b}") == (low <= version < high)
    assert satisfies(version, f"{a} - {b}") == (low <= version <= high)
    assert satisfies(version, f">{a} || <={b}") == (version > low or version <= high)
