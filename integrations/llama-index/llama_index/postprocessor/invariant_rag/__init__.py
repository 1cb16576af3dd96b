"""A node postprocessor that lets LlamaIndex's own response modes keep the boundaries of nodes."""

from llama_index.postprocessor.invariant_rag.base import MarkedNode, SegmentMarkerPostprocessor

__all__ = ["MarkedNode", "SegmentMarkerPostprocessor"]
