"""Audit a system: does it depend on the order of its documents, by how much, and what helps?

The package is the function, too: `invariant_rag.audit(system, questions)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.audit.choices import AuditChoices
    from invariant_rag.audit.metrics import best_subspan_em, exact_match, token_f1
    from invariant_rag.audit.order_check import OrderCheck, check_order
    from invariant_rag.audit.questions import Question
    from invariant_rag.audit.result import ABOUT, Audit
    from invariant_rag.audit.run import audit
    from invariant_rag.audit.statistics import Estimate
    from invariant_rag.audit.systems import Endpoint, Reply

_HOMES = {
    "ABOUT": "result",
    "Audit": "result",
    "AuditChoices": "choices",
    "Endpoint": "systems",
    "Estimate": "statistics",
    "OrderCheck": "order_check",
    "Question": "questions",
    "Reply": "systems",
    "audit": "run",
    "best_subspan_em": "metrics",
    "check_order": "order_check",
    "exact_match": "metrics",
    "token_f1": "metrics",
}

__all__ = [
    "ABOUT",
    "Audit",
    "AuditChoices",
    "Endpoint",
    "Estimate",
    "OrderCheck",
    "Question",
    "Reply",
    "audit",
    "best_subspan_em",
    "check_order",
    "exact_match",
    "token_f1",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)


class _CallablePackage(ModuleType):
    """Importing any module of a package makes the package an attribute of its parent: `audit` must stay callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Audit:
        result: Audit = self.audit(*args, **kwargs)
        return result


sys.modules[__name__].__class__ = _CallablePackage
