"""`canonical` and `vote` around runnables that are no chat models, such as completion models and structured output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from invariant_rag.api_models import PlainRequests
from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import patch_config

from langchain_invariant_rag.call_documents import ListsDocuments
from langchain_invariant_rag.plain import input_requests
from langchain_invariant_rag.voting import AnswerOf, elected


class CanonicalRunnable(ListsDocuments):
    """A runnable that gets segments in canonical order; made by `canonical`. Callbacks see only the wrapped one."""

    def __init__(self, bound: Runnable[Any, Any], requests: PlainRequests) -> None:
        self.bound = bound
        self._requests = requests

    def _request(self, model_input: Any, keywords: dict[str, Any]) -> Any:
        documents = self._listed(keywords).get("documents")
        keywords.pop("documents", None)
        return input_requests(self._requests, model_input, documents)[0]

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with the segments in canonical order."""
        return self.bound.invoke(self._request(input, kwargs), config, **kwargs)

    async def ainvoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with the segments in canonical order."""
        return await self.bound.ainvoke(self._request(input, kwargs), config, **kwargs)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Stream the wrapped runnable with the segments in canonical order."""
        yield from self.bound.stream(self._request(input, kwargs), config, **kwargs)

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Stream the wrapped runnable with the segments in canonical order."""
        async for piece in self.bound.astream(self._request(input, kwargs), config, **kwargs):
            yield piece


class VotingRunnable(ListsDocuments):
    """A runnable that is called with several orders of the segments; made by `vote`. Callbacks see a chain of calls."""

    def __init__(self, bound: Runnable[Any, Any], requests: PlainRequests, answer_of: AnswerOf | None) -> None:
        self.bound = bound
        self._requests = requests
        self._answer_of = answer_of

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with several orders of the segments, and return the most frequent answer."""
        keywords = self._listed(kwargs)

        def ask(model_input: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> Any:
            ballots = input_requests(self._requests, model_input, keywords.pop("documents", None))
            inner = patch_config(config, callbacks=run_manager.get_child())
            return elected(self.bound.batch(ballots, inner, **keywords), self._answer_of)[1]

        return self._call_with_config(ask, input, config, run_type="chain")

    async def ainvoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with several orders of the segments, and return the most frequent answer."""
        keywords = self._listed(kwargs)

        async def ask(model_input: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig) -> Any:
            ballots = input_requests(self._requests, model_input, keywords.pop("documents", None))
            inner = patch_config(config, callbacks=run_manager.get_child())
            return elected(await self.bound.abatch(ballots, inner, **keywords), self._answer_of)[1]

        return await self._acall_with_config(ask, input, config, run_type="chain")
