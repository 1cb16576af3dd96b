"""Load the cases: one gold passage and its distractors, in several orders; or no passages (closed book)."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import DatasetUnavailable, InvalidChoice, InvalidDataset
from invariant_rag.prompts import DEFAULT_SYSTEM

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.choices import parse_option_orders
from invariant_rag_benchmarks.slots import every_fifth, insert_gold, parse_slots
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

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
TEMPLATES = ("paper", "one-sentence", "plain")
FILES = (10, 20, 30)
"""Numbers of documents in the published files. Fewer are the gold one and the first of the others."""
MOST_ORDERED = 6
"""Largest number of documents to permute: 720 orders."""
_PRINTED = re.compile(r"^Document \[\d+\]\(Title: (.*?)\) ", re.MULTILINE)


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        documents: Documents in a prompt: 10, 20 or 30 in the paper; 0 for closed book.
        slots: Gold slots: empty for those of the paper, `all`, or comma-separated numbers.
        orders: Instead of slots: orders of all documents, the gold one first in order 0: `all`, `ends`, `rotations`, or
            numbers of orders. At most six documents. Empty: slots.
        index: Whether every document is numbered ("index bias" in the paper of RoToR).
        template: `paper`; `one-sentence`: the prompt of PINE (Appendix E.3); or `plain`: this library's own prompt for
            a question over documents.
    """

    documents: int = 20
    slots: str = ""
    orders: str = ""
    index: bool = False
    template: str = "paper"


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the official files, the oracle file (its distractors are drawn from it), or printed prompts."""
    _check(settings)
    count = settings.documents
    if not count:
        examples = read_examples(source.file(ORACLE, f"{PUBLIC}{ORACLE}"))
        return [_closed_book(str(index), example, settings) for index, example in selection.sample(examples)]
    total = next((size for size in FILES if size >= count), count)
    name = f"nq-open-{total}_total_documents_gold_at_0.jsonl.gz"
    tree = f"{total}_total_documents/{name}"  # as in the authors' folder qa_data, and in their repository around it
    folder = source.path
    there = [each for each in (tree, f"qa_data/{tree}") if folder is not None and (folder / each).is_file()]
    path = source.file(there[0] if there else name, f"{PUBLIC}{tree}")
    examples = read_examples(path)
    if any("input" in example for example in examples):
        examples = _parse_prompts(examples, path.with_name(ORACLE), source)
    orders = _orders(settings)
    pool = [_documents(example, f"example {index}")[0] for index, example in enumerate(examples)]
    cases = []
    for index, example in selection.sample(examples):
        where = f"example {index}"
        gold, others = _documents(example, where)
        if not others:
            others = _draw_distractors(gold, pool, count - 1, f"{selection.seed} {index}")
        if len(others) < count - 1:
            raise InvalidDataset(f"{where}: expected at least {count} documents, got {len(others) + 1}")
        documents = [gold, *others[: count - 1]]
        for variant, order in orders.items():
            cases.append(_case(str(index), variant, [documents[place] for place in order], example, settings))
    return cases


def _check(settings: Settings) -> None:
    if settings.template not in TEMPLATES:
        raise InvalidChoice(f"template: expected {', '.join(TEMPLATES)}, got {settings.template!r}")
    if settings.orders and settings.slots:
        raise InvalidChoice(f"expected slots or orders, got slots={settings.slots!r} and orders={settings.orders!r}")
    if settings.orders and not 1 <= settings.documents <= MOST_ORDERED:
        raise InvalidChoice(f"orders: expected 1 to {MOST_ORDERED} documents, got {settings.documents}")


def _orders(settings: Settings) -> dict[str, list[int]]:
    """Return the order of the documents in every variant: indices into the gold one followed by the others."""
    count = settings.documents
    if settings.orders:
        return {"".join(map(str, order)): [*order] for order in parse_option_orders(settings.orders, count)}
    slots = parse_slots(settings.slots, count, every_fifth(count))
    return {str(slot): insert_gold(slot, 0, range(1, count)) for slot in slots}


def _documents(example: Any, where: str) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Return title and text of the gold document, and of the other documents in their order."""
    contexts = get_field(example, "ctxs", where)
    gold = [each for each in contexts if each.get("isgold")]
    if len(gold) != 1:
        raise InvalidDataset(f"{where}: expected one document with isgold, got {len(gold)}")
    pairs = [
        (get_field(each, "title", where), get_field(each, "text", where)) for each in contexts if each is not gold[0]
    ]
    return (get_field(gold[0], "title", where), get_field(gold[0], "text", where)), pairs


def _draw_distractors(
    gold: tuple[str, str], pool: Sequence[tuple[str, str]], count: int, seed: str
) -> list[tuple[str, str]]:
    """Draw distractors for a file without any: gold documents of other questions."""
    others = sorted({each for each in pool if each != gold})
    if len(others) < count:
        raise InvalidDataset(f"expected at least {count + 1} different gold documents to draw from, got {len(pool)}")
    return random.Random(seed).sample(others, count)


def _parse_prompts(examples: Sequence[Any], oracle: Any, source: DataSource) -> list[Any]:
    """Parse printed prompts. Gold passage and accepted answers come from the oracle file in the same folder."""
    if not oracle.is_file():
        raise DatasetUnavailable(f"expected {ORACLE} beside the printed prompts: it holds the accepted answers")
    known = {example["question"]: example for example in read_examples(source.file_beside(oracle))}
    found = []
    for index, example in enumerate(examples):
        text = get_field(example, "input", f"example {index}")
        head, mark, question = text.rpartition("\n\nQuestion: ")
        pieces = _PRINTED.split(head)[1:]
        if not mark or not pieces:
            continue  # a prompt of another benchmark
        question = question.removesuffix("\nAnswer:")
        if question not in known:
            raise InvalidDataset(f"example {index}: {question!r} is not in {ORACLE}")
        gold = known[question]["ctxs"][0]["text"]
        documents = [
            {"title": title, "text": body.rstrip("\n"), "isgold": body.strip() == gold.strip()}
            for title, body in zip(pieces[::2], pieces[1::2], strict=True)
        ]
        found.append({"question": question, "answers": known[question]["answers"], "ctxs": documents})
    return found


def _closed_book(name: str, example: Any, settings: Settings) -> Case:
    question = get_field(example, "question", f"example {name}")
    return Case(
        question=name,
        variant="closed book",
        prefix="",
        segments=(),
        suffix=f"Question: {question}\nAnswer:",
        gold=tuple(get_field(example, "answers", f"example {name}")),
        query=question,
        system=SYSTEM if settings.template == "paper" else "",
    )


def _case(name: str, variant: str, documents: list[tuple[str, str]], example: Any, settings: Settings) -> Case:
    question = get_field(example, "question", f"example {name}")
    if settings.template == "plain":
        system, prefix, suffix = DEFAULT_SYSTEM, "", f"\nQuestion: {question}"
        segments = [
            f"Document (Title: {title}): {text}\n" if title else f"Document: {text}\n" for title, text in documents
        ]
    elif settings.template == "one-sentence":
        # PINE's user prompt, without a system message of its own; documents as printed in its Appendix F.2.
        system, prefix, suffix = "", INSTRUCTION.replace("answer", "one-sentence answer"), f"\n\nQuestion: {question}"
        segments = [f"\nDocument (Title: {title}) {text}" for title, text in documents]
    else:
        system, prefix, suffix = SYSTEM, INSTRUCTION, f"\n\nQuestion: {question}\nAnswer:"
        segments = [
            f"\nDocument [{number}](Title: {title}) {text}" if settings.index else f"\n[Document Title: {title}] {text}"
            for number, (title, text) in enumerate(documents, start=1)
        ]
    return Case(
        question=name,
        variant=variant,
        prefix=prefix,
        segments=tuple(segments),
        suffix=suffix,
        gold=tuple(get_field(example, "answers", f"example {name}")),
        query=question,
        system=system,
    )
