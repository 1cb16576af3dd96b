"""Does my system depend on the order of its documents? By how much? What helps?"""

from __future__ import annotations

from invariant_rag.evaluation.audit.auditing import Audit, audit
from invariant_rag.evaluation.audit.bootstrap import Estimate
from invariant_rag.evaluation.audit.measures import ABOUT
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.systems import Reply

__all__ = ["ABOUT", "Audit", "Estimate", "Question", "Reply", "audit"]
