"""Tiny random models: what they write means nothing, and is the same for every order of the segments."""

import os

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.server import InProcess, Settings, create_app
from invariant_rag.server.serving import in_thread, server_of
from invariant_rag.testing import toy_tokenizer
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

from .models import spoken_model, tiny_weights

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LANGSMITH_TRACING", "false")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def lm():
    """The `InvariantModel` that the models under test wrap."""
    return InvariantModel(tiny_weights(), toy_tokenizer())


@pytest.fixture(scope="session")
def spoken():
    """The same model, with a chat template that knows tools."""
    return spoken_model()


@pytest.fixture(scope="session")
def base_url():
    """The address of a server that runs the embedded model."""
    app = create_app(InProcess(InvariantModel.from_pretrained(), "small"))
    with in_thread(server_of(app, Settings(), "127.0.0.1", 0)) as url:
        yield f"{url}/v1"


@pytest.fixture
def llm_cache():
    """LangChain's cache in memory, for one test."""
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)
