"""CapCal: subtract a judge's preference for some labels, measured on options without content (arXiv 2604.10150)."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from invariant_rag.checks import check_items
from invariant_rag.errors import InvalidChoice
from invariant_rag.shown import shown

PLACEHOLDER = "This is a placeholder passage for bias testing"
"""The published placeholder (`main.py` in USTC-StarTeam/CapCal)."""

MIN_OPTIONS = 2
"""With fewer, there is nothing to prefer."""


@dataclass(frozen=True)
class CapCal:
    """Content-agnostic probability calibration of a judge that scores letters (arXiv 2604.10150).

    The judge is asked a second time, with every option replaced by the same text. What it still prefers then is a
    preference for a label or a place. Of n options, i gets

        S_i = P_i - strength (E_i - 1 / n)

    with its probability P_i, and E_i of its label where all options are equal. The paper ranks by S; here, a negative
    one counts as 0, and they are divided by their sum. P and E are normalised over the labels first, since 1 / n is
    what an unbiased model gives only then. The published code does not do so, and it ranks step by step: it calibrates
    the remaining options again after every choice.

    Calibration changes what is preferred, not whether the order matters: a `Judge` has no order with or without it.

    Args:
        strength: How much of the preference is subtracted: a number, 1 in the published code, or `adaptive`: the more,
            the less certain the judge is. As in the published code, that is 5 H(P) / log n, at most 2, with the
            entropy H.
        placeholder: The text of every option when the judge is asked again.

    Raises:
        InvalidChoice: `strength` is neither `adaptive` nor a finite number from 0 on.
    """

    strength: float | Literal["adaptive"] = 1.0
    placeholder: str = PLACEHOLDER

    def __post_init__(self) -> None:
        number: Any = self.strength
        if isinstance(number, str) and number == "adaptive":
            return
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number <= sys.float_info.max:
            raise InvalidChoice(f'strength: expected "adaptive" or a finite number from 0 on, got {shown(number)}')

    def calibrate(self, logprobs: Sequence[float], empty: Sequence[float]) -> list[float]:
        """Return the calibrated probability of each option; they sum to one.

        Args:
            logprobs: Log-probability of the label of each option, two options or more.
            empty: The same where every option is the placeholder.

        >>> [
        ...     round(each, 9)
        ...     for each in CapCal().calibrate([math.log(0.3), math.log(0.7)], [math.log(0.2), math.log(0.8)])
        ... ]
        [0.6, 0.4]
        """
        logprobs, empty = check_items("logprobs", logprobs, Real), check_items("empty", empty, Real)
        for name, values in (("logprobs", logprobs), ("empty", empty)):
            if not MIN_OPTIONS <= len(values) == len(logprobs):
                raise InvalidChoice(f"{name}: expected a number for each of two options or more, got {len(values)}")
        given, preferred, count = _normalised(logprobs), _normalised(empty), len(logprobs)
        strength = _adaptive_strength(given) if self.strength == "adaptive" else self.strength
        scores = [max(p - strength * (e - 1 / count), 0.0) for p, e in zip(given, preferred, strict=True)]
        total = math.fsum(scores)
        return [score / total for score in scores]


def _normalised(logprobs: Sequence[float]) -> list[float]:
    """Return probabilities that sum to one."""
    largest = max(logprobs)
    weights = [math.exp(each - largest) for each in logprobs]
    total = math.fsum(weights)
    return [each / total for each in weights]


def _adaptive_strength(probabilities: Sequence[float]) -> float:
    """Return the strength for this certainty, from 0 to 2 (`get_dynamic_rate` in the published code)."""
    entropy = -math.fsum(p * math.log(p) for p in probabilities if p)
    return min(5 * entropy / math.log(len(probabilities)), 2.0)
