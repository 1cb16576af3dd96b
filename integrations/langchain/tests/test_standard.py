"""LangChain's own suites for chat models, retrievers and embeddings."""

from __future__ import annotations

from typing import Any

from invariant_rag import InvariantModel, Segment
from invariant_rag.rag.retrieval import BM25Retriever
from invariant_rag.testing import tiny_model, toy_tokenizer
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import (
    ChatModelIntegrationTests,
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
)
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

from langchain_invariant_rag import ChatInvariant, InvariantEmbeddings, InvariantRetriever

ENGINE = InvariantModel(
    tiny_model("llama", num_hidden_layers=2, vocab_size=261, max_position_embeddings=4096, eos_token_id=None),
    toy_tokenizer(),
)


class _OurChatModel:
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatInvariant

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": ENGINE}

    @property
    def supports_model_override(self) -> bool:
        return False

    @property
    def has_tool_calling(self) -> bool:
        return False


class TestChatInvariantUnit(_OurChatModel, ChatModelUnitTests):
    pass


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
