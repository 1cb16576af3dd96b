"""Checks of the arguments of `InvariantLLM` and of its calls, before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from invariant_rag.errors import UnknownParameter, UnsupportedModel
from invariant_rag.methods import resolve_method
from invariant_rag.orderings import resolve_ordering

_FOR_DOCUMENTS = frozenset({"docs", "documents", "nodes", "segments"})
"""Keywords that mean documents elsewhere."""


def check_model(model: object) -> None:
    """Raise UnsupportedModel if the model is neither a name nor an `InvariantModel`."""
    if model is None or isinstance(model, str | Path):
        return
    from invariant_rag import InvariantModel  # models of a server need no torch

    if not isinstance(model, InvariantModel):
        raise UnsupportedModel(
            f"expected a hub id, a folder or an InvariantModel, got {type(model).__name__}",
            hint="Wrap a model of transformers: InvariantModel(model, tokenizer).",
        )


def check_parameters(given: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise UnknownParameter if a keyword is no parameter."""
    known = set(parameters)
    if unknown := sorted(set(given) - known):
        hint = f"`max_new_tokens` is `max_tokens` here. {UnknownParameter.hint}"
        raise UnknownParameter("InvariantLLM", unknown, known, hint=hint)


def check_call_keywords(given: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise UnknownParameter if a keyword of a call is no parameter, and none of transformers' `generate` either."""
    listed = sorted(parameters)
    if unknown := sorted(set(given) - set(listed) - _generate_keywords()):
        hint = f"A call takes {', '.join(listed)}, and the keywords of transformers' `generate`."
        if _FOR_DOCUMENTS.intersection(unknown):
            hint = "Documents are part of what is asked: SegmentBlocks of a ChatMessage, or nodes of a query engine."
        raise UnknownParameter("a call", unknown, {*listed, *_generate_keywords()}, hint=hint)


@cache
def _generate_keywords() -> frozenset[str]:
    """Return the keywords of transformers' `generate`: those of its signature and of a generation configuration."""
    from transformers import GenerationConfig, GenerationMixin

    named = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    return frozenset(named | {name for name in vars(GenerationConfig()) if not name.startswith("_")})


def check_names(method: str, ordering: str | None, backend: str) -> None:
    """Raise UnknownName if there is no such method, ordering or backend."""
    from invariant_rag.attention import resolve_backend

    resolve_ordering(ordering, resolve_method(method).default_ordering)
    resolve_backend(backend)
