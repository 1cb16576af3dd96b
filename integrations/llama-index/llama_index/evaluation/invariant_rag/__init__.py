"""An evaluator of LlamaIndex that compares two answers with the library's judge."""

from llama_index.evaluation.invariant_rag.base import InvariantPairwiseEvaluator

__all__ = ["InvariantPairwiseEvaluator"]
