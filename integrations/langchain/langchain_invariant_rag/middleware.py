"""Two-step RAG for agents: retrieve for the last human message before every model call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from invariant_rag.errors import ExtraRequired
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever

from langchain_invariant_rag.errors import DISTRIBUTION
from langchain_invariant_rag.prompts import SegmentsPlaceholder

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise ExtraRequired("langchain", "agents", distribution=DISTRIBUTION) from error


class InvariantRAGMiddleware(AgentMiddleware[Any, Any, Any]):
    """Middleware that inserts retrieved documents before the last human message, as segments.

    They are in the model's request only, not in the agent's state.

    Example:
        ```python
        agent = create_agent(ChatInvariant(), tools=[], middleware=[InvariantRAGMiddleware(retriever)])
        ```

    Args:
        retriever: The retriever; its query is the text of the last human message.
    """

    def __init__(self, retriever: BaseRetriever) -> None:
        super().__init__()
        self.retriever = retriever

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Retrieve, then call the model."""
        index = _last_human_index(request.messages)
        if index is None:
            return handler(request)
        documents = self.retriever.invoke(request.messages[index].text)
        return handler(request.override(messages=_insert_documents(request.messages, index, documents)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Retrieve, then call the model."""
        index = _last_human_index(request.messages)
        if index is None:
            return await handler(request)
        documents = await self.retriever.ainvoke(request.messages[index].text)
        return await handler(request.override(messages=_insert_documents(request.messages, index, documents)))


def _last_human_index(messages: list[AnyMessage]) -> int | None:
    return max((index for index, message in enumerate(messages) if isinstance(message, HumanMessage)), default=None)


def _insert_documents(messages: list[AnyMessage], index: int, documents: Iterable[Document]) -> list[Any]:
    inserted = SegmentsPlaceholder("documents").format_messages(documents=documents)
    return [*messages[:index], *inserted, *messages[index:]]
