"""Cases: a question over the paragraphs of one article, the gold one at any slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.lost_in_the_middle.load import INSTRUCTION, SYSTEM
from invariant_rag.evaluation.benchmarks.slots import chosen_slots, with_gold_at
from invariant_rag.evaluation.benchmarks.sources import Source, entry, read_records

NAME = "xquad.en.json"
PUBLIC = f"https://raw.githubusercontent.com/google-deepmind/xquad/master/{NAME}"


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        slots: Slots of the gold paragraph: empty or `all` for all, or numbers with commas.
    """

    slots: str = ""


def load(source: Source, settings: Settings, selection: Selection) -> list[Case]:
    """Read the file: the other paragraphs of the same article are the distractors."""
    (document,) = read_records(source.file(NAME, PUBLIC))[:1]
    questions: list[tuple[str, str, list[str], int, Any]] = []
    for article in entry(document, "data", "the file"):
        title = entry(article, "title", "an article")
        contexts = [entry(each, "context", title) for each in entry(article, "paragraphs", title)]
        for gold, paragraph in enumerate(article["paragraphs"]):
            questions += [(title, contexts[gold], contexts, gold, each) for each in entry(paragraph, "qas", title)]
    cases = []
    for place, (title, paragraph, contexts, gold, asked) in selection.of(questions):
        where = f"question {place}"
        others = [*contexts[:gold], *contexts[gold + 1 :]]
        question = entry(asked, "question", where)
        answers = tuple(each["text"] for each in entry(asked, "answers", where))
        shown = title.replace("_", " ")
        cases += [
            Case(
                question=str(asked.get("id", place)),
                variant=str(slot),
                prefix=INSTRUCTION,
                segments=tuple(f"\n[Document Title: {shown}] {text}" for text in with_gold_at(slot, paragraph, others)),
                suffix=f"\n\nQuestion: {question}\nAnswer:",
                gold=answers,
                query=question,
                system=SYSTEM,
            )
            for slot in chosen_slots(settings.slots, len(contexts), range(len(contexts)))
        ]
    return cases
