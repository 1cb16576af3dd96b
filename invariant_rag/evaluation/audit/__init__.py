"""Audit a system: does it depend on the order of its documents, by how much, and what helps?"""

from __future__ import annotations

from invariant_rag.evaluation.audit.auditing import audit
from invariant_rag.evaluation.audit.choices import AuditChoices
from invariant_rag.evaluation.audit.endpoint import Endpoint
from invariant_rag.evaluation.audit.measures import ABOUT
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.result import Audit
from invariant_rag.evaluation.audit.systems import Reply
from invariant_rag.evaluation.statistics import Estimate

__all__ = ["ABOUT", "Audit", "AuditChoices", "Endpoint", "Estimate", "Question", "Reply", "audit"]
