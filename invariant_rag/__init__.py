"""invariant-rag: answers that do not depend on the order in which documents happen to be listed.

Public names are imported on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag._lazy import lazy_exports

if TYPE_CHECKING:
    from invariant_rag.audit import audit
    from invariant_rag.ensembles import (
        AttentionSorting,
        ContextExperts,
        ContextualCalibration,
        PermutationAverage,
        RingAverage,
        SelfConsistency,
    )
    from invariant_rag.generation.batching import MicroBatcher
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.outputs import Generation
    from invariant_rag.judge import Judge, Verdict
    from invariant_rag.prompts.tokenization import Trusted
    from invariant_rag.rag.pipeline import RAG, Answer
    from invariant_rag.remote import RemoteModel
    from invariant_rag.routing import RoutedModel
    from invariant_rag.segments import Prompt, Segment, SegmentSet

__version__ = "0.2.0"

_HOMES = {
    "ensembles": "AttentionSorting ContextExperts ContextualCalibration PermutationAverage RingAverage SelfConsistency",
    "audit": "audit",
    "generation.batching": "MicroBatcher",
    "generation.kv_cache": "KeyValueCache",
    "generation.model": "InvariantModel",
    "generation.outputs": "Generation",
    "judge": "Judge Verdict",
    "prompts.tokenization": "Trusted",
    "rag.pipeline": "RAG Answer",
    "remote": "RemoteModel",
    "routing": "RoutedModel",
    "segments": "Prompt Segment SegmentSet",
}

__all__ = [
    "RAG",
    "Answer",
    "AttentionSorting",
    "ContextExperts",
    "ContextualCalibration",
    "Generation",
    "InvariantModel",
    "Judge",
    "KeyValueCache",
    "MicroBatcher",
    "PermutationAverage",
    "Prompt",
    "RemoteModel",
    "RingAverage",
    "RoutedModel",
    "Segment",
    "SegmentSet",
    "SelfConsistency",
    "Trusted",
    "Verdict",
    "__version__",
    "audit",
]

__getattr__, __dir__ = lazy_exports(__name__, {name: home for home in _HOMES for name in _HOMES[home].split()})
