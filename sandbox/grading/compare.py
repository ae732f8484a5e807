"""Whether what a program printed is what was expected.

Both texts may be megabytes, and one is a stranger's. So everything here takes time that is linear in their size: no
pattern goes back, and no number is made of digits without a bound on how many.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field


class Numbers(BaseModel):
    """As `numbers`, with this tolerance: at most `absolute + relative * |expected|` between two numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    relative: float = Field(default=1e-6, ge=0, allow_inf_nan=False)
    absolute: float = Field(default=1e-6, ge=0, allow_inf_nan=False)

    def are_near(self, value: float, expected: float) -> bool:
        """Whether a number will do. A NaN is near a NaN, and an infinity near the same one."""
        if value == expected or (math.isnan(value) and math.isnan(expected)):
            return True
        if math.isinf(value) or math.isinf(expected):
            return False
        return abs(value - expected) <= self.absolute + self.relative * abs(expected)


#: By words: to the letter; without white space at both ends and at the ends of lines; word by word; word by word with
#: numbers compared as such; line by line in any order.
Comparison: TypeAlias = Literal["exact", "stripped", "tokens", "numbers", "unordered_lines"] | Numbers


def matches(output: str, expected: str, comparison: Comparison) -> bool:
    """Whether an output will do where another was expected."""
    if output == expected:
        return True
    if comparison == "numbers":
        comparison = Numbers()
    if isinstance(comparison, Numbers):
        return _numbers_match(output.split(), expected.split(), comparison)
    form = _FORMS[comparison]
    return form(output) == form(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().split("\n")]


_FORMS: Mapping[str, Callable[[str], object]] = {
    "exact": str,
    "stripped": _lines,
    "tokens": str.split,
    "unordered_lines": lambda text: Counter(_lines(text)),
}


def _numbers_match(output: list[str], expected: list[str], tolerance: Numbers) -> bool:
    if len(output) != len(expected):
        return False
    return all(_words_match(word, wanted, tolerance) for word, wanted in zip(output, expected, strict=True))


def _words_match(word: str, expected: str, tolerance: Numbers) -> bool:
    """Two whole numbers must be the same, however long; else one of them is a fraction, and a tolerance holds."""
    if word == expected:
        return True
    if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(expected):
        return _digits(word) == _digits(expected)
    value, wanted = _number(word), _number(expected)
    if value is None or wanted is None:
        return False
    return tolerance.are_near(value, wanted)


_INTEGER = re.compile(r"[+-]?[0-9]++")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]++(?:\.[0-9]*+)?|\.[0-9]++)(?:[eE][+-]?[0-9]++)?")
_WORD = re.compile(r"([+-]?)(nan|inf|infinity)", re.IGNORECASE)
#: The largest float has 309 digits; to read far longer ones would not be linear.
_LONGEST = 400


def _digits(word: str) -> tuple[bool, str]:
    digits = word.lstrip("+-").lstrip("0")
    return word.startswith("-") and digits != "", digits


def _number(word: str) -> float | None:
    """A word as a number, None if it is none: too long, or beyond what a float can say."""
    if len(word) > _LONGEST:
        return None
    if _WORD.fullmatch(word):
        return float(word)
    if not _DECIMAL.fullmatch(word):
        return None
    value = float(word)
    return None if math.isinf(value) else value
