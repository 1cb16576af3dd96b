"""One generation: prepare, load the cached prefix, run the model's own `generate` with arranged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.generation.batching import MicroBatcher
    from invariant_rag.generation.kv_cache import CacheStats, KeyValueCache
    from invariant_rag.generation.lazy import LazyModel
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.outputs import Generation, Usage
    from invariant_rag.generation.overflow import Overflow
    from invariant_rag.generation.prepare import PreparedPrompt
    from invariant_rag.generation.streaming import TextStream

_HOMES = {
    "CacheStats": "kv_cache",
    "Generation": "outputs",
    "InvariantModel": "model",
    "KeyValueCache": "kv_cache",
    "LazyModel": "lazy",
    "MicroBatcher": "batching",
    "Overflow": "overflow",
    "PreparedPrompt": "prepare",
    "TextStream": "streaming",
    "Usage": "outputs",
}

__all__ = [
    "CacheStats",
    "Generation",
    "InvariantModel",
    "KeyValueCache",
    "LazyModel",
    "MicroBatcher",
    "Overflow",
    "PreparedPrompt",
    "TextStream",
    "Usage",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
