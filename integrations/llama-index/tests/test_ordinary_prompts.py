"""Prompts without retrieved nodes raise no warning about order, whatever they look like."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
from cases import QUERY, ListRetriever, nodes_of
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from invariant_rag.testing.ordinary_prompts import ORDINARY
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.llms.mock import MockLLM

from llama_index.llms.invariant_rag import InvariantLLM, canonical, vote

assert len(ORDINARY) >= 200
WRAPPERS = ("InvariantLLM", "canonical", "vote")


@pytest.fixture
def llms(model: InvariantModel) -> dict[str, LLM]:
    return {
        "InvariantLLM": InvariantLLM(model.with_method(overflow="trim_segments"), max_tokens=1),
        "canonical": canonical(MockLLM()),
        "vote": vote(MockLLM()),
    }


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", OrderWarning)
        yield


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_ordinary_conversation_raises_no_warning(llms: dict[str, LLM], wrapper: str) -> None:
    ListRetriever(nodes_of()).retrieve(QUERY)  # somebody has just retrieved something else
    for conversation in ORDINARY:
        llms[wrapper].chat([ChatMessage(each["content"], role=each["role"]) for each in conversation])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_ordinary_text_raises_no_warning(llms: dict[str, LLM], wrapper: str) -> None:
    ListRetriever(nodes_of()).retrieve(QUERY)
    for conversation in ORDINARY:
        llms[wrapper].complete("\n\n".join(each["content"] for each in conversation))
