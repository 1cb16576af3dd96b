"""What an audit asks: questions with the chunks that were retrieved for them, from a file, from objects, or live."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from invariant_rag.errors import InvalidQuestion
from invariant_rag.evaluation.metrics import best_subspan_em
from invariant_rag.segments import Segment, plain_rendering

FIELDS = ("id", "question", "segments", "answers", "answer", "gold", "pairwise")
"""Keys of a record in a .jsonl file, and of a mapping."""

COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer", "pairwise")
"""Columns of a .csv file, which has one row per segment."""

Retrieve = Callable[[str], Iterable[Any]]


@dataclass(frozen=True)
class Question:
    """A question, the segments that were retrieved for it, and what is known about the right answer.

    Attributes:
        text: The question.
        segments: The segments in the order in which the system would be given them.
        answers: Gold answers: any of them is right. Empty where none is known.
        gold: Indices of the segments that hold the answer; of a pairwise record, the better response.
        pairwise: Whether the two segments are responses of which the system names the better one.
        id: How reports call the question.
    """

    text: str
    segments: tuple[Segment, ...]
    answers: tuple[str, ...] = ()
    gold: tuple[int, ...] = ()
    pairwise: bool = False
    id: str = ""

    def __post_init__(self) -> None:
        if not all(0 <= index < len(self.segments) for index in self.gold):
            raise InvalidQuestion(f"{self.text!r}: expected gold indices below {len(self.segments)}, got {self.gold}")
        if self.pairwise and len(self.segments) != 2:
            raise InvalidQuestion(f"{self.text!r}: expected two responses to compare, got {len(self.segments)}")
        if self.pairwise and len(self.gold) > 1:
            raise InvalidQuestion(f"{self.text!r}: expected one better response, got {len(self.gold)}")

    @property
    def judged(self) -> bool:
        """Whether right and wrong answers can be told apart."""
        return bool(self.gold if self.pairwise else self.answers)


def read_questions(
    source: str | Path | Iterable[Question | Mapping[str, Any]], retrieve: Retrieve | None
) -> list[Question]:
    """Return the questions of a .jsonl file, a .csv file, or a collection of questions and mappings.

    A mapping, like a line of a .jsonl file, has `question`, and may have `segments` (strings, or mappings with `text`,
    `title`, `score`, `metadata` and `gold`: true), `answers` (or `answer`), `gold` (indices), `pairwise` and `id`. A
    .csv file has one row per segment with the columns `question`, `segment`, and any of `id`, `title`, `score`, `gold`
    (1 or 0), `answer` (several are separated by `|`) and `pairwise`; the rows of one id (or question) belong together.

    Where answers are known but gold segments are not, those that contain an answer, by `best_subspan_em`, are gold,
    unless all of them do.

    Args:
        source: The file or the collection.
        retrieve: What finds the segments of a question that brings none, best first.

    Raises:
        InvalidQuestion: The file cannot be read, a record is not understood, or a question has no segments and there
            is nothing to retrieve them with.
    """
    if isinstance(source, str | Path):
        records = _read_file(Path(source))
    else:
        records = [(f"question {index}", each) for index, each in enumerate(source)]
    if not records:
        raise InvalidQuestion("expected at least one question, got none")
    questions = [_completed(_question(record, place), retrieve, place) for place, record in records]
    return [each if each.id else replace(each, id=str(index)) for index, each in enumerate(questions)]


def as_segment(value: Any) -> Segment:
    """Return a retrieved chunk as a segment: ours, a string, a mapping, or a document or node of a framework."""
    if isinstance(value, Segment | str):
        return Segment.of(value)
    if isinstance(value, Mapping):
        unknown = set(value) - {"text", "title", "score", "metadata", "gold"}
        if unknown or not isinstance(value.get("text"), str):
            raise InvalidQuestion(f"expected a segment with text, title, score and metadata, got {sorted(value)}")
        return Segment(value["text"], value.get("title"), value.get("metadata") or {}, value.get("score"))
    if hasattr(value, "page_content"):  # a document of LangChain
        metadata = dict(value.metadata)
        return Segment(value.page_content, _title(metadata), metadata, metadata.get("score"))
    if hasattr(value, "node"):  # a scored node of LlamaIndex
        metadata = dict(value.node.metadata)
        return Segment(value.node.get_content(), _title(metadata), metadata, value.score)
    raise InvalidQuestion(f"expected a retrieved chunk, got {type(value).__name__}")


def _title(metadata: Mapping[str, Any]) -> str | None:
    title = metadata.get("title")
    return title if isinstance(title, str) else None


def _read_file(path: Path) -> list[tuple[str, Any]]:
    readers: dict[str, Callable[[str, Path], list[tuple[str, Any]]]] = {".jsonl": _read_jsonl, ".csv": _read_csv}
    if path.suffix not in readers:
        raise InvalidQuestion(f"{path}: expected a .jsonl or .csv file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error}") from error
    return readers[path.suffix](text, path)


def _read_jsonl(text: str, path: Path) -> list[tuple[str, Any]]:
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                records.append((f"{path}, line {number}", json.loads(line)))
            except json.JSONDecodeError as error:
                raise InvalidQuestion(f"{path}, line {number}: expected JSON: {error}") from error
    return records


def _read_csv(text: str, path: Path) -> list[tuple[str, Any]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns = list(reader.fieldnames or ())
    if "question" not in columns or set(columns) - set(COLUMNS):
        raise InvalidQuestion(f"{path}: expected columns out of {', '.join(COLUMNS)}, with question; got {columns}")
    records: dict[str, dict[str, Any]] = {}
    for row in reader:
        place = f"{path}, line {reader.line_num}"
        if None in row or None in row.values():
            raise InvalidQuestion(f"{place}: expected {len(columns)} fields")
        record = records.setdefault(
            row.get("id") or row["question"],
            {
                "id": row.get("id", ""),
                "question": row["question"],
                "answers": [each.strip() for each in row.get("answer", "").split("|") if each.strip()],
                "pairwise": _truth(row.get("pairwise", ""), place),
                "segments": [],
            },
        )
        if row.get("segment"):
            record["segments"].append(
                {
                    "text": row["segment"],
                    "title": row.get("title") or None,
                    "score": _number(row.get("score", ""), place),
                    "gold": _truth(row.get("gold", ""), place),
                }
            )
    return [(f"{path}, {key!r}", record) for key, record in records.items()]


def _truth(cell: str, place: str) -> bool:
    values = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
    if cell.strip().lower() not in values:
        raise InvalidQuestion(f"{place}: expected 1 or 0, got {cell!r}")
    return values[cell.strip().lower()]


def _number(cell: str, place: str) -> float | None:
    try:
        return float(cell) if cell.strip() else None
    except ValueError:
        raise InvalidQuestion(f"{place}: expected a number, got {cell!r}") from None


def _question(record: Any, place: str) -> Question:
    if isinstance(record, Question):
        return record
    if not isinstance(record, Mapping) or set(record) - set(FIELDS) or not isinstance(record.get("question"), str):
        got = sorted(record) if isinstance(record, Mapping) else type(record).__name__
        raise InvalidQuestion(f"{place}: expected a mapping with keys out of {', '.join(FIELDS)}, got {got}")
    given = record.get("segments") or ()
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        raise InvalidQuestion(f"{place}: expected segments in a list, got {type(given).__name__}")
    listed = list(given)
    marked = [index for index, each in enumerate(listed) if isinstance(each, Mapping) and each.get("gold")]
    return Question(
        record["question"],
        tuple(as_segment(each) for each in listed),
        tuple(map(str, _several(record.get("answers", record.get("answer")), "answers", place, str | int | float))),
        tuple(sorted({*_several(record.get("gold"), "gold", place, int), *marked})),
        bool(record.get("pairwise")),
        str(record.get("id", "")),
    )


def _several(value: Any, name: str, place: str, kind: Any) -> Sequence[Any]:
    """Return one value, or several, as several."""

    def fits(each: Any) -> bool:
        return isinstance(each, kind) and not isinstance(each, bool)

    listed = () if value is None else (value,) if fits(value) else value
    if not isinstance(listed, list | tuple) or not all(map(fits, listed)):
        what = "an index" if kind is int else "a text"
        raise InvalidQuestion(f"{place}: expected {name} as {what} or a list of them, got {value!r}")
    return listed


def _completed(question: Question, retrieve: Retrieve | None, place: str) -> Question:
    if not question.segments:
        if retrieve is None:
            raise InvalidQuestion(f"{place}: no segments, and no retriever to find them with")
        question = replace(question, segments=tuple(as_segment(each) for each in retrieve(question.text)))
    return question if question.gold or question.pairwise else replace(question, gold=_holding(question))


def _holding(question: Question) -> tuple[int, ...]:
    """Return the segments in which a gold answer is found; none where all of them hold one."""
    known: Sequence[str] = question.answers
    holding = [index for index, each in enumerate(question.segments) if best_subspan_em(plain_rendering(each), known)]
    return tuple(holding) if len(holding) < len(question.segments) else ()
