"""Recognise the sets of segments in what an LLM of this package is asked, and say what is not understood."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from llama_index.core.evaluation import PairwiseComparisonEvaluator
from llama_index.core.prompts.chat_prompts import CHAT_CONTENT_CHOICE_SELECT_PROMPT
from llama_index.core.prompts.default_prompts import DEFAULT_CHOICE_SELECT_PROMPT
from llama_index.core.query_engine.citation_query_engine import (
    CITATION_CHAT_CONTENT_QA_TEMPLATE,
    CITATION_CHAT_CONTENT_REFINE_TEMPLATE,
    CITATION_QA_TEMPLATE,
    CITATION_REFINE_TEMPLATE,
)

from invariant_rag.errors import OrderWarning
from invariant_rag.prompts import Finding, Recognition, Turn, recognize, report
from invariant_rag.segments import SegmentSet
from llama_index.llms.invariant_rag.tracking import Asker, current_trace, track_spans

_OWN = {
    "no_segments": "Give SegmentBlocks, or mark the nodes (SegmentMarkerPostprocessor).",
    "separate": "Mark the nodes (SegmentMarkerPostprocessor) or give SegmentBlocks, in one message, with the same text "
    "around each.",
    "incomplete": "Pass all nodes of a question in one call, or retrieve fewer. An LLM that is to look at nodes one by "
    "one has find_documents=False.",
    "split": "Pass nodes whole, and mark them (SegmentMarkerPostprocessor) or give SegmentBlocks.",
    "marks": "Mark nodes in the process that runs the model, and pass the text on unchanged.",
    "elsewhere": "Retrieve and ask in one function under @dispatcher.span, or in one workflow; or mark the nodes "
    "(SegmentMarkerPostprocessor), or give SegmentBlocks.",
    "pairwise": "Use InvariantPairwiseEvaluator(llm), or enforce_consensus=True.",
}
_SYNTHESIZER = "Use response_synthesizer=InvariantSynthesizer(llm)"
_SHAPE = ("no_segments", "separate", "incomplete", "split", "marks", "elsewhere")
FIXES: dict[Asker, dict[str, str]] = {
    "call": _OWN,
    "synthesizer": _OWN
    | {
        "no_segments": f"{_SYNTHESIZER}.",
        "separate": f"Write the same text around each node, or use {_SYNTHESIZER[4:]}.",
        "incomplete": f"{_SYNTHESIZER}, which passes all nodes in one call.",
        "split": f"{_SYNTHESIZER}, which passes nodes whole, or retrieve fewer.",
        "marks": f"{_SYNTHESIZER}, or mark nodes in the process that runs the model.",
        "elsewhere": f"{_SYNTHESIZER}, or retrieve and ask in one function under @dispatcher.span.",
    },
    "chat engine": _OWN | dict.fromkeys(_SHAPE, "Use InvariantChatEngine, which passes all nodes whole, in one call."),
    "postprocessor": _OWN
    | dict.fromkeys(_SHAPE, "Use LLMRerank, with a choice_batch_size of at least the number of nodes."),
    "retriever": _OWN
    | dict.fromkeys(_SHAPE, "Retrieve without the LLM (another retriever_mode), and choose by LLMRerank behind it."),
}
"""What to do about a finding, in the words of LlamaIndex, for each that may ask an LLM: it is not the user's call."""

FIND_DOCUMENTS = "Whether nodes that were retrieved in the same trace are segments wherever their text is in a prompt."
STRICT = "Whether to raise an OrderWarning, not only to warn, where the order of nodes may change an answer."
REQUIRE_SEGMENTS = "Whether to raise an OrderWarning for a prompt without any segment."

_TEMPLATES = (
    CITATION_QA_TEMPLATE.template,
    CITATION_REFINE_TEMPLATE.template,
    CITATION_CHAT_CONTENT_QA_TEMPLATE.template_str,
    CITATION_CHAT_CONTENT_REFINE_TEMPLATE.template_str,
    DEFAULT_CHOICE_SELECT_PROMPT.template,
    CHAT_CONTENT_CHOICE_SELECT_PROMPT.template_str,
)
_EXAMPLES = tuple(
    piece
    for template in _TEMPLATES
    for piece in re.split(r"\{\{.*?\}\}|\{%.*?%\}|\{\w+\}", template)
    if re.search(r"(?:Source|Document) 2:", piece)
)
"""Texts of LlamaIndex's templates that show numbered documents as examples of what is to come."""


@dataclass(frozen=True)
class Recognizer:
    """Finds the nodes in what an LLM is asked.

    Attributes:
        find_documents: Whether to look for what was retrieved in the same trace.
        strict: Whether to raise, and not only to warn.
        require_segments: Whether to raise where there is no segment.
        promises: Whether the order of segments is meant to be without effect. If not, there is nothing to warn of.
        routed: Whether a router may answer with a plain model that reads the order given.
    """

    find_documents: bool = True
    strict: bool = False
    require_segments: bool = False
    promises: bool = True
    routed: bool = False

    def recognize(self, turns: Sequence[Turn]) -> Recognition:
        """Find the sets in a conversation, and report what is not understood.

        Raises:
            OrderWarning: Nothing is a segment, and `require_segments` is set; or there is a finding, and `strict` is.
        """
        track_spans()
        trace = current_trace()
        known, elsewhere = (trace.known, trace.elsewhere) if self.find_documents else ((), ())
        found = recognize(turns, known, elsewhere, examples=_EXAMPLES)
        sets = [part for turn in found.turns for part in turn.parts if isinstance(part, SegmentSet)]
        if self.require_segments and not any(map(len, sets)):
            raise OrderWarning("expected segments, got a prompt without any", hint=FIXES[trace.asker]["no_segments"])
        if not self.promises:
            return found
        findings = list(found.findings)
        if self.routed and any(len(each) > 1 for each in sets):
            findings.append(Finding("routing", "the plain model of the router reads them in the order given."))
        if _compares_in_one_order():
            findings.append(Finding("pairwise", "two answers are compared in one order."))
        report(findings, fixes=FIXES[trace.asker], strict=self.strict)
        return Recognition(found.turns, tuple(findings))


def _compares_in_one_order() -> bool:
    """Return whether an evaluator asks for the better of two answers, and does not ask again with the answers swapped.

    LlamaIndex has no spans of evaluators. Frames of coroutines that wait for this call are on the stack.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_get_eval_result":
            asking = frame.f_locals.get("self")
            return isinstance(asking, PairwiseComparisonEvaluator) and not asking._enforce_consensus
        frame = frame.f_back
    return False
