"""The input of an LLM: slots that are sets, text that stays as it is, and a warning where nodes are lost in text.

A slot is the value of a template's variable, the content of a tool's message, or a content block; `find_set` decides.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import finalize

from llama_index.core import prompts
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.default_prompts import DEFAULT_CHOICE_SELECT_PROMPT
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.query_engine.citation_query_engine import CITATION_QA_TEMPLATE, CITATION_REFINE_TEMPLATE
from llama_index.core.response_synthesizers import BaseSynthesizer, Generation

from invariant_rag.errors import OrderWarning, UnsupportedCombination
from invariant_rag.prompts import Finding, Turn, find_set, forget_outside, outside_retrievals, recognize, report
from invariant_rag.prompts.turns import merge_texts
from invariant_rag.segments import Segment, SegmentSet
from invariant_rag.words import split_words
from llama_index.llms.invariant_rag.runs import Reports, Scope, current_scope, refuse_media

_WORDS = frozenset({"query_str", "query", "question", "existing_answer", "chat_history"})
"""Variables of LlamaIndex's templates that hold what the user or a model wrote."""
_CONTEXT = frozenset({"context_str", "context_msg"})
"""Variables that hold nodes, even if a query is the very same text."""
_TEMPLATES = (CITATION_QA_TEMPLATE.template, CITATION_REFINE_TEMPLATE.template, DEFAULT_CHOICE_SELECT_PROMPT.template)
_STOCK = frozenset(text for template in _TEMPLATES for text in re.split(r"\{\w+\}", template))
"""Texts of LlamaIndex's own templates, some with numbered documents as examples; nobody retrieved them."""

_NONCE = secrets.token_hex(8)
_MASK = re.compile(rf"<{_NONCE}:(\d+)>")

_MARKS = (
    "Mark the nodes (SegmentMarkerPostprocessor), pass SegmentBlocks, or let a variable of a template hold nothing but "
    "the nodes: llm.predict(template, context_str=...)."
)
_SYNTHESIZER = "response_synthesizer=InvariantSynthesizer(llm)"
_FIXES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((PairwiseComparisonEvaluator,), "Use InvariantPairwiseEvaluator(llm), or enforce_consensus=True."),
    ((BaseNodePostprocessor,), "Choose nodes by a model that scores each by itself, or let the answer read all nodes."),
    ((BaseRetriever,), "Retrieve without the LLM."),
    ((ContextChatEngine, CondensePlusContextChatEngine), "Use InvariantChatEngine."),
    ((CitationQueryEngine,), f"It numbers nodes by index: CitationQueryEngine.from_args(..., {_SYNTHESIZER})."),
    ((BaseSynthesizer,), f"Use {_SYNTHESIZER}, which passes all nodes, whole, in one call."),
)
"""What to do, by the caller: the first of these that is around the call."""


@dataclass(frozen=True)
class Part:
    """A text: a variable's `value`, `words` of a user or model, of the `template`, or `finished`: nobody knows."""

    text: str
    kind: Literal["value", "words", "template", "finished"]
    segments: SegmentSet | None = None  # the set that a value is
    block: TextBlock | None = None  # of the message that a finished text is


class SlotText(str):
    """A text with its parts: one that a template wrote, or a variable's value that is declared to be a set."""

    __slots__ = ("parts",)
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, text: str, *parts: Part) -> SlotText:
        """Return a text with these parts."""
        made = cls(text)
        made.parts = parts
        return made


class SlotBlock(TextBlock):
    """A text block that a template wrote. It is an ordinary one for all but the LLMs of this package."""

    _parts: tuple[Part, ...] = PrivateAttr(default=())


class SlotReader(LLM):
    """The part of an LLM that gets templates and the values of their variables, by `predict` and its like."""

    def _get_messages(self, prompt: prompts.BasePromptTemplate, **prompt_args: Any) -> list[ChatMessage]:
        """Return the messages of a template, whose blocks know the text of each variable."""
        filled = _Filled.of(self, prompt, prompt_args)
        if filled is None:
            return super()._get_messages(prompt, **prompt_args)
        plain, masked = super()._get_messages(filled.plain), super()._get_messages(filled.masked)
        if [len(each.blocks) for each in plain] != [len(each.blocks) for each in masked]:
            return list(plain)
        return [
            message.model_copy(update={"blocks": list(map(filled.block, message.blocks, other.blocks))})
            for message, other in zip(plain, masked, strict=True)
        ]

    def _get_prompt(self, prompt: prompts.BasePromptTemplate, **prompt_args: Any) -> str:
        """Return the text of a template, whose parts know the text of each variable."""
        filled = _Filled.of(self, prompt, prompt_args)
        if filled is None:
            return super()._get_prompt(prompt, **prompt_args)
        text = super()._get_prompt(filled.plain)
        return SlotText.of(text, *(filled.parts(text, super()._get_prompt(filled.masked)) or [Part(text, "finished")]))


@dataclass(frozen=True)
class _Filled:
    """A template with its values, once as they are, once with a placeholder for each."""

    plain: prompts.BasePromptTemplate
    masked: prompts.BasePromptTemplate
    values: Sequence[Part]

    @classmethod
    def of(cls, llm: LLM, prompt: prompts.BasePromptTemplate, given: Mapping[str, Any]) -> _Filled | None:
        """Return None for a kind of template that formats in its own way."""
        template = prompt.select(llm) if isinstance(prompt, prompts.SelectorPromptTemplate) else prompt
        if not isinstance(template, prompts.PromptTemplate | prompts.ChatPromptTemplate | prompts.RichPromptTemplate):
            return None
        inner = llm.llm if isinstance(llm, StructuredLLM) else llm
        scope = current_scope() if getattr(inner, "find_documents", True) else None
        plain = template._map_all_vars({**template.kwargs, **given})
        masked, parts = dict(plain), list[Part]()
        loops = isinstance(template, prompts.RichPromptTemplate)
        for name, value in plain.items():
            # `simple_summarize` passes a list of one text, which Python would write with brackets and escapes.
            text = value[0] if isinstance(value, list) and len(value) == 1 and not loops else value
            if not isinstance(text, str):
                continue
            part = _part(name, text, scope)
            if part.segments is None and text is not value:
                continue
            plain[name], masked[name] = text, f"<{_NONCE}:{len(parts)}>"
            parts.append(part)
        # The copies need no more values, whatever they are called.
        no_names: dict[str, Any] = {"function_mappings": {}, "template_var_mappings": {}}
        one, other = (template.model_copy(update={**no_names, "kwargs": each}) for each in (plain, masked))
        return cls(one, other, parts)

    def block(self, plain: Any, masked: Any) -> Any:
        """Return a block that knows its parts; as it is, if no value is in it: the message is finished."""
        if type(plain) is not TextBlock or not isinstance(masked, TextBlock) or not _MASK.search(masked.text):
            return plain
        parts = self.parts(plain.text, masked.text)
        if parts is None:
            return plain
        block = SlotBlock(text=plain.text)
        block._parts = parts
        return block

    def parts(self, plain: str, masked: str) -> tuple[Part, ...] | None:
        """Return the parts of a text; None if it is not the values with text between them, such as after a filter."""
        parts = []
        for i, text in enumerate(_MASK.split(masked)):
            kind: Any = "words" if text in _STOCK else "template"
            parts.append(self.values[int(text)] if i % 2 else Part(text, kind))
        return tuple(each for each in parts if each.text) if "".join(each.text for each in parts) == plain else None


def _part(name: str, text: str, scope: Scope | None) -> Part:
    if isinstance(text, SlotText) and len(text.parts) == 1:
        return text.parts[0]
    if scope is None or name in _WORDS:
        return Part(text, "words")
    segments = _find(scope, text, is_context=name in _CONTEXT)
    is_query = segments is None and text in {each.query for each in scope.retrievals}
    return Part(text, "words" if is_query and not _is_set(scope, text) else "value", segments)


# --- what was retrieved in a run ---


def _find(scope: Scope, slot: str, *, is_context: bool = False) -> SegmentSet | None:
    """Return the set that a slot is; None if it is none, or, unless it is context, the question or single words."""
    if is_context:
        return find_set(slot, [replace(each, query="") for each in scope.known()])
    segments = find_set(slot, scope.known())  # anybody may write `red, green`, also where these two were retrieved
    return segments if segments and any(len(split_words(each.text)) > 1 for each in segments) else None


def _is_set(scope: Scope, query: str) -> bool:
    """Return whether a question is nothing but nodes, so that no order distinguishes it from them."""
    return _find(scope, query, is_context=True) is not None


_KEPT: dict[int, tuple[str, SegmentSet]] = {}
"""Texts and sets that blocks were when they were parsed first, by the identity of the block; gone with it."""


def _find_in_block(scope: Scope, part: Part) -> SegmentSet | None:
    """Return the set that a finished text is, or was when its block was parsed first, in an agent's earlier turn."""
    segments, key = _find(scope, part.text), id(part.block)
    if segments is None or part.block is None:
        text, stored = _KEPT.get(key, ("", None))
        return segments or (stored if text == part.text else None)
    if key not in _KEPT:
        finalize(part.block, _KEPT.pop, key, None).atexit = False
    _KEPT[key] = part.text, segments
    return segments


@dataclass(frozen=True)
class RecognizedTurns:
    """A conversation whose segments are in sets, with what its run knows of it."""

    turns: Sequence[Turn]
    recognized: bool  # whether every node in it is known to be a segment
    query: str | None  # what the nodes were retrieved for
    sinks: Sequence[Reports]  # of the engines around, innermost first


class SlotStructuredLLM(SlotReader, StructuredLLM):
    """A `StructuredLLM` to which variables of templates are known."""


class SegmentReader(SlotReader):
    """An LLM that knows segments: those that are declared, and slots of prompts that are sets."""

    find_documents: bool = Field(True, description="Whether slots that are nothing but nodes of the same run are sets.")
    strict: bool = Field(False, description="Whether to raise an OrderWarning where it is issued.")
    require_segments: bool = Field(False, description="Whether to raise it for a prompt without any segment, too.")

    @classmethod
    def class_name(cls) -> str:
        """Return the id of this class."""
        return cls.__name__

    def __getstate__(self) -> dict[str, Any]:
        """Refuse what cannot be pickled: LlamaIndex takes it out of the pickle, and out of the object itself."""
        twin = copy(self)
        state: dict[str, Any] = super(SegmentReader, twin).__getstate__()
        if lost := sorted({*self.__dict__} - {*twin.__dict__, "callback_manager"}):
            raise UnsupportedCombination(
                f"expected fields that can be pickled, got {', '.join(lost)}", hint="Use functions of a module."
            )
        return state

    def as_structured_llm(self, output_cls: type[BaseModel], **kwargs: Any) -> StructuredLLM:
        """Return an LLM that answers with objects of a class."""
        return SlotStructuredLLM(llm=self, output_cls=output_cls, **kwargs)

    def _recognize(
        self, turns: Sequence[Turn], *, promises: bool = True, routed: bool = False, text_only: bool = False
    ) -> RecognizedTurns:
        """Recognise the sets of a conversation, and warn of what is none, where order `promises` to have no effect."""
        scope = current_scope()
        caller = next((each.instance for each in scope.path() if each.instance is not self), None)
        # `canonical` and `vote` recognise sets for the LLM in them, and report.
        is_wrapped = isinstance(caller, SegmentReader) and getattr(caller, "llm", None) is self
        finds, promises = self.find_documents and not is_wrapped, promises and not is_wrapped
        if text_only and scope.given:
            refuse_media(scope.given.nodes)
        resolved = [Turn(turn.role, tuple(_resolved(turn, scope if finds else None))) for turn in turns]
        parts = [part for turn in resolved for part in turn.parts]
        in_sets = [each.text for part in parts if isinstance(part, SegmentSet) for each in part]
        in_sets += [part.text for part in parts if isinstance(part, Segment)]
        retrieved = []
        for each in scope.known():
            is_whole = all(any(segment.text in text for text in in_sets) for segment in each.segments)
            retrieved.append(each if is_whole or not _is_set(scope, each.query) else replace(each, query=""))
        recognition = recognize(resolved, [*retrieved, *outside_retrievals()] if finds else ())
        forget_outside(recognition.texts)
        texts = ([each.text if isinstance(each, Part) else each for each in turn.parts] for turn in recognition.turns)
        known = [Turn(turn.role, tuple(merge_texts(each))) for turn, each in zip(recognition.turns, texts, strict=True)]
        sizes = [len(each) for turn in known for each in turn.sets]
        caller_fix = next((fix for kinds, fix in _FIXES if scope.innermost(*kinds)), None)
        fix = caller_fix or _MARKS
        if self.require_segments and not any(sizes) and not is_wrapped:
            raise OrderWarning("expected segments, got a prompt without any", hint=fix)
        findings = list(recognition.findings)
        if promises:
            if not any(sizes) and not findings and finds and (count := _nodes_of_synthesizer(scope)) > 1:
                message = f"the {count} nodes of a response synthesizer are not one slot of this call."
                findings.append(Finding("no_segments", message))
            comparing = scope.innermost(PairwiseComparisonEvaluator)
            if comparing is not None and not comparing._enforce_consensus:
                findings.append(Finding("no_segments", "two answers are compared in one order."))
            if routed and max(sizes, default=0) > 1:
                findings.append(Finding("routing", "the plain model of the router gets them in the order given."))
            kinds = ("no_segments", "separate", "incomplete", "marks") if caller_fix else ("no_segments",)
            report(findings, fixes=dict.fromkeys(kinds, fix), strict=self.strict)
        sinks = [each.reports for each in scope.path() if each.reports is not None and not is_wrapped]
        return RecognizedTurns(known, not findings, (scope.given.query or None) if scope.given else None, sinks)


def _resolved(turn: Turn, scope: Scope | None) -> Iterator[Any]:
    """Yield the parts of a turn; a text is a set or a string, and words are never searched."""
    for part in turn.parts:
        if not isinstance(part, Part) or part.kind == "words":
            yield part
        elif part.segments is not None:
            yield part.segments
        else:
            yield (_find_in_block(scope, part) if scope and part.kind == "finished" else None) or part.text


def _nodes_of_synthesizer(scope: Scope) -> int:
    """Return how many nodes the calling synthesizer got; 0 if it shows none."""
    caller = scope.innermost(BaseSynthesizer, BaseNodePostprocessor, BaseRetriever)
    shows = isinstance(caller, BaseSynthesizer) and not isinstance(caller, Generation)
    return len(scope.given.nodes) if shows and scope.given else 0
