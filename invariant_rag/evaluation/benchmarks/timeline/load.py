"""Cases: events to put into the order in which a long text tells them; the text in order, and reversed."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import InvalidDataset
from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.chunks import chunked, token_starts
from invariant_rag.evaluation.benchmarks.sources import Source, entry, read_records

NAME = "longdep_qa.jsonl"
PUBLIC = "hub://bigai-nlco/LooGLE/data.zip"
# The last one means "timeline": the type as the first release wrote it.
TYPES = frozenset({"timeline_reorder", "timeline reorder", "\u65f6\u95f4\u7ebf"})


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        chunk: Tokens in a segment.
        limit: Tokens of the text that are kept.
    """

    chunk: int = 512
    limit: int = 10_000


def load(source: Source, settings: Settings, selection: Selection) -> list[Case]:
    """Read LooGLE's long-dependency questions, and keep the timelines."""
    questions: list[tuple[str, str, str]] = []
    for place, record in enumerate(read_records(source.file(NAME, PUBLIC), NAME)):
        questions += _timelines(record, f"record {place}")
    if not questions:
        raise InvalidDataset("expected questions of the type timeline_reorder, got none")
    cases = []
    for place, (text, question, answer) in selection.of(questions):
        chunks = chunked(text, token_starts(text, selection.tokenizer), settings.chunk, settings.limit)
        for variant, listed in (("initial", chunks), ("reversed", chunks[::-1])):
            cases.append(
                Case(
                    question=str(place),
                    variant=variant,
                    prefix="Please answer the question based on the long texts below. \n",
                    segments=tuple(listed),
                    suffix=f"\nQuestion: {question}\nAnswer: ",
                    gold=tuple(each.strip() for each in answer.split(",")),
                    query=question,
                )
            )
    return cases


def _timelines(record: Any, where: str) -> list[tuple[str, str, str]]:
    """Text, question and answer of each timeline: of a record with `qa_pairs`, or of a flat one."""
    text = record.get("input") or record.get("context") if isinstance(record, dict) else None
    if not text:
        raise InvalidDataset(f"{where}: expected a text under input or context")
    if "question" in record:
        wanted = str(record.get("task") or record.get("type")) in TYPES
        return [(text, record["question"], entry(record, "answer", where))] if wanted else []
    pairs = entry(record, "qa_pairs", where)
    if isinstance(pairs, str):
        try:
            pairs = json.loads(pairs)
        except ValueError:
            pairs = _literal(pairs, where)
    return [(text, each["Q"], each["A"]) for each in pairs if isinstance(each, dict) and each.get("type") in TYPES]


def _literal(written: str, where: str) -> Any:
    try:
        return ast.literal_eval(written)
    except (ValueError, SyntaxError) as error:
        raise InvalidDataset(f"{where}: qa_pairs cannot be read: {error}") from error
