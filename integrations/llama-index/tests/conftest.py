"""A tiny random model. Nothing here needs a network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import llama_index.core
import pytest
import torch
from invariant_rag import InvariantModel, KeyValueCache, server
from invariant_rag.prompts import begin_outside
from invariant_rag.server.serving import in_thread, server_of
from invariant_rag.testing import tiny_model, toy_tokenizer
from llama_index.core import Settings
from tiny import TEMPLATE
from transformers import PreTrainedModel

from llama_index.llms.invariant_rag import InvariantLLM

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_settings() -> Iterator[None]:
    """Leave no global LLM, embedding, tokenizer or callbacks behind, and nothing that was retrieved for no LLM."""
    yield
    begin_outside().retrievals = []
    llama_index.core.global_tokenizer = None
    Settings._callback_manager = None
    Settings._llm = None
    Settings._embed_model = None


@pytest.fixture(scope="session")
def weights() -> PreTrainedModel:
    return tiny_model("llama", num_hidden_layers=2, vocab_size=261, max_position_embeddings=4096, eos_token_id=None)


@pytest.fixture(scope="session")
def model(weights: PreTrainedModel) -> InvariantModel:
    return InvariantModel(weights, toy_tokenizer())


@pytest.fixture(scope="session")
def spoken(weights: PreTrainedModel) -> InvariantModel:
    """The tiny model with a chat template that knows tools."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return InvariantModel(weights, tokenizer)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory, model: InvariantModel) -> Path:
    """The tiny model, saved."""
    place = tmp_path_factory.mktemp("tiny")
    model.model.save_pretrained(place)
    model.tokenizer.save_pretrained(place)
    return place


@pytest.fixture
def llm(model: InvariantModel) -> InvariantLLM:
    return InvariantLLM(model, max_tokens=8)


@pytest.fixture
def plain_llm(model: InvariantModel) -> InvariantLLM:
    """The same weights, read in the order given: what every test of invariance must tell apart."""
    return InvariantLLM(model.with_method("sequential", ordering="given"), max_tokens=8)


@pytest.fixture(scope="session")
def embedded() -> InvariantModel:
    """The model that the server runs."""
    return InvariantModel.from_pretrained()


@pytest.fixture(scope="session")
def base_url(embedded: InvariantModel) -> Iterator[str]:
    """The address of a running server."""
    engine = server.InProcess(embedded, "small", caches={"": KeyValueCache()})
    with in_thread(server_of(server.create_app(engine), server.Settings(), "127.0.0.1", 0)) as url:
        yield f"{url}/v1"
