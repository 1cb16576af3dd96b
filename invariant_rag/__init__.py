"""invariant-rag: answers that do not depend on the order in which documents happen to be listed.

Public names are loaded on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from invariant_rag.audit import audit
    from invariant_rag.batching import MicroBatcher
    from invariant_rag.cache import KeyValueCache
    from invariant_rag.engine import Generation, InvariantModel
    from invariant_rag.ensembles import (
        AttentionSorting,
        ContextualCalibration,
        PermutationAverage,
        RingAverage,
        SelfConsistency,
    )
    from invariant_rag.judge import Judge, Verdict
    from invariant_rag.pipeline import RAG, Answer
    from invariant_rag.routing import RoutedModel
    from invariant_rag.segments import Prompt, Segment, SegmentSet

__version__ = "0.1.0"

_HOMES = {
    "Answer": "pipeline",
    "AttentionSorting": "ensembles",
    "ContextualCalibration": "ensembles",
    "Generation": "engine",
    "InvariantModel": "engine",
    "Judge": "judge",
    "KeyValueCache": "cache",
    "MicroBatcher": "batching",
    "PermutationAverage": "ensembles",
    "Prompt": "segments",
    "RAG": "pipeline",
    "RingAverage": "ensembles",
    "RoutedModel": "routing",
    "Segment": "segments",
    "SegmentSet": "segments",
    "SelfConsistency": "ensembles",
    "Verdict": "judge",
    "audit": "audit",
}

__all__ = [
    "RAG",
    "Answer",
    "AttentionSorting",
    "ContextualCalibration",
    "Generation",
    "InvariantModel",
    "Judge",
    "KeyValueCache",
    "MicroBatcher",
    "PermutationAverage",
    "Prompt",
    "RingAverage",
    "RoutedModel",
    "Segment",
    "SegmentSet",
    "SelfConsistency",
    "Verdict",
    "__version__",
    "audit",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
