"""Test utilities: tiny random models, a toy tokenizer and a test suite for methods; an assertion for any system."""

from __future__ import annotations

from invariant_rag.testing.contracts import MethodContract
from invariant_rag.testing.families import FAMILIES, tiny_model
from invariant_rag.testing.order_invariance import assert_order_invariant
from invariant_rag.testing.toy_inputs import random_prompt, toy_tokenizer

__all__ = ["FAMILIES", "MethodContract", "assert_order_invariant", "random_prompt", "tiny_model", "toy_tokenizer"]
