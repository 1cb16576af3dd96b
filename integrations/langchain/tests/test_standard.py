"""LangChain's own suites for chat models, retrievers and embeddings."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from invariant_rag import InvariantModel, Segment
from invariant_rag.rag.retrieval import BM25Retriever
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import BaseTool, tool
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
)
from langchain_tests.integration_tests.chat_models import magic_function, magic_function_no_args, unicode_customer
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

from langchain_invariant_rag import ChatInvariant, InvariantEmbeddings, InvariantRetriever

from .taught import taught


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return "It's sunny."


def greeting_generator() -> BaseTool:
    prompt = ChatPromptTemplate.from_messages([("human", "Hello. Please respond in the style of {answer_style}.")])
    chain = prompt | FakeListChatModel(responses=["hello matey"]) | StrOutputParser()
    return chain.as_tool(
        name="greeting_generator", description="Generate a greeting in a particular style of speaking."
    )


@cache
def engine() -> InvariantModel:
    """A model that knows by heart what the suite of chat models asks tools for."""
    customer = "Create a customer named '{}' ({}) - a {} company".format
    hello = customer("你好啊集团", "Hello Group", "Chinese technology")
    konnichiwa = customer("こんにちは株式会社", "Hello Corporation", "Japanese")
    return taught(
        [
            ("What is the value of magic_function(3)? Use the tool.", [magic_function], {"input": 3}),
            ("What is the value of magic_function_no_args()? Use the tool.", [magic_function_no_args], {}),
            ("What is the weather in San Francisco, CA?", [get_weather], {"location": "San Francisco, CA"}),
            ("Using the tool, generate a Pirate greeting.", [greeting_generator()], {"answer_style": "Pirate"}),
            (hello, [unicode_customer], {"customer_name": "你好啊集团", "description": "technology"}),
            (konnichiwa, [unicode_customer], {"customer_name": "こんにちは株式会社", "description": "Japanese"}),
        ]
    )


@pytest.mark.filterwarnings("ignore:This API is in beta")  # `as_tool`, which the suite calls
class _OurChatModel:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatInvariant

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": engine()}

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_tool_choice(self) -> bool:
        return True


class TestChatInvariantUnit(_OurChatModel, ChatModelUnitTests):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {}  # a model in memory cannot be written down; the one that comes with invariant-rag has a name

    @pytest.mark.xfail(reason="LangChain's allowlist has no packages of others; see test_a_model_can_be_saved")
    def test_serdes(self, model: BaseChatModel, snapshot: Any) -> None:
        super().test_serdes(model, snapshot)


class TestChatInvariantIntegration(_OurChatModel, ChatModelIntegrationTests):
    @property
    def supports_json_mode(self) -> bool:
        return True


class TestInvariantRetriever(RetrieversIntegrationTests):
    @property
    def retriever_constructor(self) -> type[InvariantRetriever]:
        return InvariantRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"retriever": BM25Retriever([Segment(f"The ferry number {n} leaves.") for n in range(5)])}

    @property
    def retriever_query_example(self) -> str:
        return "Which ferry leaves?"


class _OurEmbeddings:
    @property
    def embeddings_class(self) -> type[InvariantEmbeddings]:
        return InvariantEmbeddings


class TestInvariantEmbeddingsUnit(_OurEmbeddings, EmbeddingsUnitTests):
    pass


class TestInvariantEmbeddingsIntegration(_OurEmbeddings, EmbeddingsIntegrationTests):
    pass
