r"""Which part of a model's reply is its answer.

A reply is a stranger's text of any length. Each way takes time linear in it, looks from its end, since what was said
last counts, and never asks a regular expression to try twice.

`answer_tags`  what stands between the last `</answer>` and the `<answer>` before it, or the last box in there
`last_boxed`   what the last `\boxed{...}` holds. A box that is never closed, as where a reply was cut, is none
`last_number`  the last number: digits with thousands' commas, a decimal part, a fraction (`3/4`, `\frac{3}{4}`), %.
               One that is a part of something else, as in `10^5`, is none
`whole`        all of it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

How = Literal["answer_tags", "last_boxed", "last_number", "whole"]

#: Characters of an answer. A box that is longer is none, and no grader is asked about a longer text.
MOST_ANSWER = 4096
#: Where the last number is looked for.
_LAST_CHARACTERS = 4096

#: Boxes never closed behind the last one that is: more are no slip of a model.
_MOST_OPEN = 100
#: Braces that are looked at in all of them together: a service reads a thousand replies at a time.
_MOST_BRACES = 2 * MOST_ANSWER
_OPENS, _CLOSES, _BOX = "<answer>", "</answer>", "\\boxed"
_BRACE = re.compile(r"\\boxed\s*+\{")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = r"(?:[1-9]\d{0,2}(?:,\d{3})++(?!\d)|\d++)(?:\.\d++)?"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)}}\]])[-+\u2212]|(?<![\w.]))"
    rf"(?:\\[dt]?frac(?:\{{\d++\}}|\d){{2}}|(?:{_DIGITS}|\.\d++)(?: ?/ ?\d++)?+(?:\s?\\?%)?)"
)
#: Of what is more than a number: powers, indices, roots, ratios, times, 1e5.
_BEFORE = re.compile(r"(?:[\^_]\{?|\\sqrt(?:\[\d\])?\{|\d:|\d ?/ ?)$")
_AFTER = re.compile(r"[eE][-+]?\d|\s*+\^(?!\{?\\circ)|:\d")
_LONGEST_BEFORE = 10


class Extracted(NamedTuple):
    """An answer, and the way that found it."""

    text: str
    how: How


def extract(reply: str, ways: Sequence[How]) -> Extracted | None:
    """The answer by the first of these ways that finds one."""
    for how in ways:
        if (text := _WAYS[how](reply)) is not None and (text := text.strip()):
            return Extracted(text, how)
    return None


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds; of a box inside of a box the inner one."""
    end = len(text)
    counts = iter(range(_MOST_BRACES))
    for _ in range(_MOST_OPEN):
        if (start := text.rfind(_BOX, 0, end)) < 0:
            return None
        # Behind `end` begins a box that is never closed, so nothing that is open there ever is.
        if (content := _box_at(text, start, end, counts)) is not None:
            return content
        end = start
    return None


def _box_at(text: str, start: int, end: int, counts: Iterator[int]) -> str | None:
    opening = _BRACE.match(text, start, end)
    if opening is None:
        return None
    depth = 1
    braces = _BRACES.finditer(text, opening.end(), min(end, opening.end() + MOST_ANSWER + 1))
    for brace, _ in zip(braces, counts, strict=False):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return text[opening.end() : brace.start()]
    return None


def _answer_tags(reply: str) -> str | None:
    end = reply.rfind(_CLOSES)
    start = reply.rfind(_OPENS, 0, end) if end >= 0 else -1
    if start < 0:
        return None
    content = reply[start + len(_OPENS) : end]
    box = last_boxed(content)
    return content if box is None else box


def _last_number(reply: str) -> str | None:
    text = reply[-_LAST_CHARACTERS:]
    numbers = list(_NUMBER.finditer(text))
    if not numbers or (numbers[-1].start() == 0 and len(reply) > _LAST_CHARACTERS):
        return None  # of one that begins before the last characters we do not know where
    last = numbers[-1]
    before = text[max(0, last.start() - _LONGEST_BEFORE) : last.start()]
    return None if _BEFORE.search(before) or _AFTER.match(text, last.end()) else last[0]


def _whole(reply: str) -> str | None:
    box = last_boxed(reply)
    return reply if box is None else box


_WAYS: Mapping[How, Callable[[str], str | None]] = {
    "answer_tags": _answer_tags,
    "last_boxed": last_boxed,
    "last_number": _last_number,
    "whole": _whole,
}
