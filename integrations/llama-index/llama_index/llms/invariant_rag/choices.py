"""Checks of the arguments of `InvariantLLM` and of its calls, before anything is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from invariant_rag.errors import InvariantRAGError, UnsupportedModel
from invariant_rag.methods import resolve_method
from invariant_rag.orderings import resolve_ordering

_FOR_DOCUMENTS = frozenset({"docs", "documents", "nodes", "segments"})
"""Keywords that mean documents elsewhere."""


class UnknownParameter(InvariantRAGError):
    """A keyword is no parameter of `InvariantLLM`, or of one of its calls.

    It is no `TypeError`, which LlamaIndex's response modes take for an answer that cannot be parsed.
    """

    hint = (
        "`max_new_tokens` is `max_tokens` here. Other keywords of transformers' `generate` go into "
        "`generation_kwargs`, those of `from_pretrained` into `model_kwargs`."
    )


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
    known = sorted(parameters)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UnknownParameter(f"unknown parameters {', '.join(unknown)}; choose from {', '.join(known)}")


def check_call_keywords(given: Iterable[str], parameters: Iterable[str]) -> None:
    """Raise UnknownParameter if a keyword of a call is no parameter, and none of transformers' `generate` either."""
    unknown = sorted(set(given) - set(parameters) - _generate_keywords())
    if not unknown:
        return
    if _FOR_DOCUMENTS.intersection(unknown):
        raise UnknownParameter(
            f"unknown keywords of a call: {', '.join(unknown)}",
            hint="Documents are part of what is asked: SegmentBlocks of a ChatMessage, or the nodes of a query engine.",
        )
    known = sorted({*parameters, *_generate_keywords()})
    near = {name: get_close_matches(name, known, n=3) for name in unknown}
    said = [f"{name} (did you mean {' or '.join(near[name])}?)" if near[name] else name for name in unknown]
    raise UnknownParameter(
        f"unknown keywords of a call: {', '.join(said)}",
        hint=f"A call takes {', '.join(sorted(parameters))}, and the keywords of transformers' `generate`.",
    )


@cache
def _generate_keywords() -> frozenset[str]:
    """Return the keywords of transformers' `generate`: those of its signature and of a generation configuration."""
    from transformers import GenerationConfig, GenerationMixin

    signature = inspect.signature(GenerationMixin.generate).parameters
    named = {name for name, each in signature.items() if each.kind is not inspect.Parameter.VAR_KEYWORD}
    return frozenset((named | {name for name in vars(GenerationConfig()) if not name.startswith("_")}) - {"self"})


def check_names(method: str, ordering: str | None, backend: str) -> None:
    """Raise UnknownName if there is no such method, ordering or backend."""
    from invariant_rag.attention import resolve_backend

    resolve_ordering(ordering, resolve_method(method).default_ordering)
    resolve_backend(backend)
