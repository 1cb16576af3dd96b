"""XQuAD: questions over the five paragraphs of one article, so that every distractor is on the same matter."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.tasks.lost_in_the_middle import INSTRUCTION, SYSTEM, score_first_line
from invariant_rag_benchmarks.variants import insert_gold, parse_slots

NAME = "xquad.en.json"
PUBLIC = f"https://raw.githubusercontent.com/google-deepmind/xquad/master/{NAME}"


class XQuADSettings(Settings):
    """Settings of the benchmark."""

    slots: str = Field("", description="slots with commas; empty: all")


class _Answer(Example):
    text: Text


class _Question(Example):
    id: Text
    question: Text
    answers: list[_Answer]


class _Paragraph(Example):
    context: Text
    qas: list[_Question]


class _Article(Example):
    title: Text
    paragraphs: list[_Paragraph]


class _File(Example):
    data: list[_Article]


class XQuAD(Benchmark[XQuADSettings]):
    """Questions over the paragraphs of one article, the one with the answer at any slot."""

    name = "xquad"
    about = "Questions over the five paragraphs of one article, the gold one at any slot."
    paper = "Artetxe et al. 2020, arXiv 1910.11856"
    variants = "gold slot, from 0"
    settings = XQuADSettings
    metric = "best_subspan_em"

    def read(self, source: DataSource, settings: XQuADSettings, selection: Selection) -> Iterator[Case]:
        """Read the file: the other paragraphs of the same article are the distractors."""
        read = read_examples(source.file(NAME, PUBLIC))
        articles = parse_example(_File, read[0] if read else None, "the file").data
        questions = [
            (article, gold, asked)
            for article in articles
            for gold, paragraph in enumerate(article.paragraphs)
            for asked in paragraph.qas
        ]
        for _, (article, gold, asked) in selection.sample(questions):
            contexts = [each.context for each in article.paragraphs]
            title, others = article.title.replace("_", " "), [*contexts[:gold], *contexts[gold + 1 :]]
            for slot in parse_slots(settings.slots, len(contexts), range(len(contexts))):
                listed = insert_gold(slot, contexts[gold], others)
                yield Case(
                    question=asked.id,
                    variant=str(slot),
                    prefix=INSTRUCTION,
                    segments=tuple(f"\n[Document Title: {title}] {text}" for text in listed),
                    suffix=f"\n\nQuestion: {asked.question}\nAnswer:",
                    gold=tuple(each.text for each in asked.answers),
                    query=asked.question,
                    system=SYSTEM,
                )

    def score(self, case: Case, output: str) -> Scored:
        """Score the first line; see `score_first_line`."""
        return score_first_line(case, output)
