"""The error of this package. The others come from `invariant_rag.errors`; all derive from `InvariantRAGError`."""

from __future__ import annotations

from invariant_rag.errors import UnsupportedCombination

DISTRIBUTION = "langchain-invariant-rag"
"""The distribution whose extras `ExtraRequired` names."""


class ToolsNotCalled(UnsupportedCombination, NotImplementedError):
    """Tools were given to a model that does not call tools."""

    hint = "Give the model what the tool would find: see InvariantRAGMiddleware and SegmentsPlaceholder."

    def __init__(self) -> None:
        super().__init__("expected a call without tools: this model does not call them")
