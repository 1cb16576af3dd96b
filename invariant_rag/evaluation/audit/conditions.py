"""Conditions on an audit, such as `flip-rate>5%`, at which a check in continuous integration fails."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.evaluation.audit.measures import ABOUT, COSTS
from invariant_rag.evaluation.audit.result import Audit

ERRORS = "errors"
"""The share of failed calls, which is no measure of the system's answers."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
_FORM = re.compile(r"\s*([a-z][a-z_-]*)\s*(>=|<=|>|<)\s*(\d+(?:\.\d+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Condition:
    """A comparison of a measure of the system as it is with a number.

    Attributes:
        text: As it was written.
        measure: Name of the measure, or `errors`.
        comparison: `>`, `<`, `>=` or `<=`.
        limit: The number.
    """

    text: str
    measure: str
    comparison: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Parse a condition.

        >>> Condition.parse("flip-rate > 5%")
        Condition(text='flip-rate > 5%', measure='flip_rate', comparison='>', limit=0.05)

        Raises:
            InvalidChoice: It is no comparison with a number, or with a number that the measure cannot have.
            UnknownName: There is no such measure.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise InvalidChoice(
                f"expected a condition, got {text!r}", hint='Write it as "flip-rate>5%" or "today<0.8".'
            )
        name, comparison, number, percent = found.groups()
        measure = name.replace("-", "_")
        if measure not in {ERRORS, *ABOUT}:
            raise UnknownName("measure", name, [each.replace("_", "-") for each in (ERRORS, *ABOUT)])
        limit = float(number) / (100 if percent else 1)
        if measure not in COSTS and limit > 1:
            raise InvalidChoice(
                f"{name} is at most 1: expected a limit up to that, or in percent, got {text!r}",
                hint=f'Write "{name}{comparison}{number}%".' if not percent else "The most is 100%.",
            )
        return cls(text, measure, comparison, limit)

    def value(self, result: Audit) -> float:
        """Return the measure of an audit.

        Raises:
            UnsupportedCombination: The audit has no such measure: it needs gold answers, or pairs.
        """
        if self.measure == ERRORS:
            return result.failures.share
        estimate = result.measured[0].measures.get(self.measure)
        if estimate is None:
            raise UnsupportedCombination(
                f"{self.text!r}: these questions have no measure {self.measure!r}",
                hint="Most measures need gold answers.",
            )
        return estimate.value

    def holds(self, result: Audit) -> bool:
        """Whether an audit is to fail."""
        return _COMPARISONS[self.comparison](self.value(result), self.limit)
