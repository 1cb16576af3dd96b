"""Checks of the keywords of `InvariantLLM` and of its calls, before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from invariant_rag.errors import UnknownParameter, UnsupportedModel

if TYPE_CHECKING:
    from invariant_rag import InvariantModel

_FOR_DOCUMENTS = frozenset({"docs", "documents", "nodes", "segments"})
"""Keywords that mean documents elsewhere."""


def model_in_memory(model: str | Path | InvariantModel | None) -> InvariantModel | None:
    """Return a model that is loaded; None for a name.

    Raises:
        UnsupportedModel: It is neither a name nor an `InvariantModel`.
    """
    if model is None or isinstance(model, str | Path):
        return None
    from invariant_rag import InvariantModel  # models of a server need no torch

    if not isinstance(model, InvariantModel):
        raise UnsupportedModel(
            f"expected a hub id, a folder or an InvariantModel, got {type(model).__name__}",
            hint="Wrap a model of transformers: InvariantModel(model, tokenizer).",
        )
    return model


def check_parameters(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownParameter if a keyword is no field."""
    if unknown := sorted(set(given).difference(known)):
        hint = f"`max_new_tokens` is `max_tokens` here. {UnknownParameter.hint}"
        raise UnknownParameter("InvariantLLM", unknown, known, hint=hint)


def check_call_keywords(given: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise UnknownParameter if a keyword of a call is no parameter, and none of transformers' `generate` either."""
    known = _generate_keywords().union(parameters)
    if unknown := sorted(set(given) - known):
        hint = f"A call takes {', '.join(sorted(parameters))}, and the keywords of transformers' `generate`."
        if _FOR_DOCUMENTS.intersection(unknown):
            hint = "Documents are part of what is asked: SegmentBlocks of a ChatMessage, or nodes of a query engine."
        raise UnknownParameter("a call", unknown, known, hint=hint)


@cache
def _generate_keywords() -> frozenset[str]:
    """Return the keywords of transformers' `generate`: those of its signature and of a generation configuration."""
    from transformers import GenerationConfig, GenerationMixin

    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    return frozenset(named | {name for name in vars(GenerationConfig()) if not name.startswith("_")})
