"""A node postprocessor that keeps the boundaries of nodes in LlamaIndex's own response modes."""

from llama_index.postprocessor.invariant_rag.base import MarkedNode, SegmentMarkerPostprocessor

__all__ = ["MarkedNode", "SegmentMarkerPostprocessor"]
