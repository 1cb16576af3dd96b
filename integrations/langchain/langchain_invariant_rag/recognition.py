"""Models of LangChain whose messages have every segment in a set when callbacks, caches and the model get them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, is_
from typing import Any, ClassVar, NamedTuple
from uuid import UUID

from invariant_rag.errors import OrderWarning
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
from langchain_core.language_models.base import BaseLanguageModel
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import RunnableConfig, ensure_config

from langchain_invariant_rag.documents import document_list, given_segments, in_order_of_calls, to_content, to_turn
from langchain_invariant_rag.tracking import KEPT, RUNS, retrieval_of, run_of, runs_of

FIXES = {
    "no_segments": (
        "Keep their boundaries: as_segments(retriever), SegmentsPlaceholder, SEGMENT_PROMPT or "
        "create_invariant_documents_chain. A model that looks at documents one by one has find_documents=False."
    ),
    "separate": "Write the same text around each document, or use create_invariant_documents_chain.",
    "incomplete": "Pass all documents of a question in one call: create_invariant_documents_chain does.",
}
"""What to do about a finding, in the words of LangChain."""

KEY = "invariant_rag"
_content = attrgetter("content")


class OrderRules(NamedTuple):
    """What a model makes of the order of segments."""

    promises_invariance: bool = True  # if not, there is nothing to warn of
    sorts: bool = True  # by content, so that the same set in another order is a cache hit
    reason: str = ""  # why the order matters all the same


class RecognizesDocuments(BaseLanguageModel[Any]):
    """Fields of models that recognise the documents in their prompts."""

    find_documents: bool = True
    """Whether a template's variable or a tool's result that is nothing but the documents which a retriever returned in
    the same run is a set, and whether to warn of retrieved documents that are not in one."""
    strict: bool = False
    """Whether to raise an `OrderWarning`, and not only to warn, where the order of documents may change an answer."""
    require_segments: bool = False
    """Whether to raise an `OrderWarning` for a prompt without any segment."""

    _order_rules: ClassVar[Any] = OrderRules()

    _prepare: ClassVar[Any]  # returns the model to call, prompts with their sets, and the rest of the keywords
    _recognized_input: ClassVar[Any]  # returns the prompt of a stream, with its sets

    def generate(self, prompts: Any, stop: Any = None, callbacks: Any = None, **kwargs: Any) -> Any:
        """Generate for each prompt; see LangChain's `generate`."""
        model, recognized, rest = self._prepare(prompts, runs_of(callbacks, len(prompts)), kwargs)
        return super(RecognizesDocuments, model).generate(recognized, stop, callbacks, **rest)  # type: ignore[misc]

    async def agenerate(self, prompts: Any, stop: Any = None, callbacks: Any = None, **kwargs: Any) -> Any:
        """Generate for each prompt; see LangChain's `agenerate`."""
        model, recognized, rest = self._prepare(prompts, runs_of(callbacks, len(prompts)), kwargs)
        return await super(RecognizesDocuments, model).agenerate(recognized, stop, callbacks, **rest)  # type: ignore[misc]

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:  # noqa: A002
        """Stream; see LangChain's `stream`."""
        config = ensure_config(config)
        yield from super().stream(self._recognized_input(input, config, kwargs), config, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:  # noqa: A002
        """Stream; see LangChain's `astream`."""
        config = ensure_config(config)
        async for chunk in super().astream(self._recognized_input(input, config, kwargs), config, **kwargs):
            yield chunk

    def _recognize(
        self, turns: Sequence[Turn], run: UUID | None, rules: OrderRules, retrievals: Sequence[Retrieval] = ()
    ) -> Recognition:
        """Put the segments of a conversation into sets, and report what is not understood.

        `retrievals` are those beside what is known of the calling run.
        """
        known: list[Retrieval] = []
        slots: list[str] = []
        if self.find_documents:
            of_run, slots = ([], []) if run is None else RUNS.of(run)
            if known := [*of_run, *retrievals, *outside_retrievals()]:
                slots += [part for turn in turns for part in turn.parts if isinstance(part, str)]
        recognition = recognize(turns, known, slots)
        if known:
            forget_outside(recognition.texts)
        if self.require_segments and not recognition.sets:
            raise OrderWarning("expected segments, got a prompt without any", hint=FIXES["no_segments"])
        if not rules.promises_invariance:
            return replace(recognition, findings=())
        findings = list(recognition.findings)
        if not self.find_documents:
            findings = [each for each in findings if each.kind != "no_segments"]
        if rules.reason and max(map(len, recognition.sets), default=0) > 1:
            findings.append(Finding("routing", rules.reason))
        if findings:
            report(findings, fixes=FIXES, strict=self.strict)
        return replace(recognition, findings=tuple(findings))


class Recognized(dict[str, bool]):
    """The recognition of a conversation, kept in its last message.

    Its turns are lost where messages are written as JSON, or change; then they are recognised again.
    """

    def __init__(self, recognition: Recognition, messages: Sequence[BaseMessage], *, recognized: bool) -> None:
        super().__init__(recognized=recognized)
        self.turns = recognition.turns
        self.contents = list(map(_content, messages))

    @staticmethod
    def of(messages: Sequence[BaseMessage]) -> Recognized | None:
        """Return the recognition of messages; None if they were not recognised, or changed since then."""
        noted = messages[-1].additional_kwargs.get(KEY) if messages else None
        if not isinstance(noted, Recognized) or len(noted.contents) != len(messages):
            return None
        return noted if all(map(is_, noted.contents, map(_content, messages))) else None


class RecognizesMessages(RecognizesDocuments):
    """Chat models that do so. To be named before `BaseChatModel`."""

    def _recognized(self, messages: Sequence[BaseMessage], run: UUID | None, documents: Any) -> list[BaseMessage]:
        """Return messages in which every segment is a content block; those that were recognised before, as they are."""
        if not messages or Recognized.of(messages) is not None:
            return list(messages)
        ordered, segments, rules = in_order_of_calls(messages), given_segments(documents), self._order_rules
        turns, artifacts, last = list(map(to_turn, ordered)), [], -1
        for index, message in enumerate(ordered):
            last = index if turns[index].role == "user" else last
            if isinstance(message, ToolMessage):
                kept = [message.artifact, *message.additional_kwargs.get(KEPT, ())]
                artifacts += [retrieval_of(listed) for each in kept if (listed := document_list(each))]
        if segments and last < 0:
            ordered.append(HumanMessage(""))
            turns.append(Turn("user", ("",)))
        before = list(turns)
        if segments:  # they become the start of the last turn of the user
            parts = turns[last].parts
            own_set = segments if isinstance(next(iter(parts), None), Segment) else [SegmentSet(segments)]
            turns[last] = Turn("user", (*own_set, *parts))
        recognition = self._recognize(turns, run, rules, artifacts)
        changed = []
        for message, turn, after in zip(ordered, before, recognition.turns, strict=True):
            same = len(turn.parts) == len(after.parts) and all(map(is_, turn.parts, after.parts))
            update = {} if same else {"content": to_content(after.parts, sort=rules.sorts)}
            changed.append(message.model_copy(update=update) if update else message)
        own = changed[-1].additional_kwargs
        recognized = not recognition.findings and own.get(KEY, {}).get("recognized", True)
        noted = {**own, KEY: Recognized(recognition, changed, recognized=recognized)}
        return [*changed[:-1], changed[-1].model_copy(update={"additional_kwargs": noted})]

    def _prepare(self, prompts: Sequence[Any], runs: Sequence[UUID | None], keywords: dict[str, Any]) -> Any:
        documents = keywords.pop("documents", None)
        return self, list(map(self._recognized, prompts, runs, [documents] * len(prompts))), keywords

    def _recognized_input(self, value: Any, config: RunnableConfig, keywords: dict[str, Any]) -> list[BaseMessage]:
        messages = self._convert_input(value).to_messages()  # type: ignore[attr-defined]
        return self._recognized(messages, run_of(config.get("callbacks")), keywords.pop("documents", None))
