"""Whether a rollout's answer is right, under the name by which rStar2-Agent's reward programs import it.

This runs inside of the jail, as `fused_compute_score/__init__.py` beside such a program and the modules that it
imports here. A box counts, or what stands in answer tags, as that trainer's prompt demands, and never just some number.
"""

from __future__ import annotations

from .extract import MOST_ANSWER, extract, last_boxed
from .plain import compare_numbers, tidy


def compute_score(model_output: str, ground_truth: str) -> float:
    """1.0 for a right answer, else 0.0."""
    found = extract(str(model_output), ("answer_tags", "last_boxed"))
    if found is None or len(found.text) > MOST_ANSWER:
        return 0.0
    gold, answer = tidy(last_boxed(str(ground_truth)) or str(ground_truth)), tidy(found.text)
    if gold == answer:
        return 1.0
    same = compare_numbers(gold, answer, None)
    return float(_is_equivalent(gold, answer) if same is None else same)


def _is_equivalent(gold: str, answer: str) -> bool:
    from .math_program import compare  # noqa: PLC0415 - it imports far more than the rest needs

    return compare(gold, answer, None) == "equivalent"
