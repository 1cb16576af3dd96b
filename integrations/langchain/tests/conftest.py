"""Tiny random models: what they write means nothing, and is the same for every order of the segments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.testing import tiny_model, toy_tokenizer
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache
from transformers import PreTrainedModel

from langchain_invariant_rag import ChatInvariant

from .tool_models import TEMPLATE

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LANGSMITH_TRACING", "false")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def weights() -> PreTrainedModel:
    """A tiny random Llama with room for the toy tokenizer's vocabulary and long prompts; it never ends by itself."""
    return tiny_model("llama", num_hidden_layers=2, vocab_size=261, max_position_embeddings=4096, eos_token_id=None)


@pytest.fixture(scope="session")
def lm(weights: PreTrainedModel) -> InvariantModel:
    """The `InvariantModel` that the models under test wrap."""
    return InvariantModel(weights, toy_tokenizer())


@pytest.fixture(scope="session")
def spoken(weights: PreTrainedModel) -> InvariantModel:
    """The tiny model, with a chat template that knows tools."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return InvariantModel(weights, tokenizer)


@pytest.fixture(scope="module")
def thinker(spoken: InvariantModel) -> ChatInvariant:
    """A chat model of it."""
    return ChatInvariant(model=spoken, max_tokens=110, sort_segments=False)


@pytest.fixture
def llm_cache() -> Iterator[Any]:
    """LangChain's cache in memory, for one test."""
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)
