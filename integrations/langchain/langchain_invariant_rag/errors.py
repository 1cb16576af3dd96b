"""Errors of this package. The rest come from `invariant_rag.errors`; all derive from `InvariantRAGError`."""

from __future__ import annotations

from invariant_rag.errors import InvariantRAGError, UnsupportedCombination


class MissingPackage(InvariantRAGError, ImportError):
    """A package that only one feature needs is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"expected the package {package}, which is not installed",
            hint=f'pip install "langchain-invariant-rag[{extra}]"',
        )


class InvalidSchema(InvariantRAGError, ValueError):
    """A schema that cannot be followed token by token."""

    hint = "Give a Pydantic class, a TypedDict, or a JSON schema of an object."


class ToolsNotCalled(UnsupportedCombination, NotImplementedError):
    """Tools were given to a model that does not call them."""

    hint = "Give the model what the tool would find: see InvariantRAGMiddleware and SegmentsPlaceholder."

    def __init__(self) -> None:
        super().__init__("expected a call without tools: this model does not call them")
