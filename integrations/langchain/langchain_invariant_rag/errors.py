"""The errors of this package. The others come from `invariant_rag.errors`; all derive from `InvariantRAGError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from invariant_rag.errors import ContextOverflow, OrderWarning, UnknownParameter
from langchain_core.exceptions import ContextOverflowError

__all__ = ["DISTRIBUTION", "InvariantContextOverflowError", "OrderWarning", "UnknownParameter", "langchain_errors"]

DISTRIBUTION = "langchain-invariant-rag"  # whose extras `ExtraRequired` names


class InvariantContextOverflowError(ContextOverflow, ContextOverflowError):
    """A prompt does not fit into the context window. LangChain's middleware and fallbacks know its second base."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise errors for which LangChain has a class of its own as that class too."""
    try:
        yield
    except ContextOverflow as error:
        raise InvariantContextOverflowError(str(error), hint=error.hint) from error
