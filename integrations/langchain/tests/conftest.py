"""Tiny random models: what they write means nothing, and is the same for every order of the segments."""

import os

import pytest
from framework_cases import base_url, lm, spoken  # noqa: F401 - fixtures
from langchain_core.caches import InMemoryCache
from langchain_core.globals import set_llm_cache

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LANGSMITH_TRACING", "false")


@pytest.fixture
def llm_cache():
    """LangChain's cache in memory, for one test."""
    cache = InMemoryCache()
    set_llm_cache(cache)
    yield cache
    set_llm_cache(None)
