"""Test utilities for authors of methods and adapters: tiny random models, a toy tokenizer, a method test suite."""

from __future__ import annotations

from invariant_rag.testing.contracts import MethodContract
from invariant_rag.testing.families import FAMILIES, tiny_model
from invariant_rag.testing.toy_inputs import random_prompt, toy_tokenizer

__all__ = ["FAMILIES", "MethodContract", "random_prompt", "tiny_model", "toy_tokenizer"]
