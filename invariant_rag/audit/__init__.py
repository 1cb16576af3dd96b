"""Audit a system: does it depend on the order of its documents, by how much, and what helps?

The package is the function, too: `invariant_rag.audit(system, questions)`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.audit.calls import Endpoint, SystemReply
    from invariant_rag.audit.order_check import OrderCheck, check_order
    from invariant_rag.audit.plan import AuditChoices
    from invariant_rag.audit.questions import Question
    from invariant_rag.audit.result import ABOUT, Audit
    from invariant_rag.audit.run import audit
    from invariant_rag.audit.statistics import Estimate

__all__ = ["ABOUT", "Audit", "AuditChoices", "Endpoint", "Estimate", "OrderCheck", "Question", "SystemReply", "audit",
           "check_order"]  # fmt: skip

_MODULES = "result result plan calls statistics order_check questions calls run order_check".split()
__getattr__, __dir__ = lazy_exports(__name__, dict(zip(__all__, _MODULES, strict=True)))


class _CallablePackage(ModuleType):
    """Importing any module of a package makes the package an attribute of its parent: `audit` must stay callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> Audit:
        result: Audit = self.audit(*args, **kwargs)
        return result


sys.modules[__name__].__class__ = _CallablePackage
