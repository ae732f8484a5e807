"""Ranges of versions, as npm's semver has them: what Piston's callers say for the version that they want.

A range is alternatives, `||` between them; an alternative is comparators that must all hold, or `1.2 - 2.3`. A
comparator is an operator and a version whose last parts may be missing or `x`. Each is an interval here, from a first
version up to one that is out. Pre-releases (`1.2.3-rc.1`) are not known, and a range that has one matches nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

Version: TypeAlias = tuple[int, int, int]

#: npm's own bound; what a range costs grows with the square of its length.
MOST_CHARACTERS = 256

_LEAST: Version = (0, 0, 0)
_PARTIAL = r"[v=\s]*(\d{1,9}|[xX*])(?:\.(\d{1,9}|[xX*]))?(?:\.(\d{1,9}|[xX*]))?"
_COMPARATOR = re.compile(rf"\s*(\^|~>?|[<>]=?|=|){_PARTIAL}(?=\s|$)")
_HYPHEN = re.compile(rf"\s*{_PARTIAL}\s+-\s+{_PARTIAL}\s*")


class _Interval(NamedTuple):
    first: Version
    end: Version | None  # None: no end

    def __contains__(self, version: object) -> bool:
        assert isinstance(version, tuple)
        return self.first <= version and (self.end is None or version < self.end)


_ALL = _Interval(_LEAST, None)
_NOTHING = _Interval(_LEAST, _LEAST)


def parse_version(text: str) -> Version:
    """The three numbers at the head of a version, as `(3, 13, 1)`."""
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    return int(match[1]), int(match[2]), int(match[3])


def satisfies(version: Version, wanted: str) -> bool:
    """Whether a version lies in a range. A text that is no range, or longer than one may be, has none in it."""
    if len(wanted) > MOST_CHARACTERS:
        return False
    return any(_holds(version, alternative) for alternative in wanted.split("||"))


def _holds(version: Version, alternative: str) -> bool:
    intervals = _intervals(alternative)
    return intervals is not None and all(version in interval for interval in intervals)


def _intervals(alternative: str) -> list[_Interval] | None:
    if hyphen := _HYPHEN.fullmatch(alternative):
        return [_interval(">=", hyphen.groups()[:3]), _interval("<=", hyphen.groups()[3:])]
    found = []
    at = 0
    while alternative[at:].strip():
        comparator = _COMPARATOR.match(alternative, at)
        if comparator is None:
            return None
        found.append(_interval(comparator[1], comparator.groups()[1:]))
        at = comparator.end()
    return found


def _interval(operator: str, partial: tuple[str | None, ...]) -> _Interval:
    given: list[int] = []
    for part in partial:
        if part is None or not part.isdigit():
            break
        given.append(int(part))
    if not given:
        return _NOTHING if operator in {"<", ">"} else _ALL
    first, after = _filled(given), _after(given)
    intervals = {
        ">=": _Interval(first, None),
        ">": _Interval(after, None),
        "<": _Interval(_LEAST, first),
        "<=": _Interval(_LEAST, after),
        "~": _Interval(first, _after(given[:2])),
        "^": _Interval(first, _after(given[: _leading(given)])),
    }
    return intervals.get(operator.replace("~>", "~"), _Interval(first, after))


def _filled(given: list[int]) -> Version:
    major, minor, patch = [*given, 0, 0][:3]
    return major, minor, patch


def _after(given: list[int]) -> Version:
    """The first version that does not begin with these numbers."""
    return _filled([*given[:-1], given[-1] + 1])


def _leading(given: list[int]) -> int:
    """How many numbers `^` holds fast: up to the first that is not 0."""
    return next((place for place, number in enumerate(given, 1) if number), len(given))
