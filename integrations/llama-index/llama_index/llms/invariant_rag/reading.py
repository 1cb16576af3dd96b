"""What an LLM of this package is asked: a conversation in which sets are known, and a warning where they are not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer, Generation
from llama_index.core.schema import NodeWithScore

from invariant_rag.errors import InvalidPrompt, OrderWarning
from invariant_rag.prompts import Finding, Turn, forget_outside, outside_retrievals, recognize, report
from invariant_rag.prompts.turns import merge_texts
from invariant_rag.segments import Segment, SegmentSet
from llama_index.llms.invariant_rag.nodes import has_media
from llama_index.llms.invariant_rag.runs import Reports, Scope, current_scope
from llama_index.llms.invariant_rag.slots import Part, SlotReader, find_in

_MARKS = (
    "Mark the nodes (SegmentMarkerPostprocessor), give SegmentBlocks, or let a variable of a template hold nothing but "
    "the nodes: llm.predict(template, context_str=...)."
)
_SYNTHESIZER = "response_synthesizer=InvariantSynthesizer(llm)"
_FIXES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((PairwiseComparisonEvaluator,), "Use InvariantPairwiseEvaluator(llm), or enforce_consensus=True."),
    ((BaseNodePostprocessor,), "Choose nodes by a model that scores each by itself, or let the answer read all nodes."),
    ((BaseRetriever,), "Retrieve without the LLM."),
    ((ContextChatEngine, CondensePlusContextChatEngine), "Use InvariantChatEngine."),
    ((CitationQueryEngine,), f"It numbers nodes by their place: CitationQueryEngine.from_args(..., {_SYNTHESIZER})."),
    ((BaseSynthesizer,), f"Use {_SYNTHESIZER}, which passes all nodes, whole, in one call."),
)
"""What to do, by what asks: the first of these that is around the call."""


@dataclass(frozen=True)
class Reading:
    """What was asked: a conversation whose segments are in sets."""

    turns: Sequence[Turn]
    recognized: bool  # whether every node in it is known to be a segment
    query: str | None  # what the nodes were retrieved for
    sinks: Sequence[Reports]  # where to report the answer


class SegmentReader(SlotReader):
    """An LLM that knows segments: those that are declared, and slots of prompts that are sets."""

    find_documents: bool = Field(True, description="Whether slots that are nothing but nodes of the same run are sets.")
    strict: bool = Field(False, description="Whether to raise an OrderWarning where it is issued.")
    require_segments: bool = Field(False, description="Whether to raise it for a prompt without any segment, too.")

    def _read(
        self, turns: Sequence[Turn], *, promises: bool = True, routed: bool = False, text_only: bool = False
    ) -> Reading:
        """Find the sets in a conversation, and say what is none.

        Args:
            turns: The conversation. Texts are `Part`s; strings among the parts are no slots.
            promises: Whether the order of segments is meant to be without effect. If not, there is nothing to warn of.
            routed: Whether a router may answer with a plain model that attends to the order given.
            text_only: Whether to refuse nodes with images and other media.
        """
        scope = current_scope()
        if text_only and scope.given:
            refuse_media(scope.given.nodes)
        searched = scope if self.find_documents else None
        read = [Turn(turn.role, tuple(_resolved(turn, searched))) for turn in turns]
        declared = [part for turn in read for part in turn.parts if isinstance(part, Segment | SegmentSet)]
        in_sets = [each.text for part in declared for each in SegmentSet([part] if isinstance(part, Segment) else part)]
        found = recognize(read, [*scope.missing(in_sets), *outside_retrievals()] if self.find_documents else ())
        forget_outside(found.texts)
        known = [Turn(turn.role, tuple(merge_texts(map(_plain, turn.parts)))) for turn in found.turns]
        findings = list(found.findings)
        has_sets = any(any(turn.sets) for turn in known)
        asker_fix = next((fix for kinds, fix in _FIXES if scope.innermost(*kinds)), None)
        fix = asker_fix or _MARKS
        if self.require_segments and not has_sets:
            raise OrderWarning("expected segments, got a prompt without any", hint=fix)
        query = (scope.given.query or None) if scope.given else None
        if not promises:
            return Reading(known, not findings, query, scope.sinks)
        if not has_sets and not findings and self.find_documents and (count := _given_elsewhere(scope)) > 1:
            message = f"the {count} nodes of a response synthesizer are not one slot of this call."
            findings.append(Finding("no_segments", message))
        comparing = scope.innermost(PairwiseComparisonEvaluator)
        if comparing is not None and not comparing._enforce_consensus:
            findings.append(Finding("no_segments", "two answers are compared in one order."))
        if routed and any(len(each) > 1 for turn in known for each in turn.sets):
            findings.append(Finding("routing", "the plain model of the router reads them in the order given."))
        kinds = ("no_segments", "separate", "incomplete", "marks") if asker_fix else ("no_segments",)
        report(findings, fixes=dict.fromkeys(kinds, fix), strict=self.strict)
        return Reading(known, not findings, query, scope.sinks)


def knows_segments(llm: object) -> bool:
    """Return whether an LLM is one of this package, or around one."""
    return isinstance(llm.llm if isinstance(llm, StructuredLLM) else llm, SegmentReader)


def refuse_media(nodes: Sequence[NodeWithScore]) -> None:
    """Raise InvalidPrompt if a node holds other media than text."""
    if media := [each.node.node_id for each in nodes if has_media(each.node)]:
        raise InvalidPrompt(
            f"expected nodes of text, got an image, audio or video in {', '.join(media)}",
            hint="Segments are text. Give a TextNode with a description instead.",
        )


def _resolved(turn: Turn, scope: Scope | None) -> Iterator[Any]:
    """Yield the parts of a turn, in which a text is the set that it is, or a string. Words are not looked at."""
    for part in turn.parts:
        if not isinstance(part, Part) or part.kind == "words":
            yield part
        elif part.segments is not None:
            yield part.segments
        else:
            yield (find_in(scope, part) if scope and part.kind == "finished" else None) or part.text


def _plain(part: Any) -> Any:
    return part.text if isinstance(part, Part) else part


def _given_elsewhere(scope: Scope) -> int:
    """Return how many nodes the synthesizer was given that asks; 0 if it shows none."""
    asking = scope.innermost(BaseSynthesizer, BaseNodePostprocessor, BaseRetriever)
    shows = isinstance(asking, BaseSynthesizer) and not isinstance(asking, Generation)
    return len(scope.given.nodes) if shows and scope.given else 0
