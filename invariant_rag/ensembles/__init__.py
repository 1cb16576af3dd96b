"""Ensembles: several forward passes over one prompt, combined into one answer.

| ensemble | invariant | prefills per prompt |
|---|---|---|
| `PermutationAverage` | if the model's ordering is by content | one per permutation |
| `RingAverage` | the same | one |
| `SelfConsistency` | the same; with sampling, for a fixed seed | one per permutation |
| `AttentionSorting` | the same | one per round, plus one |
| `ContextualCalibration` | if its scorer is | one per content-free text, plus one |
| `ContextExperts` | always | one per segment, plus one |

Permutations start from the model's own ordering. So with `lexical`, even random permutations depend only on the set and
the seed; with `given`, every ensemble but `ContextExperts` depends on the input order. Approaches that need one prefill
are methods: see `invariant_rag.methods`.
"""

from __future__ import annotations

from invariant_rag.ensembles.attention_sorting import AttentionSorting, segment_attention
from invariant_rag.ensembles.base import Cost, EnsembleGeneration, Scores
from invariant_rag.ensembles.calibration import ContextualCalibration, blank_segments
from invariant_rag.ensembles.experts import ContextExperts
from invariant_rag.ensembles.permutations import PermutationAverage, SelfConsistency, VotedGeneration
from invariant_rag.ensembles.ring_average import RingAverage

__all__ = [
    "AttentionSorting",
    "ContextExperts",
    "ContextualCalibration",
    "Cost",
    "EnsembleGeneration",
    "PermutationAverage",
    "RingAverage",
    "Scores",
    "SelfConsistency",
    "VotedGeneration",
    "blank_segments",
    "segment_attention",
]
