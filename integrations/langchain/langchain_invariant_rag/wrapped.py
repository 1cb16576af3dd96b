"""`canonical` and `vote` around runnables that are no chat models, such as completion models and structured output."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from invariant_rag.api_models import PlainRequests
from invariant_rag.prompts import Turn
from invariant_rag.prompts.labels import translate_object
from langchain_core.callbacks import AsyncCallbackManagerForChainRun, CallbackManagerForChainRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.prompt_values import PromptValue, StringPromptValue
from langchain_core.runnables import RunnableConfig, ensure_config
from langchain_core.runnables.config import patch_config

from langchain_invariant_rag.call_documents import ListsDocuments
from langchain_invariant_rag.document_reprs import split_reprs
from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.plain import Ballot, answered, message_ballots, text_ballots
from langchain_invariant_rag.recognition import Recognizer, with_documents
from langchain_invariant_rag.tracking import run_of
from langchain_invariant_rag.turns import in_order_of_calls, to_turns
from langchain_invariant_rag.voting import AnswerOf, elected


class _PlainRunnable(ListsDocuments):
    """A runnable that gets segments as plain text."""

    _strategy: str

    def __init__(self, bound: Any, requests: PlainRequests, recognizer: Recognizer) -> None:
        self.bound = bound
        self._requests = requests
        self._recognizer = recognizer

    def _ballots(self, model_input: Any, config: RunnableConfig | None, documents: Any) -> tuple[list[Ballot], bool]:
        """Return requests of the kind of the input, and whether everything in it was understood."""
        run, used = run_of(ensure_config(config).get("callbacks")), documents is not None
        if isinstance(model_input, str | StringPromptValue):
            text = model_input if isinstance(model_input, str) else model_input.text
            parts = [*to_segments(documents or []), *split_reprs(text)]
            found = self._recognizer.recognize([Turn("user", tuple(parts))], run, keyword_used=used)
            return text_ballots(self._requests, found.turns[0]), not found.findings
        given = model_input.to_messages() if isinstance(model_input, PromptValue) else convert_to_messages(model_input)
        messages: Sequence[BaseMessage] = with_documents(in_order_of_calls(given), documents)
        found = self._recognizer.recognize(to_turns(messages), run, keyword_used=used)
        return message_ballots(self._requests, messages, found.turns), not found.findings

    def _answered(self, output: Any, ballot: Ballot, *, recognized: bool) -> Any:
        """Return an output with citations translated back, and a message, or the `raw` one, with the ledger."""
        if isinstance(output, AIMessage):
            return answered(output, ballot, self._strategy, recognized=recognized)
        if isinstance(output, dict) and isinstance(output.get("raw"), AIMessage):
            return {name: self._answered(each, ballot, recognized=recognized) for name, each in output.items()}
        return translate_object(output, ballot.request.labels)


class CanonicalRunnable(_PlainRunnable):
    """A runnable that gets segments in canonical order; made by `canonical`. Callbacks see only the wrapped one."""

    _strategy = "canonical"

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with the segments in canonical order."""
        ([ballot], recognized), options = self._asked(input, config, kwargs)
        return self._answered(self.bound.invoke(ballot.input, config, **options), ballot, recognized=recognized)

    async def ainvoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with the segments in canonical order."""
        ([ballot], recognized), options = self._asked(input, config, kwargs)
        return self._answered(await self.bound.ainvoke(ballot.input, config, **options), ballot, recognized=recognized)

    def stream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Stream the wrapped runnable; in one piece if numbers in the answer have to be translated."""
        ([ballot], _), options = self._asked(input, config, kwargs)
        if ballot.request.labels:
            yield self.invoke(input, config, **kwargs)
        else:
            yield from self.bound.stream(ballot.input, config, **options)

    async def astream(
        self,
        input: LanguageModelInput,  # noqa: A002
        config: RunnableConfig | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[Any]:
        """Stream the wrapped runnable; in one piece if numbers in the answer have to be translated."""
        ([ballot], _), options = self._asked(input, config, kwargs)
        if ballot.request.labels:
            yield await self.ainvoke(input, config, **kwargs)
        else:
            async for piece in self.bound.astream(ballot.input, config, **options):
                yield piece

    def _asked(
        self, model_input: Any, config: RunnableConfig | None, keywords: dict[str, Any]
    ) -> tuple[tuple[list[Ballot], bool], dict[str, Any]]:
        options = self._listed(keywords)
        return self._ballots(model_input, config, options.pop("documents", None)), options


class VotingRunnable(_PlainRunnable):
    """A runnable that is called with several orders of the segments; made by `vote`. Callbacks see a chain of calls."""

    _strategy = "vote"

    def __init__(self, bound: Any, requests: PlainRequests, recognizer: Recognizer, answer_of: AnswerOf | None) -> None:
        super().__init__(bound, requests, recognizer)
        self._answer_of = answer_of

    def invoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with several orders of the segments, and return the most frequent answer."""
        keywords = self._listed(kwargs)
        ballots, recognized = self._ballots(input, config, keywords.pop("documents", None))

        def ask(_: Any, run_manager: CallbackManagerForChainRun, config: RunnableConfig) -> Any:
            inner = patch_config(config, callbacks=run_manager.get_child())
            outputs = self.bound.batch([each.input for each in ballots], inner, **keywords)
            return self._elected(outputs, ballots, recognized=recognized)

        return self._call_with_config(ask, input, config, run_type="chain")

    async def ainvoke(self, input: LanguageModelInput, config: RunnableConfig | None = None, **kwargs: Any) -> Any:  # noqa: A002
        """Invoke the wrapped runnable with several orders of the segments, and return the most frequent answer."""
        keywords = self._listed(kwargs)
        ballots, recognized = self._ballots(input, config, keywords.pop("documents", None))

        async def ask(_: Any, run_manager: AsyncCallbackManagerForChainRun, config: RunnableConfig) -> Any:
            inner = patch_config(config, callbacks=run_manager.get_child())
            outputs = await self.bound.abatch([each.input for each in ballots], inner, **keywords)
            return self._elected(outputs, ballots, recognized=recognized)

        return await self._acall_with_config(ask, input, config, run_type="chain")

    def _elected(self, outputs: Sequence[Any], ballots: Sequence[Ballot], *, recognized: bool) -> Any:
        pairs = zip(outputs, ballots, strict=True)
        return elected([self._answered(*pair, recognized=recognized) for pair in pairs], self._answer_of)[1]
