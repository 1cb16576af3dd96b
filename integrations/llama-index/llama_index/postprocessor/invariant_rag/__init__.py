"""Node postprocessors: one keeps the boundaries of nodes in LlamaIndex's own response modes, one joins chunks."""

from llama_index.postprocessor.invariant_rag.base import MarkedNode, SegmentMarkerPostprocessor, SourceJoiner

__all__ = ["MarkedNode", "SegmentMarkerPostprocessor", "SourceJoiner"]
