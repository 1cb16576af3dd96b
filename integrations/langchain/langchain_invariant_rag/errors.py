"""Errors of this package. The others are those of `invariant_rag.errors`; all derive from `InvariantRAGError`."""

from __future__ import annotations

from invariant_rag.errors import InvariantRAGError, UnsupportedCombination

DISTRIBUTION = "langchain-invariant-rag"
"""The distribution whose extras `ExtraRequired` names."""


class InvalidSchema(InvariantRAGError, ValueError):
    """A schema that cannot be followed token by token."""

    hint = "Give a Pydantic class, a TypedDict, or a JSON schema of an object."


class ToolsNotCalled(UnsupportedCombination, NotImplementedError):
    """Tools were given to a model that does not call tools."""

    hint = "Give the model what the tool would find: see InvariantRAGMiddleware and SegmentsPlaceholder."

    def __init__(self) -> None:
        super().__init__("expected a call without tools: this model does not call them")
