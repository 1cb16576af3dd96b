"""Two-step RAG for agents: retrieve for the last human message before every model call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from invariant_rag.checks import check_kind
from invariant_rag.errors import ExtraRequired
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.retrievers import BaseRetriever

from langchain_invariant_rag.prompts import SegmentsPlaceholder

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise ExtraRequired("langchain", "agents", distribution="langchain-invariant-rag") from error


class InvariantRAGMiddleware(AgentMiddleware[Any, Any, Any]):
    """Middleware that inserts retrieved documents before the last human message, as segments, and not in the state.

    Example:
        ```python
        agent = create_agent(ChatInvariant(), tools=[], middleware=[InvariantRAGMiddleware(retriever)])
        ```
    """

    def __init__(self, retriever: BaseRetriever) -> None:
        super().__init__()
        self.retriever = check_kind("retriever", retriever, BaseRetriever)  # type: ignore[type-abstract]

    def wrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
    ) -> ModelResponse[Any]:
        """Retrieve, then call the model."""
        index = _last_human(request)
        if index is None:
            return handler(request)
        return handler(_inserted(request, index, self.retriever.invoke(request.messages[index].text)))

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """Retrieve, then call the model."""
        index = _last_human(request)
        if index is None:
            return await handler(request)
        return await handler(_inserted(request, index, await self.retriever.ainvoke(request.messages[index].text)))


def _last_human(request: ModelRequest[Any]) -> int | None:
    return max((at for at, each in enumerate(request.messages) if isinstance(each, HumanMessage)), default=None)


def _inserted(request: ModelRequest[Any], index: int, documents: Iterable[Document]) -> ModelRequest[Any]:
    inserted: list[Any] = SegmentsPlaceholder("documents").format_messages(documents=documents)
    return request.override(messages=[*request.messages[:index], *inserted, *request.messages[index:]])
