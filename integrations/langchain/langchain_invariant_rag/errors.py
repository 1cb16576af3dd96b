"""The errors of this package. The others come from `invariant_rag.errors`; all derive from `InvariantRAGError`."""

from __future__ import annotations

from invariant_rag.errors import ContextOverflow, OrderWarning, UnknownParameter
from langchain_core.exceptions import ContextOverflowError

__all__ = ["DISTRIBUTION", "InvariantContextOverflowError", "OrderWarning", "UnknownParameter"]

DISTRIBUTION = "langchain-invariant-rag"  # whose extras `ExtraRequired` names


class InvariantContextOverflowError(ContextOverflow, ContextOverflowError):
    """A prompt does not fit into the context window. LangChain's middleware and fallbacks know its second base."""

    @classmethod
    def of(cls, error: ContextOverflow) -> InvariantContextOverflowError:
        """Return an error of the core as one that LangChain knows, too."""
        return cls(str(error), hint=error.hint)
