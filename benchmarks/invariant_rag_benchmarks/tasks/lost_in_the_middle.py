"""Lost in the Middle: one gold passage and its distractors, in several orders; or no passages (closed book)."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from invariant_rag.audit.metrics import best_subspan_em, exact_match, normalize_answer
from invariant_rag.errors import DatasetUnavailable, InvalidChoice, InvalidDataset
from invariant_rag.prompts import DEFAULT_SYSTEM
from pydantic import Field

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.variants import insert_gold, parse_option_orders, parse_slots

PUBLIC = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data/"
ORACLE = "nq-open-oracle.jsonl.gz"
INSTRUCTION = (
    "Write a high-quality answer for the given question using only the provided search results "
    "(some of which might be irrelevant).\n"
)
# The system message that the repository's Llama-2 script uses, and RoToR with it.
SYSTEM = (
    "You are a helpful, respectful and honest assistant. Always answer as helpfully as possible, while being safe. "
    "Please ensure that your responses are socially unbiased and positive in nature. If a question does not make any "
    "sense, or is not factually coherent, explain why instead of answering something not correct. If you don't know "
    "the answer to a question, please don't share false information."
)
FILES = (10, 20, 30)
"""Numbers of documents in the published files. Fewer are the gold one and the first of the others."""
MOST_ORDERED = 6
"""Largest number of documents to permute: 720 orders."""
_PRINTED = re.compile(r"^Document \[\d+\]\(Title: (.*?)\) ", re.MULTILINE)

Document: TypeAlias = tuple[str, str]
"""Title and text."""


class LostInTheMiddleSettings(Settings):
    """Settings of the benchmark."""

    documents: int = Field(20, ge=0, description="documents in a prompt; 10, 20 and 30 in the paper; 0: closed book")
    slots: str = Field("", description="gold slots: all, or numbers with commas; empty: those of the paper")
    orders: str = Field(
        "", description="instead of slots, for at most six documents: all, ends, rotations, or numbers of orders"
    )
    index: bool = Field(False, description='whether documents are numbered ("index bias" in the paper of RoToR)')
    template: Literal["paper", "one-sentence", "plain"] = Field(
        "paper", description="one-sentence: PINE's prompt (Appendix E.3); plain: this library's own prompt"
    )


class _Context(Example):
    title: Text
    text: Text
    isgold: bool = False


class _Question(Example):
    question: Text
    answers: list[Text]
    ctxs: list[_Context]

    def documents(self, where: str) -> tuple[Document, list[Document]]:
        """Return the gold document, and the others in their order."""
        gold = [each for each in self.ctxs if each.isgold]
        if len(gold) != 1:
            raise InvalidDataset(f"{where}: expected one document with isgold, got {len(gold)}")
        return (gold[0].title, gold[0].text), [(each.title, each.text) for each in self.ctxs if each is not gold[0]]


class _Printed(Example):
    input: Text


class LostInTheMiddle(Benchmark[LostInTheMiddleSettings]):
    """Questions over documents, of which one has the answer."""

    name = "lost-in-the-middle"
    about = "Questions over 10, 20 or 30 documents, the gold one at any slot."
    paper = "Liu et al. 2023, arXiv 2307.03172"
    variants = "gold slot from 0, or order of the documents"
    settings = LostInTheMiddleSettings
    metric = "best_subspan_em"

    def read(self, source: DataSource, settings: LostInTheMiddleSettings, selection: Selection) -> Iterator[Case]:
        """Read the official files, the oracle file (its distractors are drawn from it), or printed prompts."""
        count = settings.documents
        if settings.orders and settings.slots:
            raise InvalidChoice(f"expected slots or orders, got {settings.slots!r} and {settings.orders!r}")
        if settings.orders and not 1 <= count <= MOST_ORDERED:
            raise InvalidChoice(f"orders: expected 1 to {MOST_ORDERED} documents, got {count}")
        questions, orders = _questions(source, count), _orders(settings)
        pool = sorted({each.documents(f"example {index}")[0] for index, each in enumerate(questions)})
        for index, question in selection.sample(questions):
            gold, others = question.documents(f"example {index}")
            if not others and count > 1:  # the oracle file: gold documents of other questions are distractors
                different = [each for each in pool if each != gold]
                drawn = random.Random(f"{selection.seed} {index}")
                others = drawn.sample(different, min(count - 1, len(different)))
            if len(others) < count - 1:
                raise InvalidDataset(f"example {index}: expected at least {count} documents, got {len(others) + 1}")
            documents = [gold, *others]
            for variant, order in orders.items():
                yield _case(str(index), variant, [documents[place] for place in order], question, settings)

    def score(self, case: Case, output: str) -> Scored:
        """Score the first line; see `score_first_line`."""
        return score_first_line(case, output)


def score_first_line(case: Case, output: str) -> Scored:
    """Score the first line by `best_subspan_em`, the paper's metric, and by exact match."""
    line = output.strip().split("\n")[0].strip()
    return Scored(
        normalize_answer(line),
        {"best_subspan_em": best_subspan_em(line, case.gold), "exact_match": exact_match(line, case.gold)},
    )


def _questions(source: DataSource, count: int) -> list[_Question]:
    """Return the questions of the smallest published file with enough documents, or of the file at the path."""
    total = next((size for size in FILES if size >= count), count)
    name = f"nq-open-{total}_total_documents_gold_at_0.jsonl.gz"
    path = source.file(*((name, f"{PUBLIC}{total}_total_documents/{name}") if count else (ORACLE, f"{PUBLIC}{ORACLE}")))
    records = read_examples(path)
    if any(isinstance(each, dict) and "input" in each for each in records):
        records = _parse_prompts(records, path.with_name(ORACLE), source)
    return [parse_example(_Question, each, f"example {index}") for index, each in enumerate(records)]


def _orders(settings: LostInTheMiddleSettings) -> dict[str, list[int]]:
    """Return the order of the documents in every variant: indices into the gold one followed by the others."""
    count = settings.documents
    if not count:
        return {"closed book": []}
    if settings.orders:
        return {"".join(map(str, order)): [*order] for order in parse_option_orders(settings.orders, count)}
    slots = parse_slots(settings.slots, count, [0, *range(4, count, 5)])
    return {str(slot): insert_gold(slot, 0, range(1, count)) for slot in slots}


def _parse_prompts(records: Sequence[Any], oracle: Path, source: DataSource) -> list[Any]:
    """Parse printed prompts. Gold passage and accepted answers come from the oracle file in the same folder."""
    if not oracle.is_file():
        raise DatasetUnavailable(f"expected {ORACLE} beside the printed prompts: it holds the accepted answers")
    answered = [parse_example(_Question, each, ORACLE) for each in read_examples(source.read(oracle, ORACLE))]
    known = {each.question: each for each in answered if each.ctxs}
    found = []
    for index, record in enumerate(records):
        head, mark, question = parse_example(_Printed, record, f"example {index}").input.rpartition("\n\nQuestion: ")
        pieces = _PRINTED.split(head)[1:]
        if not mark or not pieces:
            continue  # a prompt of another benchmark
        question = question.removesuffix("\nAnswer:")
        if question not in known:
            raise InvalidDataset(f"example {index}: {question!r} is not in {ORACLE}")
        gold = known[question].ctxs[0].text
        documents = [
            {"title": title, "text": body.rstrip("\n"), "isgold": body.strip() == gold.strip()}
            for title, body in zip(pieces[::2], pieces[1::2], strict=True)
        ]
        found.append({"question": question, "answers": known[question].answers, "ctxs": documents})
    return found


def _case(
    name: str, variant: str, documents: list[Document], asked: _Question, settings: LostInTheMiddleSettings
) -> Case:
    system, prefix, suffix = SYSTEM, INSTRUCTION, f"\n\nQuestion: {asked.question}\nAnswer:"
    segments = [
        f"\nDocument [{number}](Title: {title}) {text}" if settings.index else f"\n[Document Title: {title}] {text}"
        for number, (title, text) in enumerate(documents, start=1)
    ]
    if settings.template == "one-sentence":
        # PINE's user prompt, without a system message of its own; documents as printed in its Appendix F.2.
        system, prefix = "", INSTRUCTION.replace("answer", "one-sentence answer")
        suffix = f"\n\nQuestion: {asked.question}"
        segments = [f"\nDocument (Title: {title}) {text}" for title, text in documents]
    elif settings.template == "plain":
        system, prefix, suffix = DEFAULT_SYSTEM, "", f"\nQuestion: {asked.question}"
        titles = [f"Document (Title: {title})" if title else "Document" for title, _ in documents]
        segments = [f"{title}: {text}\n" for title, (_, text) in zip(titles, documents, strict=True)]
    if not documents:  # closed book
        prefix, suffix = "", f"Question: {asked.question}\nAnswer:"
        system = SYSTEM if settings.template == "paper" else ""
    return Case(
        question=name,
        variant=variant,
        prefix=prefix,
        segments=tuple(segments),
        suffix=suffix,
        gold=tuple(asked.answers),
        query=asked.question,
        system=system,
    )
