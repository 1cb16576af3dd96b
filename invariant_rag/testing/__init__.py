"""For authors of methods, orderings and adapters: tiny models, a toy tokenizer, and the laws as a test kit."""

from __future__ import annotations

from invariant_rag.testing.contracts import MethodContract
from invariant_rag.testing.families import FAMILIES, tiny_model
from invariant_rag.testing.tiny_models import random_prompt, toy_tokenizer

__all__ = ["FAMILIES", "MethodContract", "random_prompt", "tiny_model", "toy_tokenizer"]
