"""Two-step RAG for agents: before every call of the model, retrieve for what the user asked last."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from invariant_rag.errors import ExtraRequired
from langchain_core.documents import Document
from langchain_core.messages import AnyMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever

from langchain_invariant_rag.prompts import SegmentsPlaceholder

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise ExtraRequired("langchain", "agents", "langchain-invariant-rag") from error


class InvariantRAGMiddleware(AgentMiddleware[Any, Any, Any]):
    """Puts what a retriever finds in front of the user's last message, as segments.

    They are there for the call only: the state of the agent does not keep them.

    Example:
        ```python
        agent = create_agent(ChatInvariant(), tools=[], middleware=[InvariantRAGMiddleware(retriever)])
        ```

    Args:
        retriever: What finds the documents.
    """

    def __init__(self, retriever: BaseRetriever) -> None:
        super().__init__()
        self.retriever = retriever

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Retrieve, and call the model."""
        place = _last_question(request.messages)
        if place is None:
            return handler(request)
        found = self.retriever.invoke(request.messages[place].text)
        return handler(request.override(messages=_with_documents(request.messages, place, found)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Retrieve, and call the model."""
        place = _last_question(request.messages)
        if place is None:
            return await handler(request)
        found = await self.retriever.ainvoke(request.messages[place].text)
        return await handler(request.override(messages=_with_documents(request.messages, place, found)))


def _last_question(messages: list[AnyMessage]) -> int | None:
    places = [index for index, message in enumerate(messages) if isinstance(message, HumanMessage)]
    return places[-1] if places else None


def _with_documents(messages: list[AnyMessage], place: int, documents: Iterable[Document]) -> list[Any]:
    block = SegmentsPlaceholder("documents").format_messages(documents=documents)
    return [*messages[:place], *block, *messages[place:]]
