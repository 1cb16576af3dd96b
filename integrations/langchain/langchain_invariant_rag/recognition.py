"""Models of LangChain that recognise the sets of segments in their messages before callbacks and caches see them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from invariant_rag.errors import OrderWarning
from invariant_rag.prompts import Finding, KnownDocument, Recognition, Retrieval, Turn, recognize, report
from invariant_rag.segments import SegmentSet
from langchain_core.callbacks import Callbacks
from langchain_core.language_models.base import BaseLanguageModel
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import Field

from langchain_invariant_rag.call_documents import ModelListsDocuments
from langchain_invariant_rag.documents import to_block, to_segments
from langchain_invariant_rag.tracking import RUNS, run_of, track_runs
from langchain_invariant_rag.turns import in_order_of_calls, to_turns, with_turns

FIXES = {
    "no_segments": 'Write {context} as Segments(documents), or use SegmentsPlaceholder("context").',
    "separate": "Write the same text around each document, or use create_invariant_documents_chain.",
    "incomplete": (
        "Pass all documents of a question in one call: create_invariant_documents_chain does. A model that is to look "
        "at documents one by one has find_documents=False."
    ),
    "split": "Pass whole documents: retrieve fewer, or set overflow on the model to shorten them.",
    "elsewhere": "Retrieve and answer in one chain, or pass documents= to the model.",
    "keyword": "LangChain passes keywords to the first step of a chain only: model.bind(documents=...).",
}
"""What to do about a finding, in the words of LangChain."""

_KEY = "invariant_rag"


@dataclass(frozen=True)
class Recognizer:
    """Finds the documents in what a model is given, and says what is not understood.

    Attributes:
        find_documents: Whether to look for what retrievers returned in the same run.
        known_documents: Further documents to look for.
        strict: Whether to raise, and not only to warn.
        require_segments: Whether to raise where there is no segment.
    """

    find_documents: bool = True
    known_documents: tuple[Any, ...] = ()
    strict: bool = False
    require_segments: bool = False

    def __post_init__(self) -> None:
        track_runs()

    def recognize(
        self,
        turns: Sequence[Turn],
        run: UUID | None,
        *,
        keyword_used: bool = True,
        check: Callable[[Sequence[SegmentSet]], Iterable[Finding]] | None = lambda _: (),
    ) -> Recognition:
        """Find the sets in a conversation, and report what is not understood.

        Without `find_documents`, what it would have found or reported is a finding, too, but nobody is warned of it.

        Args:
            turns: The conversation.
            run: The run that asks.
            keyword_used: Whether `documents=` of the call arrived.
            check: Returns further findings. None: the order is meant to matter, so there is nothing to report.

        Raises:
            OrderWarning: Nothing is a segment, and `require_segments` is set; or there is a finding, and `strict` is.
        """
        known = [Retrieval((KnownDocument.of(each),)) for each in to_segments(self.known_documents)]
        looked_for = recognize(turns, [*known, *RUNS.of(run)], RUNS.elsewhere(run))
        found = looked_for if self.find_documents else recognize(turns, known)
        sets = [part for turn in found.turns for part in turn.parts if isinstance(part, SegmentSet)]
        if self.require_segments and not sets:
            raise OrderWarning("expected segments, got a prompt without any", hint=FIXES["no_segments"])
        if check is None:
            return found
        findings = [*found.findings, *check(sets)]
        if not keyword_used and _documents_of_a_caller():
            findings.append(Finding("keyword", "documents= did not reach the model."))
        report(findings, fixes=FIXES, strict=self.strict)
        if [turn.text for turn in looked_for.turns] != [turn.text for turn in found.turns]:
            findings.append(Finding("no_segments", "the prompt holds retrieved documents that are no segments."))
        findings += [each for each in looked_for.findings if each not in findings]
        return Recognition(found.turns, tuple(findings))


class RecognizesDocuments(ModelListsDocuments, BaseLanguageModel[Any]):
    """Fields of models that find the documents in what they are given."""

    find_documents: bool = True
    """Whether documents that a retriever returned in the same run are segments wherever their text appears in a prompt,
    with numbers, bullets or tags around them, or without."""
    known_documents: list[Any] = Field(default_factory=list, repr=False)
    """Further documents that are segments wherever their whole text appears in a prompt."""
    strict: bool = False
    """Whether to raise an `OrderWarning`, and not only to warn, where the order of documents may change an answer."""
    require_segments: bool = False
    """Whether to raise an `OrderWarning` for a prompt without any segment."""

    def model_post_init(self, context: Any, /) -> None:
        """Attach the handler that notes what retrievers return, before the first of them is called."""
        super().model_post_init(context)
        _ = self._recognizer

    @property
    def _recognizer(self) -> Recognizer:
        return Recognizer(self.find_documents, tuple(self.known_documents), self.strict, self.require_segments)

    def _check(self, sets: Sequence[SegmentSet]) -> Iterable[Finding]:
        """Return reasons of this model why answers may depend on the order all the same."""
        return ()

    @property
    def _sorts_segments(self) -> bool:
        """Whether to list segments by content, so that the same set in another order is a cache hit."""
        return True

    def _recognize(self, turns: Sequence[Turn], run: UUID | None, *, keyword_used: bool) -> Recognition:
        check = self._check if self._promises_invariance else None
        return self._recognizer.recognize(turns, run, keyword_used=keyword_used, check=check)

    @property
    def _promises_invariance(self) -> bool:
        """Whether the order of segments is meant to be without effect. If not, there is nothing to warn of."""
        return True


def _documents_of_a_caller() -> bool:
    """Return whether a chain that calls this model was given `documents=`, which it passes to its first step alone."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "langchain_core.runnables.base":
            keywords = frame.f_locals.get("kwargs")
            if isinstance(keywords, dict) and keywords.get("documents"):
                return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class RecognizesMessages(RecognizesDocuments):
    """Chat models whose messages have every segment in a content block when callbacks, caches and `_generate` get them.

    To be named before `BaseChatModel`.
    """

    def _recognized(self, messages: Sequence[BaseMessage], run: UUID | None, documents: Any) -> list[BaseMessage]:
        """Return messages in which every segment is a content block; those that were recognised before, as they are."""
        if was_recognized(messages) is not None:
            return list(messages)
        given = with_documents(in_order_of_calls(messages), documents)
        found = self._recognize(to_turns(given), run, keyword_used=documents is not None)
        changed = with_turns(given, found.turns, sort=self._sorts_segments)
        if not changed:
            return changed
        noted = {**changed[-1].additional_kwargs, _KEY: {"recognized": not found.findings}}
        return [*changed[:-1], changed[-1].model_copy(update={"additional_kwargs": noted})]

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate for each conversation; see `BaseChatModel.generate`."""
        recognized, options = self._recognized_batch(messages, callbacks, kwargs)
        return super().generate(recognized, stop, callbacks, **options)

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate for each conversation; see `BaseChatModel.agenerate`."""
        recognized, options = self._recognized_batch(messages, callbacks, kwargs)
        return await super().agenerate(recognized, stop, callbacks, **options)

    def _recognized_batch(
        self, messages: Iterable[Sequence[BaseMessage]], callbacks: Callbacks, keywords: dict[str, Any]
    ) -> tuple[list[list[BaseMessage]], dict[str, Any]]:
        options = self._listed(keywords)
        documents = options.pop("documents", None)
        return [self._recognized(each, run_of(callbacks), documents) for each in messages], options

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:  # noqa: A002
        """Stream; see `BaseChatModel.stream`."""
        messages, settled, options = self._recognized_input(input, config, kwargs)
        yield from super().stream(messages, settled, **options)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: A002
        """Stream; see `BaseChatModel.astream`."""
        messages, settled, options = self._recognized_input(input, config, kwargs)
        async for piece in super().astream(messages, settled, **options):
            yield piece

    def _recognized_input(
        self, model_input: Any, config: RunnableConfig | None, keywords: dict[str, Any]
    ) -> tuple[list[BaseMessage], RunnableConfig, dict[str, Any]]:
        settled = ensure_config(config)
        messages = self._convert_input(model_input).to_messages()  # type: ignore[attr-defined]
        (recognized,), options = self._recognized_batch([messages], settled.get("callbacks"), keywords)
        return recognized, settled, options


def was_recognized(messages: Sequence[BaseMessage]) -> bool | None:
    """Return whether everything in messages was understood; None if that was not looked at yet."""
    noted = messages[-1].additional_kwargs.get(_KEY) if messages else None
    return None if noted is None else bool(noted["recognized"])


def with_documents(messages: Sequence[BaseMessage], documents: Iterable[Any] | None) -> list[BaseMessage]:
    """Return messages with documents at the start of the user's last message."""
    segments = [] if documents is None else to_segments(documents)
    if not segments:
        return list(messages)
    blocks: list[Any] = [dict(to_block(segment)) for segment in segments]
    asked = [index for index, message in enumerate(messages) if isinstance(message, HumanMessage)]
    if not asked:
        return [*messages, HumanMessage(content=blocks)]
    message = messages[asked[-1]]
    content = [{"type": "text", "text": message.content}] if isinstance(message.content, str) else message.content
    placed = message.model_copy(update={"content": [*blocks, *content]})
    return [*messages[: asked[-1]], placed, *messages[asked[-1] + 1 :]]
