"""LooGLE's timelines: put events of a long text into order, with the text in order and reversed."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from invariant_rag.errors import InvalidDataset
from pydantic import Field, field_validator

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.tasks.numerals import read_numbers, value_of
from invariant_rag_benchmarks.variants import split_into_chunks, token_starts

NAME = "longdep_qa.jsonl"
PUBLIC = "hub://bigai-nlco/LooGLE/data.zip"
# The last one is the Chinese for "timeline", the name of the type in the first release.
TYPES = frozenset({"timeline_reorder", "timeline reorder", "\u65f6\u95f4\u7ebf"})
_ROMAN = re.compile(r"\b[IVXLCDM]+\b")
_ARABIC = re.compile(r"\b\d+\b")
_MARKED = re.compile(r"(?:^|[\n,;>(])[ \t]*(\d+)(?=[.):,;> \t]*(?:[\n,;>]|\Z)|[.):])")
"""An Arabic numeral as a name: before a sign, or in a list of nothing else. Events have dates and counts, too."""


class TimelineSettings(Settings):
    """Settings of the benchmark."""

    chunk: int = Field(512, ge=1, description="tokens in a segment")
    limit: int = Field(10_000, ge=1, description="tokens of the text that are kept")


class _Asked(Example):
    Q: Text
    A: Text
    type: Text | None = None


class _LongText(Example):
    input: Text | None = None
    context: Text | None = None
    qa_pairs: list[_Asked]

    @field_validator("qa_pairs", mode="before")
    @classmethod
    def _written(cls, pairs: Any) -> Any:
        """Read pairs that are written as JSON, or as Python's literals."""
        if not isinstance(pairs, str):
            return pairs
        try:
            return json.loads(pairs)
        except ValueError:
            try:
                return ast.literal_eval(pairs)
            except (ValueError, SyntaxError) as error:
                raise ValueError(f"cannot be read: {error}") from error


class _Flat(Example):
    input: Text | None = None
    context: Text | None = None
    question: Text
    answer: Text
    task: Text | None = None
    type: Text | None = None


class Timeline(Benchmark[TimelineSettings]):
    """Events to sort in the order of a long text."""

    name = "timeline"
    about = "Put events of a long text into order: a control whose segments are NOT a set."
    paper = "Li et al. 2023, arXiv 2311.04939 (LooGLE)"
    variants = "order of the text"
    settings = TimelineSettings

    def read(self, source: DataSource, settings: TimelineSettings, selection: Selection) -> Iterator[Case]:
        """Read LooGLE's long-dependency questions, and keep the timelines."""
        questions: list[tuple[str, str, str]] = []
        for index, record in enumerate(read_examples(source.file(NAME, PUBLIC), NAME)):
            questions += _timelines(record, f"example {index}")
        if not questions:
            raise InvalidDataset("expected questions of the type timeline_reorder, got none")
        for index, (text, question, answer) in selection.sample(questions):
            chunks = split_into_chunks(
                text, token_starts(text, selection.load_tokenizer), settings.chunk, settings.limit
            )
            for variant, listed in (("initial", chunks), ("reversed", chunks[::-1])):
                yield Case(
                    question=str(index),
                    variant=variant,
                    prefix="Please answer the question based on the long texts below. \n",
                    segments=tuple(listed),
                    suffix=f"\nQuestion: {question}\nAnswer: ",
                    gold=tuple(each.strip() for each in answer.split(",")),
                    query=question,
                )

    def score(self, case: Case, output: str) -> Scored:
        """Score the order in which the numerals of the question are first mentioned."""
        named, count = named_events(output, case.gold), len(case.gold)
        places = [case.gold.index(each) for each in named] if len(named) == count else None
        scores = {
            "accuracy": float(tuple(named) == case.gold),
            "location_agreement": location_agreement(places, count),
            "square_agreement": square_agreement(places, count),
            "swap_agreement": swap_agreement(places, count),
        }
        return Scored(",".join(named), scores)


def _timelines(record: Any, where: str) -> list[tuple[str, str, str]]:
    """Return text, question and answer of each timeline, from a record with `qa_pairs` or a flat one."""
    read: _Flat | _LongText
    if isinstance(record, dict) and "question" in record:
        read = flat = parse_example(_Flat, record, where)
        asked = [_Asked(Q=flat.question, A=flat.answer, type=flat.task or flat.type)]
    else:
        read = parse_example(_LongText, record, where)
        asked = read.qa_pairs
    text = read.input or read.context
    if not text:
        raise InvalidDataset(f"{where}: expected a text under input or context")
    return [(text, each.Q, each.A) for each in asked if each.type in TYPES]


def location_agreement(places: Sequence[int] | None, count: int) -> float:
    """Return 1 - LooGLE's location mean deviation relative to that of the reversed order; 0 if there is no order.

    >>> location_agreement([0, 1, 2], 3), location_agreement([2, 1, 0], 3), location_agreement(None, 3)
    (1.0, 0.0, 0.0)
    """
    farthest = count * count // 2
    if places is None or not farthest:
        return float(places is not None)
    return 1.0 - sum(abs(place - index) for index, place in enumerate(places)) / farthest


def square_agreement(places: Sequence[int] | None, count: int) -> float:
    """Return 1 - LooGLE's location square deviation relative to that of the reversed order; 0 if there is no order.

    >>> square_agreement([0, 1, 2], 3), square_agreement([1, 0, 2], 3), square_agreement([2, 1, 0], 3)
    (1.0, 0.75, 0.0)
    """
    farthest = count * (count * count - 1) // 3
    if places is None or not farthest:
        return float(places is not None)
    return 1.0 - sum((place - index) ** 2 for index, place in enumerate(places)) / farthest


def swap_agreement(places: Sequence[int] | None, count: int) -> float:
    """Return 1 - LooGLE's swap deviation (swaps that sort the order) over its maximum; 0 if there is no order."""
    if places is None or count < 2:
        return float(places is not None)
    seen: set[int] = set()
    cycles = 0
    for start in range(count):
        cycles += start not in seen
        while start not in seen:
            seen.add(start)
            start = places[start]  # noqa: PLW2901 - follow the cycle
    return 1.0 - (count - cycles) / (count - 1)


def named_events(output: str, gold: Sequence[str]) -> list[str]:
    """Return the numerals of the question in the order in which an output first names them.

    The file has Arabic numerals, the authors' code Roman ones. An Arabic one is read where it stands as a name, before
    a sign (`2.`, `2)`) or in a list (`2, 1, 3`); if those leave a numeral out, wherever it stands. Where the numerals
    of the question are not used as names, those of another kind are: Roman ones, Arabic ones, or words.

    >>> named_events("2) Opened on 1 May 1965, 1) opened in 1966 with 3 others, 3) closed.", ["1", "2", "3"])
    ['2', '1', '3']
    >>> named_events("II, I, III", ["1", "2", "3"]), named_events("2, 1, 3", ["I", "II", "III"])
    (['2', '1', '3'], ['II', 'I', 'III'])
    """
    roman = any(_ROMAN.fullmatch(each) for each in gold)
    marked = _first_named(_MARKED.findall(output), gold)
    named = marked
    if roman or len(marked) < len(gold):
        named = _first_named((_ROMAN if roman else _ARABIC).findall(output), gold)
    return named if marked or len(named) == len(gold) else _named_otherwise(output, gold) or named


def _named_otherwise(output: str, gold: Sequence[str]) -> list[str]:
    """Return what an output names in numerals of another kind; empty if it is not plain which, or in which order."""
    events = {value_of(each): each for each in gold}
    numbers = [each for each in events if each is not None]
    return [events[each] for each in read_numbers(output, numbers)] if len(numbers) == len(gold) else []


def _first_named(numerals: Sequence[str], gold: Sequence[str]) -> list[str]:
    return [each for each in dict.fromkeys(numerals) if each in gold]
