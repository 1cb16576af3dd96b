"""All entries: every way in which retrieved nodes reach the model, and what each gives for other orders of them."""

from __future__ import annotations

import entries_by_hand
import entries_chat
import entries_engines
import entries_judges
import entries_query
from entry import Entry

GROUPS: dict[str, list[Entry]] = {
    "query engines": entries_query.ENTRIES,
    "engines, retrievers and postprocessors around others": entries_engines.ENTRIES,
    "chat engines, workflows and agents": entries_chat.ENTRIES,
    "prompts by hand": entries_by_hand.ENTRIES,
    "evaluators": entries_judges.ENTRIES,
}
_OWN = [each for entries in GROUPS.values() for each in entries]

WRAPPED = (
    "`index.as_query_engine()`",
    "`as_query_engine(streaming=True)`",
    "`as_query_engine().aquery`",
    '`as_query_engine(response_mode="compact")`, `SegmentMarkerPostprocessor`',
    '`as_query_engine(response_mode="refine")`, `SegmentMarkerPostprocessor`',
    "`as_query_engine(response_synthesizer=InvariantSynthesizer(llm))`",
    "`CitationQueryEngine.from_args(index)`",
    "`SubQuestionQueryEngine`",
    '`index.as_chat_engine(chat_mode="context")`',
    "`ContextChatEngine`, `SegmentMarkerPostprocessor`",
    "a workflow whose step joins the nodes and calls `llm.acomplete`",
    "`llm.complete`, nodes numbered `[1] ...`, apart from the retriever",
    "`llm.complete`, nodes numbered `[1] ...`, marked",
    "`llm.chat` with `SegmentBlock`s",
    "`FaithfulnessEvaluator.evaluate(contexts=...)`",
)
"""Entries that are asked of an LLM behind an API, too."""

GROUPS["LLMs behind an API"] = [
    next(each for each in _OWN if each.name == name).around(wrapper)
    for wrapper in ("canonical", "vote")
    for name in WRAPPED
]
ENTRIES = {each.name: each for entries in GROUPS.values() for each in entries}
assert len(ENTRIES) == sum(map(len, GROUPS.values())), "two entries have one name"
