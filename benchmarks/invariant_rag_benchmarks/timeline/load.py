"""Load the cases: events to sort in the order of a long text, with the text in order and reversed."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import InvalidDataset

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.chunks import split_into_chunks, token_starts
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

NAME = "longdep_qa.jsonl"
PUBLIC = "hub://bigai-nlco/LooGLE/data.zip"
# The last one is the Chinese for "timeline", the name of the type in the first release.
TYPES = frozenset({"timeline_reorder", "timeline reorder", "\u65f6\u95f4\u7ebf"})


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        chunk: Tokens in a segment.
        limit: Tokens of the text that are kept.
    """

    chunk: int = 512
    limit: int = 10_000


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read LooGLE's long-dependency questions, and keep the timelines."""
    questions: list[tuple[str, str, str]] = []
    for index, example in enumerate(read_examples(source.file(NAME, PUBLIC), NAME)):
        questions += _timelines(example, f"example {index}")
    if not questions:
        raise InvalidDataset("expected questions of the type timeline_reorder, got none")
    cases = []
    for index, (text, question, answer) in selection.sample(questions):
        chunks = split_into_chunks(text, token_starts(text, selection.tokenizer), settings.chunk, settings.limit)
        for variant, listed in (("initial", chunks), ("reversed", chunks[::-1])):
            cases.append(
                Case(
                    question=str(index),
                    variant=variant,
                    prefix="Please answer the question based on the long texts below. \n",
                    segments=tuple(listed),
                    suffix=f"\nQuestion: {question}\nAnswer: ",
                    gold=tuple(each.strip() for each in answer.split(",")),
                    query=question,
                )
            )
    return cases


def _timelines(example: Any, where: str) -> list[tuple[str, str, str]]:
    """Return text, question and answer of each timeline, from an example with `qa_pairs` or a flat one."""
    text = example.get("input") or example.get("context") if isinstance(example, dict) else None
    if not text:
        raise InvalidDataset(f"{where}: expected a text under input or context")
    if "question" in example:
        wanted = str(example.get("task") or example.get("type")) in TYPES
        return [(text, example["question"], get_field(example, "answer", where))] if wanted else []
    pairs = get_field(example, "qa_pairs", where)
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
