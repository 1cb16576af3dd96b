"""Questions of an audit with their retrieved segments: read from a file or objects, or retrieved now."""

from __future__ import annotations

import csv
import inspect
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from invariant_rag.checks import check_flag, check_items, check_text, is_iterable
from invariant_rag.errors import InvalidQuestion, InvalidSegment, UnsupportedCombination
from invariant_rag.evaluation.metrics import best_subspan_em
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.shown import shown

FIELDS = ("id", "question", "segments", "answers", "answer", "gold", "pairwise")
"""Keys of a line of a .jsonl file, and of a mapping."""

COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer", "pairwise")
"""Columns of a .csv file, which has one row per segment."""

Retrieve = Callable[[str], Iterable[Any]]
"""Returns the segments for a question, best first, as anything that `as_segment` takes."""


@dataclass(frozen=True)
class Question:
    """A question with its retrieved segments, and its gold answers and gold segments if they are known.

    Attributes:
        text: The question.
        segments: The segments in retrieval order.
        answers: Gold answers, any of which is right; empty if unknown.
        gold: Indices of the segments that hold the answer; of a pairwise question, of the better response.
        pairwise: Whether the two segments are responses of which the system names the better one.
        id: Name in reports.
    """

    text: str
    segments: tuple[Segment, ...]
    answers: tuple[str, ...] = ()
    gold: tuple[int, ...] = ()
    pairwise: bool = False
    id: str = ""

    def __post_init__(self) -> None:
        check_text("question", self.text, error=InvalidQuestion)
        check_text("id", self.id, error=InvalidQuestion)
        check_flag("pairwise", self.pairwise, error=InvalidQuestion)
        for name, kind in (("segments", Segment), ("answers", str), ("gold", Integral)):
            listed = check_items(name, getattr(self, name), kind, error=InvalidQuestion)
            object.__setattr__(self, name, tuple(listed))
        if not all(0 <= index < len(self.segments) for index in self.gold):
            raise InvalidQuestion(f"{self.text!r}: expected gold indices below {len(self.segments)}, got {self.gold}")
        if self.pairwise and len(self.segments) != 2:
            raise InvalidQuestion(f"{self.text!r}: expected two responses to compare, got {len(self.segments)}")
        if self.pairwise and len(self.gold) > 1:
            raise InvalidQuestion(f"{self.text!r}: expected one better response, got {len(self.gold)}")

    @property
    def has_gold(self) -> bool:
        """Whether answers can be scored."""
        return bool(self.gold if self.pairwise else self.answers)


def read_questions(
    source: str | Path | Iterable[Question | Mapping[str, Any]], retrieve: Retrieve | None
) -> list[Question]:
    """Read the questions of a .jsonl file, a .csv file, or a collection of questions and mappings.

    A mapping, like a line of a .jsonl file, has `question`, and may have `segments` (strings, or mappings with `text`,
    `title`, `score`, `metadata` and `gold`: true), `answers` (or `answer`), `gold` (indices), `pairwise` and `id`. A
    .csv file has one row per segment with the columns `question`, `segment`, and any of `id`, `title`, `score`, `gold`
    (1 or 0), `answer` (several are separated by `|`) and `pairwise`; the rows of one id (or question) belong together.

    If the answers are known and the gold segments are not, the segments that contain an answer (`best_subspan_em`) are
    gold, unless all of them do.

    Args:
        source: The file or the collection.
        retrieve: Finds the segments of questions that have none.

    Raises:
        InvalidQuestion: The file cannot be read, an entry is invalid, or a question has no segments and there is no
            `retrieve`.
    """
    if isinstance(source, str | Path):
        entries = _read_file(Path(source))
    elif not is_iterable(source) or isinstance(source, bytes | Mapping):
        raise InvalidQuestion(f"expected a file or a list of questions, got {type(source).__name__}")
    else:
        entries = [(f"question {index}", each) for index, each in enumerate(source)]
    if not entries:
        raise InvalidQuestion("expected at least one question, got none")
    questions = [_complete(_parse_question(entry, where), retrieve, where) for where, entry in entries]
    return [each if each.id else replace(each, id=str(index)) for index, each in enumerate(questions)]


def as_segment(value: Any) -> Segment:
    """Return a retrieved chunk as a segment: a `Segment`, string, mapping, LangChain document or LlamaIndex node."""
    if isinstance(value, Segment | str):
        return Segment.of(value)
    if isinstance(value, Mapping):
        unknown = set(value) - {"text", "title", "score", "metadata", "gold"}
        if unknown or not isinstance(value.get("text"), str):
            keys = sorted(map(str, value))
            raise InvalidQuestion(f"expected a segment with text, title, score and metadata, got {keys}")
        return Segment(value["text"], value.get("title"), value.get("metadata") or {}, value.get("score"))
    if hasattr(value, "page_content"):  # a document of LangChain
        metadata = dict(value.metadata)
        return Segment(value.page_content, _title(metadata), metadata, metadata.get("score"))
    if hasattr(value, "node"):  # a scored node of LlamaIndex
        metadata = dict(value.node.metadata)
        return Segment(value.node.get_content(), _title(metadata), metadata, value.score)
    raise InvalidQuestion(f"expected a retrieved chunk, got {type(value).__name__}")


def as_retrieve_function(retriever: Any, k: int) -> Retrieve:
    """Return a retriever of this package, LangChain or LlamaIndex, or a function, as a function of the question.

    Args:
        retriever: The retriever.
        k: Segments to retrieve, if the retriever takes a number.

    Raises:
        UnsupportedCombination: It is none of these.
    """
    find = getattr(retriever, "retrieve", None)
    if callable(find):
        takes_k = "k" in inspect.signature(find).parameters
        return lambda question: map(as_segment, find(question, k) if takes_k else find(question))
    if hasattr(retriever, "invoke"):
        return lambda question: map(as_segment, retriever.invoke(question))
    if callable(retriever):
        return lambda question: map(as_segment, retriever(question))
    raise UnsupportedCombination(f"expected a retriever, got {type(retriever).__name__}", hint="Pass a function.")


def _title(metadata: Mapping[str, Any]) -> str | None:
    title = metadata.get("title")
    return title if isinstance(title, str) else None


def _read_file(path: Path) -> list[tuple[str, Any]]:
    parsers: dict[str, Callable[[str, Path], list[tuple[str, Any]]]] = {".jsonl": _parse_jsonl, ".csv": _parse_csv}
    if path.suffix not in parsers:
        raise InvalidQuestion(f"{path}: expected a .jsonl or .csv file")
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidQuestion(f"{path}: cannot be read: {error}") from error
    return parsers[path.suffix](text, path)


def _parse_jsonl(text: str, path: Path) -> list[tuple[str, Any]]:
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                entries.append((f"{path}, line {number}", parse_json(line)))
            except ValueError as error:
                raise InvalidQuestion(f"{path}, line {number}: expected JSON: {error}") from error
    return entries


def _parse_csv(text: str, path: Path) -> list[tuple[str, Any]]:
    limit = csv.field_size_limit(max(len(text), csv.field_size_limit()))  # a segment may be long
    try:
        return _parse_rows(csv.DictReader(io.StringIO(text, newline="")), path)
    except csv.Error as error:
        raise InvalidQuestion(f"{path}: expected CSV: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _parse_rows(rows: csv.DictReader[str], path: Path) -> list[tuple[str, Any]]:
    columns = list(rows.fieldnames or ())
    if "question" not in columns or set(columns) - set(COLUMNS):
        raise InvalidQuestion(f"{path}: expected columns out of {', '.join(COLUMNS)}, with question; got {columns}")
    entries: dict[str, dict[str, Any]] = {}
    for row in rows:
        where = f"{path}, line {rows.line_num}"
        if None in row or None in row.values():
            raise InvalidQuestion(f"{where}: expected {len(columns)} fields")
        entry = entries.setdefault(
            row.get("id") or row["question"],
            {
                "id": row.get("id", ""),
                "question": row["question"],
                "answers": [each.strip() for each in row.get("answer", "").split("|") if each.strip()],
                "pairwise": _parse_bool(row.get("pairwise", ""), where),
                "segments": [],
            },
        )
        if row.get("segment"):
            entry["segments"].append(
                {
                    "text": row["segment"],
                    "title": row.get("title") or None,
                    "score": _parse_number(row.get("score", ""), where),
                    "gold": _parse_bool(row.get("gold", ""), where),
                }
            )
    return [(f"{path}, {key!r}", entry) for key, entry in entries.items()]


def _parse_bool(cell: str, where: str) -> bool:
    values = {"": False, "0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}
    if cell.strip().lower() not in values:
        raise InvalidQuestion(f"{where}: expected 1 or 0, got {cell!r}")
    return values[cell.strip().lower()]


def _parse_number(cell: str, where: str) -> float | None:
    try:
        return float(cell) if cell.strip() else None
    except ValueError:
        raise InvalidQuestion(f"{where}: expected a number, got {cell!r}") from None


def _parse_question(entry: Any, where: str) -> Question:
    if isinstance(entry, Question):
        return entry
    if not isinstance(entry, Mapping) or set(entry) - set(FIELDS) or not isinstance(entry.get("question"), str):
        got = sorted(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise InvalidQuestion(f"{where}: expected a mapping with keys out of {', '.join(FIELDS)}, got {got}")
    given = entry.get("segments")
    given = () if given is None else given
    if not is_iterable(given) or isinstance(given, str | Mapping):
        raise InvalidQuestion(f"{where}: expected segments in a list, got {type(given).__name__}")
    listed = list(given)
    marked = [index for index, each in enumerate(listed) if isinstance(each, Mapping) and each.get("gold")]
    return Question(
        entry["question"],
        tuple(_as_segment(each, where) for each in listed),
        tuple(map(str, _as_list(entry.get("answers", entry.get("answer")), "answers", where, str | int | float))),
        tuple(sorted({*_as_list(entry.get("gold"), "gold", where, int), *marked})),
        check_flag("pairwise", entry.get("pairwise", False), error=InvalidQuestion),
        _as_id(entry.get("id", ""), where),
    )


def _as_id(value: Any, where: str) -> str:
    if not isinstance(value, str | int | float):
        raise InvalidQuestion(f"{where}: expected an id as a text or a number, got {shown(value)}")
    return shown(value) if isinstance(value, int) else str(value)


def _as_segment(value: Any, where: str) -> Segment:
    try:
        return as_segment(value)
    except (InvalidQuestion, InvalidSegment) as error:
        raise InvalidQuestion(f"{where}: {error}") from error


def _as_list(value: Any, name: str, where: str, kind: Any) -> Sequence[Any]:
    """Return one value, or a list of values, as a list."""

    def fits(each: Any) -> bool:
        return isinstance(each, kind) and not isinstance(each, bool)

    listed = () if value is None else (value,) if fits(value) else value
    if not isinstance(listed, list | tuple) or not all(map(fits, listed)):
        what = "an index" if kind is int else "a text"
        raise InvalidQuestion(f"{where}: expected {name} as {what} or a list of them, got {shown(value)}")
    return listed


def _complete(question: Question, retrieve: Retrieve | None, where: str) -> Question:
    if not question.segments:
        if retrieve is None:
            raise InvalidQuestion(f"{where}: no segments, and no retriever to find them with")
        question = replace(question, segments=tuple(as_segment(each) for each in retrieve(question.text)))
    return question if question.gold or question.pairwise else replace(question, gold=_find_gold(question))


def _find_gold(question: Question) -> tuple[int, ...]:
    """Return the segments that contain a gold answer; none if all of them do."""
    known: Sequence[str] = question.answers
    holding = [index for index, each in enumerate(question.segments) if best_subspan_em(plain_rendering(each), known)]
    return tuple(holding) if len(holding) < len(question.segments) else ()
