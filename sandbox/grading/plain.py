r"""Equal texts and plain numbers, without a jail: most answers are one or the other.

It is exact, linear, and may only say what math-verify would say too; a test compares the two. Whatever is not plain is
left to it.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BARE = re.compile(r"\\(?:left|right)(?=[\[(|)\]\\])|\\displaystyle(?![A-Za-z])|\\!")
_FRAC = re.compile(r"\\[dt]frac(?![A-Za-z])")
_ENDS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("", "."))
_MOST_DIGITS = 60
_WHOLE = rf"(?:[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+|[0-9]{{1,{_MOST_DIGITS}}})"
_NUMBER = re.compile(
    rf"([-+]?)(?:({_WHOLE})|({_WHOLE}?\.[0-9]{{1,{_MOST_DIGITS}}})"
    rf"|([0-9]{{1,{_MOST_DIGITS}}})/([0-9]{{1,{_MOST_DIGITS}}})"
    rf"|\\frac\{{([0-9]{{1,{_MOST_DIGITS}}})\}}\{{([0-9]{{1,{_MOST_DIGITS}}})\}})"
)
#: math-verify compares decimals after rounding to six places: what is further apart than this is apart for it too,
#: as long as a double holds all digits.
_APART = Fraction(2, 10**6)
_DOUBLE_DIGITS = 14


def tidy(text: str) -> str:
    r"""The same without what means nothing: spaces, dollars, a last full stop, a first plus, `\left`."""
    text = _FRAC.sub(r"\\frac", _BARE.sub("", text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")))
    text = " ".join(text.split())
    for opening, closing in _ENDS * 2:
        inside = text[len(opening) : len(text) - len(closing)]
        if (
            text.startswith(opening)
            and text.endswith(closing)
            and inside
            and not ("$" in opening and "$" in inside)
        ):
            text = inside.strip()
    return text.removeprefix("+")


def compare_numbers(gold: str, answer: str, tolerance: float | None) -> bool | None:
    """Whether two tidy texts are the same number; None where they are not plain numbers, or it is too close to say."""
    a, b = _number(gold), _number(answer)
    if a is None or b is None:
        return None
    apart = abs(a - b)
    if apart == 0 or (tolerance is not None and apart <= Fraction(tolerance) * abs(a)):
        return True
    if "." not in gold + answer:
        return False
    if apart > _APART and max(map(_digits, (gold, answer))) <= _DOUBLE_DIGITS:
        return False
    return None


def _digits(text: str) -> int:
    return sum(character.isdigit() for character in text)


def _number(text: str) -> Fraction | None:
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimal, *ratio = match.groups()
    if whole or decimal:
        value = Fraction((whole or decimal).replace(",", ""))
    else:
        above, below = (int(part) for part in ratio if part)
        if below == 0:
            return None
        value = Fraction(above, below)
    return -value if sign == "-" else value
