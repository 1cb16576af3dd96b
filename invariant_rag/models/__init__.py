"""Load causal LMs and embedding models, from the hub, from a folder or from the package itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.models.embedded import EMBEDDED, model_card
    from invariant_rag.models.embedders import load_embedder
    from invariant_rag.models.hub import hub_reachable
    from invariant_rag.models.loading import load_model

__all__ = ["EMBEDDED", "hub_reachable", "load_embedder", "load_model", "model_card"]

_MODULES = "embedded hub embedders loading embedded".split()
__getattr__, __dir__ = lazy_exports(__name__, dict(zip(__all__, _MODULES, strict=True)))
