"""Evaluation: audits of a system, order checks, metrics and statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.result import Audit
    from invariant_rag.evaluation.metrics import best_subspan_em, exact_match, token_f1
    from invariant_rag.evaluation.order_check import OrderCheck, check_order

_HOMES = {
    "Audit": "audit.result",
    "OrderCheck": "order_check",
    "best_subspan_em": "metrics",
    "check_order": "order_check",
    "exact_match": "metrics",
    "token_f1": "metrics",
}

__all__ = [
    "Audit",
    "OrderCheck",
    "best_subspan_em",
    "check_order",
    "exact_match",
    "token_f1",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
