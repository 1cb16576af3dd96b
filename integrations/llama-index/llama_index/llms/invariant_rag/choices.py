"""Checks of the arguments of `InvariantLLM`, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from invariant_rag.errors import InvariantRAGError, UnsupportedModel
from invariant_rag.methods import resolve_method
from invariant_rag.orderings import resolve_ordering


class UnknownParameter(InvariantRAGError):
    """A keyword is no parameter of `InvariantLLM`."""

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


def check_names(method: str, ordering: str | None, backend: str) -> None:
    """Raise UnknownName if there is no such method, ordering or backend."""
    from invariant_rag.attention import resolve_backend

    resolve_ordering(ordering, resolve_method(method).default_ordering)
    resolve_backend(backend)
