"""Conditions that fail a build: `order-matters`, or a measure that is on the wrong side of a bound beyond doubt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invariant_rag.errors import InvalidChoice

if TYPE_CHECKING:
    from invariant_rag.audit.result import Audit

MEASURES = ("net-sensitivity", "accuracy-today", "accuracy-over-orders", "worst-slot", "errors")
_BOUND = re.compile(r"\s*([a-z-]+)\s*([<>])\s*(\d{1,3}(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Gate:
    """A condition: `order-matters` (without a measure), or a measure above or below a bound, which is a share."""

    text: str
    measure: str = ""
    above: bool = True
    bound: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Parse a condition.

        >>> Gate.parse("net-sensitivity>5%").bound
        0.05
        """
        if text.strip() == "order-matters":
            return cls(text)
        found = _BOUND.fullmatch(text)
        if not found or found[1] not in MEASURES:
            raise InvalidChoice(
                f"fail-on: expected order-matters, or a bound such as net-sensitivity>5%, got {text!r}",
                hint=f"Measures are {', '.join(MEASURES)}. A flip rate is no gate: it grows with noise and with calls.",
            )
        return cls(text, found[1], found[2] == ">", float(found[3]) / 100)

    def holds(self, audit: Audit) -> bool:
        """Return whether it holds beyond doubt: the whole interval is on the wrong side of the bound."""
        if not self.measure:
            return audit.order_matters
        estimate = audit.measures.get(self.measure.replace("-", "_"))
        if estimate is None:
            raise InvalidChoice(f"fail-on: {self.measure} is not known", hint="It takes questions with gold answers.")
        return estimate.low > self.bound if self.above else estimate.high < self.bound
