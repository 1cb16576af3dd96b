"""The errors of this package. The others come from `invariant_rag.errors`; all derive from `InvariantRAGError`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

from invariant_rag.errors import ContextOverflow, InvariantRAGError, OrderWarning
from langchain_core.exceptions import ContextOverflowError

__all__ = ["DISTRIBUTION", "InvariantContextOverflowError", "OrderWarning", "UnknownParameter", "langchain_errors"]

DISTRIBUTION = "langchain-invariant-rag"
"""The distribution whose extras `ExtraRequired` names."""


class InvariantContextOverflowError(ContextOverflow, ContextOverflowError):
    """A prompt does not fit into the context window. LangChain's middleware and fallbacks know its second base."""


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise errors for which LangChain has a class of its own as that class too."""
    try:
        yield
    except ContextOverflowError:
        raise
    except ContextOverflow as error:
        raise InvariantContextOverflowError(str(error), hint=error.hint) from error


class UnknownParameter(InvariantRAGError, TypeError):
    """A keyword that a model does not have; the message names similar ones.

    >>> print(UnknownParameter("ChatInvariant", ["model_id"], ["model", "model_name", "seed"]))
    ChatInvariant has no parameter 'model_id'; did you mean 'model' or 'model_name'?
    """

    hint = (
        "Keywords of transformers' `generate` belong into `generation_kwargs`, those of `from_pretrained` into "
        "`model_kwargs`."
    )

    def __init__(self, owner: str, unknown: Sequence[str], known: Iterable[str]) -> None:
        names = list(known)
        sentences = []
        for name in unknown:
            near = " or ".join(map(repr, get_close_matches(name, names, n=2)))
            sentences.append(f"{owner} has no parameter {name!r}" + (f"; did you mean {near}?" if near else ""))
        super().__init__("\n".join(sentences))
