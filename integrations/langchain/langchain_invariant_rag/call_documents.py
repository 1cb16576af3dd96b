"""The `documents=` keyword of a call, read once where the call begins.

LangChain calls a model several times with the same keywords: for every prompt of a batch, and again in a retry or a
fallback. A generator is empty the second time, and its address would be part of a cache key.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from invariant_rag.errors import InvalidSegment
from langchain_core.outputs import LLMResult
from langchain_core.runnables import Runnable, RunnableBinding, RunnableConfig

from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.errors import UnknownParameter

_KEYWORD = "documents"


def list_documents(keywords: Mapping[str, Any], *, sort: bool) -> dict[str, Any]:
    """Return the keywords of a call with `documents` as a list.

    Args:
        keywords: The keywords of the call.
        sort: Whether to sort the documents by content, so that a set in another order has the same cache key.

    Raises:
        UnknownParameter: A keyword looks like `documents`, and is another one, such as `docs`.
        InvalidSegment: They are no documents, or an iterator without any, which was probably read before.
    """
    misspelt = [name for name in keywords if name != _KEYWORD and get_close_matches(name, [_KEYWORD])]
    if misspelt:
        raise UnknownParameter("A call", misspelt, [_KEYWORD])
    documents = keywords.get(_KEYWORD)
    if documents is None:
        return dict(keywords)
    listed = list(documents) if isinstance(documents, Iterator) else documents
    if isinstance(documents, Iterator) and not listed:
        raise InvalidSegment(
            f"expected documents, got a {type(documents).__name__} with nothing left to read",
            hint="It can be read once, and LangChain may call several times. Pass a list, which may be empty.",
        )
    pairs = list(zip(to_segments(listed), listed, strict=True))
    if sort:
        pairs.sort(key=lambda pair: pair[0].canonical_key)
    return {**keywords, _KEYWORD: [document for _, document in pairs]}


class ListsDocuments(Runnable[Any, Any]):
    """Every entry of a runnable reads `documents=` once, and passes on a list. To be named before the base class."""

    @property
    def _sorts_documents(self) -> bool:
        """Whether the order in which documents are given means nothing."""
        return True

    def _listed(self, keywords: Mapping[str, Any]) -> dict[str, Any]:
        return list_documents(keywords, sort=self._sorts_documents)

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke; see `Runnable.invoke`."""
        return super().invoke(input, config, **self._listed(kwargs))  # type: ignore[safe-super]

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke; see `Runnable.ainvoke`."""
        return await super().ainvoke(input, config, **self._listed(kwargs))

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:  # noqa: A002
        """Stream; see `Runnable.stream`."""
        yield from super().stream(input, config, **self._listed(kwargs))

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: A002
        """Stream; see `Runnable.astream`."""
        async for piece in super().astream(input, config, **self._listed(kwargs)):
            yield piece

    def batch(self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any) -> list[Any]:
        """Invoke for each input; see `Runnable.batch`."""
        return super().batch(inputs, config, return_exceptions=return_exceptions, **self._listed(kwargs))

    async def abatch(
        self, inputs: Any, config: Any = None, *, return_exceptions: bool = False, **kwargs: Any
    ) -> list[Any]:
        """Invoke for each input; see `Runnable.abatch`."""
        return await super().abatch(inputs, config, return_exceptions=return_exceptions, **self._listed(kwargs))

    def batch_as_completed(
        self, inputs: Sequence[Any], config: Any = None, *, return_exceptions: Any = False, **kwargs: Any
    ) -> Iterator[tuple[int, Any]]:
        """Invoke for each input; see `Runnable.batch_as_completed`."""
        yield from super().batch_as_completed(
            inputs, config, return_exceptions=return_exceptions, **self._listed(kwargs)
        )

    async def abatch_as_completed(
        self, inputs: Sequence[Any], config: Any = None, *, return_exceptions: Any = False, **kwargs: Any
    ) -> AsyncIterator[tuple[int, Any]]:
        """Invoke for each input; see `Runnable.abatch_as_completed`."""
        async for found in super().abatch_as_completed(
            inputs, config, return_exceptions=return_exceptions, **self._listed(kwargs)
        ):
            yield found

    def bind(self, **kwargs: Any) -> Any:
        """Bind keywords; see `Runnable.bind`."""
        return super().bind(**self._listed(kwargs))

    def with_retry(self, **kwargs: Any) -> Runnable[Any, Any]:
        """Return a runnable that tries again, with the same documents; see `Runnable.with_retry`."""
        return _Repeated(bound=super().with_retry(**kwargs))

    def with_fallbacks(self, fallbacks: Sequence[Runnable[Any, Any]], **kwargs: Any) -> Any:
        """Return a runnable with fallbacks, which get the same documents; see `Runnable.with_fallbacks`."""
        return _Repeated(bound=super().with_fallbacks(fallbacks, **kwargs))


class ModelListsDocuments(ListsDocuments):
    """The same for language models, which can also be called for several prompts at once."""

    def generate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Generate for each prompt; see `BaseLanguageModel.generate_prompt`."""
        result: LLMResult = super().generate(*args, **self._listed(kwargs))  # type: ignore[misc]
        return result

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Generate for each prompt; see `BaseLanguageModel.agenerate_prompt`."""
        result: LLMResult = await super().agenerate(*args, **self._listed(kwargs))  # type: ignore[misc]
        return result


class _Repeated(ListsDocuments, RunnableBinding[Any, Any]):
    """A runnable that may call its model several times."""

    @property
    def _sorts_documents(self) -> bool:
        """No: the model knows whether to."""
        return False
