"""Recognise the sets of segments in what an LLM of this package is asked, and say what is not understood."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llama_index.core.prompts.chat_prompts import CHAT_CONTENT_CHOICE_SELECT_PROMPT
from llama_index.core.prompts.default_prompts import DEFAULT_CHOICE_SELECT_PROMPT
from llama_index.core.query_engine.citation_query_engine import (
    CITATION_CHAT_CONTENT_QA_TEMPLATE,
    CITATION_CHAT_CONTENT_REFINE_TEMPLATE,
    CITATION_QA_TEMPLATE,
    CITATION_REFINE_TEMPLATE,
)

from invariant_rag.errors import OrderWarning
from invariant_rag.prompts import Finding, KnownDocument, Recognition, Retrieval, Turn, recognize, report
from invariant_rag.segments import SegmentSet
from llama_index.llms.invariant_rag.tracking import retrieved, track_spans

FIXES = {
    "no_segments": "Use response_synthesizer=InvariantSynthesizer(llm), SegmentMarkerPostprocessor, or SegmentBlocks.",
    "separate": "Write the same text around each node, or use response_synthesizer=InvariantSynthesizer(llm).",
    "incomplete": "Use response_synthesizer=InvariantSynthesizer(llm), which passes all nodes in one call.",
    "split": "Use response_synthesizer=InvariantSynthesizer(llm), which passes nodes whole, or retrieve fewer.",
    "marks": "Use response_synthesizer=InvariantSynthesizer(llm), or mark nodes in the process that runs the model.",
    "elsewhere": "Retrieve and ask in one function under @dispatcher.span, or in one workflow; or mark the nodes "
    "(SegmentMarkerPostprocessor), or give SegmentBlocks. InvariantSynthesizer(llm) does it for query engines.",
}
"""What to do about a finding, in the words of LlamaIndex."""

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
        known: Sequence[Retrieval] = ()
        elsewhere: Sequence[KnownDocument] = ()
        if self.find_documents:
            track_spans()
            known, elsewhere = retrieved()
        found = recognize(turns, known, elsewhere, examples=_EXAMPLES)
        sets = [part for turn in found.turns for part in turn.parts if isinstance(part, SegmentSet)]
        if self.require_segments and not any(map(len, sets)):
            raise OrderWarning("expected segments, got a prompt without any", hint=FIXES["no_segments"])
        if not self.promises:
            return found
        findings = list(found.findings)
        if self.routed and any(len(each) > 1 for each in sets):
            findings.append(Finding("routing", "the plain model of the router reads them in the order given."))
        report(findings, fixes=FIXES, strict=self.strict)
        return Recognition(found.turns, tuple(findings))
