"""Selective Routing: run the plain and the invariant model, and return one answer (arXiv 2502.08662, section 3.3).

In some prompts the order of the segments carries meaning ("none of the above" as the last option). The router returns
the invariant answer only if that model is more confident than the plain one by a margin. It costs two generations.

The router inherits the order dependence of the plain model: with `plain_order="given"`, as published, the answer may
change with the order of the segments. With `plain_order="canonical"` it does not, but then the plain model cannot use
the input order either.
"""

from invariant_rag.routing.model import PlainOrder, RoutedGeneration, RoutedModel, RoutedScores
from invariant_rag.routing.rule import (
    ALPHA,
    ALPHAS,
    Branch,
    RoutingRecord,
    TunedAlpha,
    candidate_confidence,
    route,
    text_confidence,
    tune_alpha,
)

__all__ = [
    "ALPHA",
    "ALPHAS",
    "Branch",
    "PlainOrder",
    "RoutedGeneration",
    "RoutedModel",
    "RoutedScores",
    "RoutingRecord",
    "TunedAlpha",
    "candidate_confidence",
    "route",
    "text_confidence",
    "tune_alpha",
]
