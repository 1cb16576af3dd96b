"""One generation: prepare, load the cached prefix, run the model's own `generate` with arranged attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.generation.answering import Answering
    from invariant_rag.generation.answers import AnswerRequest
    from invariant_rag.generation.batching import MicroBatcher
    from invariant_rag.generation.kv_cache import CacheStats, KeyValueCache
    from invariant_rag.generation.lazy import LazyModel
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.outputs import Generation, Usage
    from invariant_rag.generation.prepare import Overflow, PreparedPrompt
    from invariant_rag.generation.streaming import TextStream
    from invariant_rag.generation.structured import constrain, generate_structured

_HOMES = {
    "AnswerRequest": "answers",
    "Answering": "answering",
    "CacheStats": "kv_cache",
    "Generation": "outputs",
    "InvariantModel": "model",
    "KeyValueCache": "kv_cache",
    "LazyModel": "lazy",
    "MicroBatcher": "batching",
    "Overflow": "prepare",
    "PreparedPrompt": "prepare",
    "TextStream": "streaming",
    "Usage": "outputs",
    "constrain": "structured",
    "generate_structured": "structured",
}

__all__ = [
    "AnswerRequest",
    "Answering",
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
    "constrain",
    "generate_structured",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
