"""Runs inside the jail: whether two texts are the same mathematics, by math-verify.

Read as text by `math.py`; only `fused_compute_score.py`, in the jail too, imports it. One line of JSON comes on stdin,
one word goes to stdout.

The texts are what they say they are, so math-verify's search for an answer in a reply is left out: its expressions for
that cost more than the rest and can take quadratic time. Its alarms are left out too; the jail has a limit that holds.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from latex2sympy2_extended import NormalizationConfig, normalize_latex
from math_verify import verify
from math_verify.parser import parse_latex_cached
from sympy import Basic, MatrixBase, nan, zoo

#: As math-verify's own, but that the box is off already.
NORMAL = NormalizationConfig(
    basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
)


def main() -> None:
    """Say it, and end without the tidying that only a long-lived process needs."""
    logging.disable()
    asked = json.loads(sys.stdin.readline())
    os.write(1, f"{compare(asked['gold'], asked['answer'], asked['tolerance'])}\n".encode())
    os._exit(0)


def compare(gold_text: str, answer_text: str, tolerance: float | None) -> str:
    """One of the words that `math.py` knows."""
    gold_text, answer_text = normal(gold_text), normal(answer_text)
    gold, answer = parsed(gold_text), parsed(answer_text)
    if gold is None or answer is None:
        if gold_text.casefold() == answer_text.casefold() and "\\" not in gold_text:
            return "equivalent"
        return "gold_unparsable" if gold is None else "answer_unparsable"
    if gold is nan or gold is zoo:  # which nothing can be held against
        return "gold_unparsable"
    if verify([gold], [answer], timeout_seconds=0) or are_near(gold, answer, tolerance):
        return "equivalent"
    return "different"


def normal(text: str) -> str:
    """The text as math-verify parses it, with Python's power."""
    normal: str = normalize_latex(text.replace("**", "^"), NORMAL)
    return normal


def parsed(text: str) -> Basic | MatrixBase | None:
    """What it means, if anything."""
    try:
        return parse_latex_cached(text)
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001 - the parser raises what it likes
        return None


def are_near(gold: Basic | MatrixBase, answer: Basic | MatrixBase, tolerance: float | None) -> bool:
    """Whether these are two numbers which differ by at most this share of the first."""
    if tolerance is None or not (is_number(gold) and is_number(answer)):
        return False
    return bool(abs((answer - gold).evalf()) <= tolerance * abs(gold.evalf()))


def is_number(value: Basic | MatrixBase) -> bool:
    """Whether it is one finite real number."""
    return bool(getattr(value, "is_number", False)) and bool(value.is_finite) and bool(value.is_extended_real)


if __name__ == "__main__":
    main()
