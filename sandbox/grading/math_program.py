"""Runs inside the jail: whether two texts are the same mathematics, by math-verify.

Read as text by `math.py`; only `fused_compute_score.py`, in the jail too, imports it. One line of JSON comes on stdin,
one word goes to stdout.

It does what `math_verify.parse` and `verify` do, with the same result, for less. The texts are what they say they are,
so the search for an answer in a reply is left out: its expressions cost more than the rest and can take quadratic time.
So are the alarms; the jail has a limit that holds. The parser first predicts by the short way of ANTLR (SLL), which
gives the result of the long one or an error, and then the long one is taken.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Any

from antlr4.atn.PredictionMode import PredictionMode
from latex2sympy2_extended import NormalizationConfig, normalize_latex
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq
from sympy import Basic, Integer, MatrixBase, nan, zoo

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
    """What it means, if anything; of a chain of equations that means nothing the last side, as math-verify has it."""
    parts = dict.fromkeys((text, get_last_eq(text)))
    tries = ((part, mode) for part in parts for mode in (PredictionMode.SLL, PredictionMode.LL))
    return next((found for part, mode in tries if (found := read(part, mode)) is not None), None)


def read(text: str, mode: Any) -> Basic | MatrixBase | None:
    """What the parser makes of it in one of its ways."""
    try:
        return Reader(text, mode).parse(text)
    except RecursionError:
        raise
    except Exception:  # noqa: BLE001 - the parser raises what it likes
        return None


class Reader(_Latex2Sympy):  # type: ignore[misc] # which is the jail's
    """The parser of math-verify, which predicts in one of the two ways."""

    def __init__(self, text: str, mode: Any) -> None:
        super().__init__(is_real=not should_treat_as_complex(text), convert_degrees=False)
        self.mode = mode

    def create_parser(self, text: str) -> Any:
        """For this text."""
        parser = super().create_parser(text)
        parser._interp.predictionMode = self.mode
        return parser

    def parse_number(self, text: str) -> Any:
        """A whole number at once; sympy would make Python code of it and evaluate that."""
        return Integer(text) if text.isascii() and text.isdigit() else super().parse_number(text)


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
