"""Which part of a reply is taken for its answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.grading.extract import MOST_ANSWER, How, extract, last_boxed

ALL: tuple[How, ...] = ("answer_tags", "last_boxed", "last_number")

FOUND = [
    ("last_boxed", r"so \boxed{6}, no, wait: \boxed{5}", "5"),
    ("last_boxed", r"\boxed{\frac{1}{2}} is it", r"\frac{1}{2}"),
    ("last_boxed", r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    ("last_boxed", r"\boxed{a\\{b}}", r"a\\{b}"),
    ("last_boxed", r"\boxed {7}", "7"),
    ("last_boxed", r"\boxed{\boxed{8}}", "8"),
    ("last_boxed", r"\boxed{9} and then \boxed{1", "9"),
    ("last_boxed", r"\boxed{9} and \boxed", "9"),
    ("last_boxed", r"\boxed{3} \boxed 4", "3"),
    ("last_boxed", r"\boxed{", None),
    ("last_boxed", r"\boxed{2}" + r"\boxed{" * 50, "2"),
    ("last_boxed", r"\boxed{2}" + r"\boxed{" * 500, None),
    ("last_boxed", r"\boxed{  }", None),
    ("last_boxed", r"5", None),
    ("last_boxed", "\\boxed{" + "x" * (MOST_ANSWER + 1) + "}", None),
    ("answer_tags", "<answer>4</answer> <answer> 5 </answer> 6", "5"),
    ("answer_tags", r"<think>\boxed{1}</think><answer>It is \boxed{2}.</answer>", "2"),
    ("answer_tags", "<answer>4</answer> <answer>5", "4"),
    ("answer_tags", "</answer>4<answer>", None),
    ("answer_tags", r"\boxed{1}", None),
    ("last_number", "of 12 apples 1,234.50 are left.", "1,234.50"),
    ("last_number", "x2 = -3", "-3"),
    ("last_number", "5-3", "3"),
    ("last_number", "about 3/4 of it", "3/4"),
    ("last_number", r"it is -\frac{3}{4}.", r"-\frac{3}{4}"),
    ("last_number", "up by 15%", "15%"),
    ("last_number", "It is .5", ".5"),
    ("last_number", "1,2,3", "3"),
    ("last_number", "It is \N{MINUS SIGN}5.", "\N{MINUS SIGN}5"),
    ("last_number", r"\frac12", r"\frac12"),
    ("last_number", "5 / 6 of it", "5 / 6"),
    ("last_number", "It is 5! Of 2^3 it is 5", "5"),
    ("last_number", r"90^\circ", "90"),
    ("last_number", "1/2/3", None),
    ("last_number", "10^5", None),
    ("last_number", "10^{-5}", None),
    ("last_number", r"5\sqrt{2}", None),
    ("last_number", "1.5e3", None),
    ("last_number", "at 12:30", None),
    ("last_number", "2^n", None),
    ("last_number", "none at all", None),
    ("last_number", "9" * 10_000, None),
    ("whole", "  3 cm ", "3 cm"),
    ("whole", r"\boxed{3}", "3"),
    ("whole", " ", None),
]


@pytest.mark.parametrize(("how", "reply", "answer"), FOUND)
def test_each_way_takes_what_it_says(how: How, reply: str, answer: str | None) -> None:
    """The table above: the last counts, what is not whole does not, and nothing found is nothing."""
    found = extract(reply, (how,))
    assert (found and found.text) == answer


@pytest.mark.parametrize(
    ("reply", "how"),
    [
        (r"1 \boxed{2} <answer>3</answer> 4", "answer_tags"),
        (r"<answer></answer> \boxed{2} 4", "last_boxed"),
        ("nothing but 4", "last_number"),
        ("nothing", None),
    ],
)
def test_the_first_way_that_finds_one_counts(reply: str, how: How | None) -> None:
    """The ways are asked in order, and the answer says which it was."""
    found = extract(reply, ALL)
    assert (found and found.how) == how


def test_boxes_never_closed_are_not_looked_through_for_long() -> None:
    """Behind them the last box that is closed is found as long as they hold few braces, and none is from there on."""
    for braces, found in ((40, "2"), (4000, None)):
        assert last_boxed(r"\boxed{2}" + (r"\boxed{" + "{}" * braces) * 20) == found


@pytest.mark.parametrize(
    "piece", ["\\boxed{", "\\boxed{{", "\\boxed ", "{", "}", "<answer>", "\\", "1,", "1/", "-", "$"]
)
def test_hostile_replies_take_linear_time(piece: str) -> None:
    """Eight million characters of one piece are read within the test's time limit, whatever the piece."""
    reply = piece * (8_000_000 // len(piece))
    for how in (*ALL, "whole"):
        extract(reply, (how,))


BRACED = st.recursive(st.text("ab\\{} ", max_size=3).filter(lambda text: "{" not in text and "}" not in text and not text.endswith("\\")),
                      lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"))  # fmt: skip


@given(st.text(), BRACED, st.text(" .a5", max_size=5))
def test_a_box_holds_what_its_braces_do(before: str, content: str, behind: str) -> None:
    """Whatever stands before it, and however its braces nest."""
    assert last_boxed(f"{before} \\boxed{{{content}}}{behind}") == content
