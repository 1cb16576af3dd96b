"""Models of LangChain whose messages have every segment in a set when callbacks, caches and the model get them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import replace
from operator import is_
from typing import Any
from uuid import UUID

from invariant_rag.errors import InvalidSegment, OrderWarning
from invariant_rag.prompts import (
    Finding,
    Recognition,
    Retrieval,
    Turn,
    forget_outside,
    outside_retrievals,
    recognize,
    report,
)
from invariant_rag.segments import Segment, SegmentSet
from langchain_core.callbacks import Callbacks
from langchain_core.language_models.base import BaseLanguageModel
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import LLMResult
from langchain_core.runnables import RunnableConfig, ensure_config

from langchain_invariant_rag.documents import document_list, to_segments
from langchain_invariant_rag.tracking import RUNS, retrieval_of, run_of
from langchain_invariant_rag.turns import in_order_of_calls, to_turns, with_turns

FIXES = {
    "no_segments": (
        "Keep their boundaries: as_segments(retriever), SegmentsPlaceholder, SEGMENT_PROMPT or "
        "create_invariant_documents_chain. A model that looks at documents one by one has find_documents=False."
    ),
    "separate": "Write the same text around each document, or use create_invariant_documents_chain.",
    "incomplete": "Pass all documents of a question in one call: create_invariant_documents_chain does.",
}
"""What to do about a finding, in the words of LangChain."""

_KEY = "invariant_rag"


class RecognizesDocuments(BaseLanguageModel[Any]):
    """Fields of models that recognise the documents in what they are given."""

    find_documents: bool = True
    """Whether a template's variable or a tool's result that is nothing but the documents which a retriever returned in
    the same run is a set, and whether to warn of retrieved documents that are not in one."""
    strict: bool = False
    """Whether to raise an `OrderWarning`, and not only to warn, where the order of documents may change an answer."""
    require_segments: bool = False
    """Whether to raise an `OrderWarning` for a prompt without any segment."""

    @property
    def _sorts_segments(self) -> bool:
        """Whether to list segments by content, so that the same set in another order is a cache hit."""
        return True

    @property
    def _promises_invariance(self) -> bool:
        """Whether the order of segments is meant to be without effect. If not, there is nothing to warn of."""
        return True

    def _check(self, sets: Sequence[SegmentSet]) -> Iterable[Finding]:
        """Return reasons of this model why answers may depend on the order all the same."""
        return ()

    def _recognize(
        self, turns: Sequence[Turn], run: UUID | None, retrievals: Iterable[Retrieval] = (), slots: Iterable[str] = ()
    ) -> Recognition:
        """Put the segments of a conversation into sets, and report what is not understood.

        Args:
            turns: The conversation.
            run: The run that asks.
            retrievals: What was retrieved, beside what is known of the run.
            slots: Texts that may be sets, beside the variables of the run's prompts.

        Raises:
            OrderWarning: Nothing is a segment, and `require_segments` is set; or there is a finding, and `strict` is.
        """
        known, values = RUNS.of(run) if self.find_documents else ([], [])
        before = outside_retrievals() if self.find_documents else []
        found = recognize(turns, [*known, *retrievals, *before], [*values, *slots])
        forget_outside(found.texts)
        sets = [each for turn in found.turns for each in turn.sets]
        if self.require_segments and not sets:
            raise OrderWarning("expected segments, got a prompt without any", hint=FIXES["no_segments"])
        if not self._promises_invariance:
            return Recognition(found.turns, ())
        findings = (*(found.findings if self.find_documents else _declared(found.findings)), *self._check(sets))
        report(findings, fixes=FIXES, strict=self.strict)
        return Recognition(found.turns, findings)


def _declared(findings: Iterable[Finding]) -> Iterator[Finding]:
    return (each for each in findings if each.kind != "no_segments")


class RecognizesMessages(RecognizesDocuments):
    """Chat models that do so. To be named before `BaseChatModel`."""

    def _recognized(self, messages: Sequence[BaseMessage], run: UUID | None, documents: Any) -> list[BaseMessage]:
        """Return messages in which every segment is a content block; those that were recognised before, as they are."""
        if was_recognized(messages) is not None:
            return list(messages)
        given = in_order_of_calls(messages)
        segments = given_segments(documents)
        if segments and not any(isinstance(each, HumanMessage) for each in given):
            given = [*given, HumanMessage("")]
        before = to_turns(given)
        turns = _with_segments(before, segments) if segments else before
        tools = [each for each in given if isinstance(each, ToolMessage)] if self.find_documents else []
        artifacts = [retrieval_of(listed) for each in tools if (listed := document_list(each.artifact))]
        slots = [part for turn in turns for part in turn.parts if isinstance(part, str)] if self.find_documents else []
        found = self._recognize(turns, run, artifacts, slots)
        changed = with_turns(given, before, found.turns, sort=self._sorts_segments)
        if not changed:
            return changed
        noted = {**changed[-1].additional_kwargs, _KEY: _Noted(found, changed)}
        return [*changed[:-1], changed[-1].model_copy(update={"additional_kwargs": noted})]

    def generate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate for each conversation; see `BaseChatModel.generate`."""
        documents, run = kwargs.pop("documents", None), run_of(callbacks)
        recognized = [self._recognized(each, run, documents) for each in messages]
        result: LLMResult = super().generate(recognized, stop, callbacks, **kwargs)  # type: ignore[misc]
        return result

    async def agenerate(
        self,
        messages: list[list[BaseMessage]],
        stop: list[str] | None = None,
        callbacks: Callbacks = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Generate for each conversation; see `BaseChatModel.agenerate`."""
        documents, run = kwargs.pop("documents", None), run_of(callbacks)
        recognized = [self._recognized(each, run, documents) for each in messages]
        result: LLMResult = await super().agenerate(recognized, stop, callbacks, **kwargs)  # type: ignore[misc]
        return result

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:  # noqa: A002
        """Stream; see `BaseChatModel.stream`."""
        config = ensure_config(config)
        yield from super().stream(self._recognized_input(input, config, kwargs), config, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: A002
        """Stream; see `BaseChatModel.astream`."""
        config = ensure_config(config)
        async for piece in super().astream(self._recognized_input(input, config, kwargs), config, **kwargs):
            yield piece

    def _recognized_input(self, value: Any, config: RunnableConfig, keywords: dict[str, Any]) -> list[BaseMessage]:
        messages = self._convert_input(value).to_messages()  # type: ignore[attr-defined]
        return self._recognized(messages, run_of(config.get("callbacks")), keywords.pop("documents", None))


class _Noted(dict[str, bool]):
    """What a recognised conversation says of itself in its last message; its turns need not be parsed again.

    Attributes:
        turns: The turns. They are lost where messages are written as JSON.
        contents: The contents of the messages of which these are the turns.
    """

    def __init__(self, found: Recognition, messages: Sequence[BaseMessage]) -> None:
        super().__init__(recognized=not found.findings)
        self.turns = found.turns
        self.contents = [each.content for each in messages]


def was_recognized(messages: Sequence[BaseMessage]) -> bool | None:
    """Return whether everything in messages was understood; None if that was not looked at yet."""
    noted = messages[-1].additional_kwargs.get(_KEY) if messages else None
    return None if noted is None else bool(noted["recognized"])


def recognized_turns(messages: Sequence[BaseMessage]) -> Sequence[Turn]:
    """Return the turns of recognised messages."""
    noted = messages[-1].additional_kwargs.get(_KEY) if messages else None
    contents = noted.contents if isinstance(noted, _Noted) else []
    unchanged = len(contents) == len(messages) and all(map(is_, contents, [each.content for each in messages]))
    return noted.turns if unchanged and isinstance(noted, _Noted) else to_turns(messages)


def given_segments(documents: Iterable[Any] | None) -> list[Segment]:
    """Return the documents of a `documents=` keyword.

    Raises:
        InvalidSegment: They are no collection of documents, or one that can be read only once.
    """
    if isinstance(documents, Iterator):
        raise InvalidSegment(
            f"expected a list of documents, got a {type(documents).__name__}",
            hint="It can be read once, and LangChain may call several times. Pass list(documents).",
        )
    return [] if documents is None else to_segments(documents)


def _with_segments(turns: Sequence[Turn], segments: Sequence[Segment]) -> list[Turn]:
    """Return turns with segments at the start of the user's last one."""
    last = max(index for index, turn in enumerate(turns) if turn.role == "user")
    return [replace(turn, parts=(*segments, *turn.parts)) if turn is turns[last] else turn for turn in turns]
