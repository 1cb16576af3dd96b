"""A response synthesizer that passes all nodes to the LLM in one call, as a set."""

from llama_index.response_synthesizers.invariant_rag.base import InvariantSynthesizer

__all__ = ["InvariantSynthesizer"]
