"""An evaluator that compares two answers in one call."""

from llama_index.evaluation.invariant_rag.base import InvariantPairwiseEvaluator

__all__ = ["InvariantPairwiseEvaluator"]
