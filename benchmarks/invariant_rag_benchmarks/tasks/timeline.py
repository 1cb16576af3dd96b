"""LooGLE's timelines: put events of a long text into order, with the text in order and reversed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import Field, field_validator, model_validator

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset
from invariant_rag_benchmarks.variants import split_into_chunks, token_starts

NAME = "longdep_qa.jsonl"
PUBLIC = "hub://bigai-nlco/LooGLE/data.zip"
# The last one is the Chinese for "timeline", the name of the type in the first release.
TYPES = frozenset({"timeline_reorder", "timeline reorder", "\u65f6\u95f4\u7ebf"})
_ROMAN = "I II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI XVII XVIII XIX XX".split()
_NUMERALS = {
    "arabic": (
        # Before a sign, or in a list of nothing else: events have dates and counts, too.
        re.compile(r"(?:^|[\n,;>(])[ \t]*(\d{1,9})(?=[.):,;> \t]*(?:[\n,;>]|\Z)|[.):])"),
        re.compile(r"\b(\d{1,9})\b"),
    ),
    "roman": (re.compile(r"\b([IVX]+)\b"),),
}


class TimelineSettings(Settings):
    """Settings of the benchmark."""

    chunk: int = Field(512, ge=1, description="tokens in a segment")
    limit: int = Field(10_000, ge=1, description="tokens of the text that are kept")


class _Asked(Example):
    Q: Text
    A: Text
    type: Text | None = None


class _LongText(Example):
    input: Text
    qa_pairs: list[_Asked]

    @model_validator(mode="before")
    @classmethod
    def _of_one_question(cls, record: Any) -> Any:
        """Take the form with one question for each record, as the hub has it."""
        if not isinstance(record, dict) or "question" not in record:
            return record
        asked = {"Q": record["question"], "A": record.get("answer"), "type": record.get("task", record.get("type"))}
        return {"input": record.get("context", record.get("input")), "qa_pairs": [asked]}

    @field_validator("qa_pairs", mode="before")
    @classmethod
    def _written(cls, pairs: Any) -> Any:
        """Read pairs that are written as JSON, or as Python's literals."""
        if not isinstance(pairs, str):
            return pairs
        for parse in (json.loads, ast.literal_eval):
            try:
                return parse(pairs)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                continue
        raise ValueError("cannot be read")


class Timeline(Benchmark[TimelineSettings]):
    """Events to sort in the order of a long text."""

    name = "timeline"
    about = "Put events of a long text into order: a control whose segments are NOT a set."
    paper = "Li et al. 2023, arXiv 2311.04939 (LooGLE)"
    variants = "order of the text"
    settings = TimelineSettings

    def read(self, source: DataSource, settings: TimelineSettings, selection: Selection) -> Iterator[Case]:
        """Read LooGLE's long-dependency questions, and keep the timelines."""
        questions: list[tuple[str, _Asked]] = []
        for index, record in enumerate(read_examples(source.file(NAME, PUBLIC), NAME)):
            example = parse_example(_LongText, record, f"example {index}")
            questions += [(example.input, each) for each in example.qa_pairs if each.type in TYPES]
        if not questions:
            raise InvalidDataset("expected questions of the type timeline_reorder, got none")
        for index, (text, asked) in selection.sample(questions):
            starts = token_starts(text, selection.load_tokenizer)
            chunks = split_into_chunks(text, starts, settings.chunk, settings.limit)
            for variant, listed in (("initial", chunks), ("reversed", chunks[::-1])):
                yield Case(
                    question=str(index),
                    variant=variant,
                    prefix="Please answer the question based on the long texts below. \n",
                    segments=tuple(listed),
                    suffix=f"\nQuestion: {asked.Q}\nAnswer: ",
                    gold=tuple(each.strip() for each in asked.A.split(",")),
                    query=asked.Q,
                )

    def score(self, case: Case, output: str) -> Scored:
        """Score 1 if the numerals of all events are first mentioned in the right order."""
        named = named_events(output, case.gold)
        return Scored(",".join(map(str, named)), {"accuracy": float(named == [*map(_value, case.gold)])})


def named_events(output: str, gold: Sequence[str]) -> list[int]:
    """Return the numbers of the events in the order in which an output first names them.

    The official file has Arabic numerals, and the authors' outputs Roman ones. Those of the question's kind are read
    first; if they leave an event out, those of the other kind.

    >>> named_events("2) Opened on 1 May 1965, 1) opened in 1966 with 3 others, 3) closed.", ["1", "2", "3"])
    [2, 1, 3]
    >>> named_events("II, I, III", ["1", "2", "3"]), named_events("2, 1, 3", ["I", "II", "III"])
    ([2, 1, 3], [2, 1, 3])
    """
    wanted, named = [*map(_value, gold)], list[int]()
    for kind in ("roman", "arabic") if any(each.isalpha() for each in gold) else ("arabic", "roman"):
        for pattern in _NUMERALS[kind]:
            values = dict.fromkeys(_value(each) for each in pattern.findall(output) if each.isdigit() or each in _ROMAN)
            named = [each for each in values if each in wanted]
            if len(named) == len(wanted):
                return named
    return named


def _value(numeral: str) -> int:
    bare = numeral.strip("()[]. ")
    return _ROMAN.index(bare) + 1 if bare in _ROMAN else int(bare)
