"""Load the cases: a question over the paragraphs of one article, the gold one at any slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.lost_in_the_middle.load import INSTRUCTION, SYSTEM
from invariant_rag_benchmarks.slots import insert_gold, parse_slots
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

NAME = "xquad.en.json"
PUBLIC = f"https://raw.githubusercontent.com/google-deepmind/xquad/master/{NAME}"


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        slots: Slots of the gold paragraph: empty or `all` for all, or comma-separated numbers.
    """

    slots: str = ""


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the file: the other paragraphs of the same article are the distractors."""
    (document,) = read_examples(source.file(NAME, PUBLIC))[:1]
    questions: list[tuple[str, str, list[str], int, Any]] = []
    for article in get_field(document, "data", "the file"):
        title = get_field(article, "title", "an article")
        contexts = [get_field(each, "context", title) for each in get_field(article, "paragraphs", title)]
        for gold, paragraph in enumerate(article["paragraphs"]):
            questions += [(title, contexts[gold], contexts, gold, each) for each in get_field(paragraph, "qas", title)]
    cases = []
    for index, (title, paragraph, contexts, gold, asked) in selection.sample(questions):
        where = f"question {index}"
        others = [*contexts[:gold], *contexts[gold + 1 :]]
        question = get_field(asked, "question", where)
        answers = tuple(each["text"] for each in get_field(asked, "answers", where))
        shown = title.replace("_", " ")
        cases += [
            Case(
                question=str(asked.get("id", index)),
                variant=str(slot),
                prefix=INSTRUCTION,
                segments=tuple(f"\n[Document Title: {shown}] {text}" for text in insert_gold(slot, paragraph, others)),
                suffix=f"\n\nQuestion: {question}\nAnswer:",
                gold=answers,
                query=question,
                system=SYSTEM,
            )
            for slot in parse_slots(settings.slots, len(contexts), range(len(contexts)))
        ]
    return cases
