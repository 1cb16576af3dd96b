"""Cases: one gold passage and its distractors, with the gold passage moved from slot to slot."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import DatasetUnavailable, InvalidChoice, InvalidDataset
from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.slots import chosen_slots, every_fifth, with_gold_at
from invariant_rag.evaluation.benchmarks.sources import Source, entry, read_records
from invariant_rag.prompts import DEFAULT_SYSTEM

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
_PRINTED = re.compile(r"^Document \[\d+\]\(Title: (.*?)\) ", re.MULTILINE)


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        documents: Documents in a prompt: 10, 20 or 30 in the paper.
        slots: Gold slots: empty for those of the paper, `all`, or numbers with commas.
        index: Whether every document shows its number ("index bias").
        template: `paper`, or `plain`: this library's own prompt for a question over documents.
    """

    documents: int = 20
    slots: str = ""
    index: bool = False
    template: str = "paper"


def load(source: Source, settings: Settings, selection: Selection) -> list[Case]:
    """Read the official files, the oracle file (distractors are drawn), or printed prompts."""
    if settings.template not in {"paper", "plain"}:
        raise InvalidChoice(f"template: expected paper or plain, got {settings.template!r}")
    count = settings.documents
    name = f"nq-open-{count}_total_documents_gold_at_0.jsonl.gz"
    path = source.file(name, f"{PUBLIC}{count}_total_documents/{name}")
    records = read_records(path)
    if any("input" in record for record in records):
        records = _printed(records, path.with_name(ORACLE), source)
    slots = chosen_slots(settings.slots, count, every_fifth(count))
    pool = [_documents(record, f"record {place}")[0] for place, record in enumerate(records)]
    cases = []
    for place, record in selection.of(records):
        where = f"record {place}"
        gold, others = _documents(record, where)
        if not others:
            others = _drawn(gold, pool, count - 1, f"{selection.seed} {place}")
        if len(others) < count - 1:
            raise InvalidDataset(f"{where}: expected at least {count} documents, got {len(others) + 1}")
        for slot in slots:
            documents = with_gold_at(slot, gold, others[: count - 1])
            cases.append(_case(str(place), slot, documents, record, settings))
    return cases


def _documents(record: Any, where: str) -> tuple[tuple[str, str], list[tuple[str, str]]]:
    """Title and text of the gold document, and of the others in their order."""
    contexts = entry(record, "ctxs", where)
    gold = [each for each in contexts if each.get("isgold")]
    if len(gold) != 1:
        raise InvalidDataset(f"{where}: expected one document with isgold, got {len(gold)}")
    pairs = [(entry(each, "title", where), entry(each, "text", where)) for each in contexts if each is not gold[0]]
    return (entry(gold[0], "title", where), entry(gold[0], "text", where)), pairs


def _drawn(gold: tuple[str, str], pool: Sequence[tuple[str, str]], count: int, seed: str) -> list[tuple[str, str]]:
    """Distractors where the file has none: gold documents of other questions."""
    others = sorted({each for each in pool if each != gold})
    if len(others) < count:
        raise InvalidDataset(f"expected at least {count + 1} different gold documents to draw from, got {len(pool)}")
    return random.Random(seed).sample(others, count)


def _printed(records: Sequence[Any], oracle: Any, source: Source) -> list[Any]:
    """Take printed prompts apart. Gold passage and accepted answers come from the oracle file beside them."""
    if not oracle.is_file():
        raise DatasetUnavailable(f"expected {ORACLE} beside the printed prompts: it holds the accepted answers")
    known = {record["question"]: record for record in read_records(source.file_beside(oracle))}
    found = []
    for place, record in enumerate(records):
        text = entry(record, "input", f"record {place}")
        head, mark, question = text.rpartition("\n\nQuestion: ")
        pieces = _PRINTED.split(head)[1:]
        if not mark or not pieces:
            continue  # a prompt of another benchmark
        question = question.removesuffix("\nAnswer:")
        if question not in known:
            raise InvalidDataset(f"record {place}: {question!r} is not in {ORACLE}")
        gold = known[question]["ctxs"][0]["text"]
        documents = [
            {"title": title, "text": body.rstrip("\n"), "isgold": body.strip() == gold.strip()}
            for title, body in zip(pieces[::2], pieces[1::2], strict=True)
        ]
        found.append({"question": question, "answers": known[question]["answers"], "ctxs": documents})
    return found


def _case(name: str, slot: int, documents: list[tuple[str, str]], record: Any, settings: Settings) -> Case:
    question = entry(record, "question", f"record {name}")
    if settings.template == "plain":
        system, prefix, suffix = DEFAULT_SYSTEM, "", f"\nQuestion: {question}"
        segments = [
            f"Document (Title: {title}): {text}\n" if title else f"Document: {text}\n" for title, text in documents
        ]
    else:
        system, prefix, suffix = SYSTEM, INSTRUCTION, f"\n\nQuestion: {question}\nAnswer:"
        segments = [
            f"\nDocument [{place}](Title: {title}) {text}" if settings.index else f"\n[Document Title: {title}] {text}"
            for place, (title, text) in enumerate(documents, start=1)
        ]
    return Case(
        question=name,
        variant=str(slot),
        prefix=prefix,
        segments=tuple(segments),
        suffix=suffix,
        gold=tuple(entry(record, "answers", f"record {name}")),
        query=question,
        system=system,
    )
