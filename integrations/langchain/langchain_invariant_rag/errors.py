"""The errors of this package. The others come from `invariant_rag.errors`; all derive from `InvariantRAGError`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from invariant_rag.errors import InvariantRAGError, UnsupportedCombination

DISTRIBUTION = "langchain-invariant-rag"
"""The distribution whose extras `ExtraRequired` names."""


class ToolsNotCalled(UnsupportedCombination, NotImplementedError):
    """Tools were given to a model that does not call tools."""

    hint = "Give the model what the tool would find: see InvariantRAGMiddleware and SegmentsPlaceholder."

    def __init__(self) -> None:
        super().__init__("expected a call without tools: this model does not call them")


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
