"""All entries, and their table in the README, which `python tests/entries.py` writes anew."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import entries_engines
import entries_prompts
from entry import Entry

_ALL = [*entries_engines.ENTRIES, *entries_prompts.ENTRIES]
_OWN: dict[str, Entry] = {entry.title: entry for entry in _ALL}
assert len(_OWN) == len(_ALL), "two entries have one title"

_WRAPPED = (
    "`index.as_query_engine(...)`: as it is",
    "`index.as_query_engine(...)`: `streaming=True`",
    "`index.as_query_engine(...)`: `aquery`",
    '`SegmentMarkerPostprocessor`, `response_mode=...`: `"compact"`',
    '`SegmentMarkerPostprocessor`, `response_mode=...`: `"refine"`',
    "`response_synthesizer=InvariantSynthesizer(llm, ...)`: as it is",
    "query engines around others: `SubQuestionQueryEngine`",
    '`index.as_chat_engine(chat_mode=...)`: `"context"`',
    "chat engines with the parts of this package: `ContextChatEngine` with `SegmentMarkerPostprocessor`",
    "`CitationQueryEngine` with the parts of this package: `InvariantSynthesizer`",
    "nodes in other calls: `PromptTemplate`",
    "nodes in `llm.complete(...)`: numbered `[1] ...`",
    "nodes in `llm.complete(...)`, marked: as bullets",
    "`llm.chat`: `SegmentBlock`s",
    "evaluators: `FaithfulnessEvaluator` with nodes as `contexts`",
)
"""Entries of which an LLM behind an API is asked, too."""

ENTRIES = {
    **_OWN,
    **{
        entry.title: entry
        for wrapper in ("canonical", "vote")
        for entry in (_OWN[name].around(wrapper) for name in _WRAPPED)
    },
}

README = Path(__file__).parent.parent / "README.md"
PLACE = re.compile(r"(<!-- entries: .*? -->\n).*?(<!-- end of entries -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return the README with a row of its table for the entries of a topic that behave alike."""
    rows: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for entry in ENTRIES.values():
        rows[entry.topic, {"invariant": "yes", "warns": "no: warns"}[entry.expected], entry.todo].append(entry.name)
    cells = [["entry", "invariant", "what to do"], ["---"] * 3]
    cells += [[f"{topic}: {'; '.join(names)}", *others] for (topic, *others), names in rows.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return PLACE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
