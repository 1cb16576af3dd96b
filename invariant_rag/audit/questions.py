"""Questions of an audit with their retrieved segments: read from a file or objects, or retrieved now."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from invariant_rag.audit.matching import contains_gold
from invariant_rag.audit.question_files import as_record, describe_unknown, read_entries, rows_of
from invariant_rag.checks import check_items, check_name, check_path, check_text, is_iterable
from invariant_rag.errors import FieldWarning, InvalidQuestion, InvalidSegment, UnsupportedCombination
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.shown import shown

FIELDS = ("id", "question", "segments", "answers", "gold", "rubrics")
"""Keys of a record; others are kept as they are."""

Retrieve = Callable[[str], Iterable[Any]]
"""Returns the segments for a question, best first, as anything that `as_segment` takes."""


@dataclass(frozen=True)
class Question:
    """A question with its retrieved segments, and its gold answers and gold segments if they are known.

    Attributes:
        text: The question.
        segments: The segments in retrieval order.
        answers: Gold answers, any of which is right; empty if unknown.
        gold: Indices of the segments that hold the answer.
        id: Name in reports.
        rubrics: What a right answer does, for a judge.
        extra: Other fields of the record, kept for reports.
        source: Where it was read, such as `questions.jsonl, line 3`, for messages; "" if it was made by a caller.
    """

    text: str
    segments: tuple[Segment, ...]
    answers: tuple[str, ...] = ()
    gold: tuple[int, ...] = ()
    id: str = ""
    rubrics: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    source: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("text", "id", "source"):
            check_text("question" if name == "text" else name, getattr(self, name), error=InvalidQuestion)
        for name, kind in (("segments", Segment), ("answers", str), ("gold", Integral), ("rubrics", str)):
            listed = check_items(name, getattr(self, name), kind, error=InvalidQuestion)
            object.__setattr__(self, name, tuple(listed))
        if not all(0 <= index < len(self.segments) for index in self.gold):
            raise InvalidQuestion(f"{self.text!r}: expected gold indices below {len(self.segments)}, got {self.gold}")

    def as_dict(self) -> dict[str, Any]:
        """Return the question as a record that `read_questions` reads."""
        record: dict[str, Any] = {"id": self.id, "question": self.text, "segments": list(map(_as_dict, self.segments))}
        return record | {"answers": list(self.answers), "gold": list(self.gold), "rubrics": list(self.rubrics)}


def _as_dict(segment: Segment) -> dict[str, Any]:
    if segment.token_ids is not None:
        return {"token_ids": list(segment.token_ids), "score": segment.score}
    fields = {"text": segment.text, "title": segment.title, "score": segment.score, "metadata": dict(segment.metadata)}
    return {name: each for name, each in fields.items() if each not in (None, {})}


def read_questions(
    source: str | Path | Iterable[Question | Mapping[str, Any]],
    retrieve: Retrieve | None,
    fields: Mapping[str, str] | None = None,
) -> list[Question]:
    """Read the questions of a file, a folder, or a collection of questions and mappings.

    A mapping, like a line of a .jsonl file, has `question`, and may have `segments` (strings, or mappings with `text`,
    `title`, `score`, `metadata` and `gold`: true), `answers` (or `answer`), `gold` (indices), `rubrics` and `id`. A
    table (.csv, .xlsx, .parquet) has a row per question, or a row per segment with the columns `question`, `segment`,
    and any of `id`, `title`, `score`, `gold` (1 or 0) and `answer` (several are separated by `|`). Records of ragas,
    promptfoo, deepeval, inspect and SQuAD and folders of Hugging Face `datasets` are read as well; see
    `invariant_rag.audit.question_files`. Other fields are kept in `Question.extra`.

    If the answers are known and the gold segments are not, the segments that contain an answer as whole tokens are
    gold, unless all of them do.

    Args:
        source: The file, the folder or the collection.
        retrieve: Finds the segments of questions that have none.
        fields: Names of your fields by ours, such as `{"question": "frage"}`.

    Raises:
        InvalidQuestion: The source cannot be read, an entry is invalid, or a question has no segments and there is no
            `retrieve`.
        ExtraRequired: The source is a folder of `datasets`, and pyarrow is not installed.

    Warns:
        FieldWarning: As `parse_questions` does.
    """
    parsed = parse_questions(source, fields)
    return [_complete(question, retrieve, where) for where, question in parsed]


def parse_questions(
    source: str | Path | Iterable[Question | Mapping[str, Any]], fields: Mapping[str, str] | None = None
) -> list[tuple[str, Question]]:
    """Parse questions as `read_questions` does, without retrieval: where each is, and what it asks.

    Warns:
        FieldWarning: Records have fields that may be misspelt, or those of a file others that mean nothing here.
    """
    is_file = isinstance(source, str | Path)
    entries = _entries_of(source)
    if not entries:
        raise InvalidQuestion(f"{f'{source}: ' if is_file else ''}expected at least one question, got none")
    parsed = [_parse_question(_renamed(entry, fields or {}, where), where) for where, entry in entries]
    # Of a `Question`, other fields are what its maker put there.
    read = [each for each, (_, entry) in zip(parsed, entries, strict=True) if not isinstance(entry, Question)]
    lacking = {name for each in read for name in ("segments", "answers", "gold") if not getattr(each, name)}
    extras = [name for each in read for name in each.extra]
    unknown = describe_unknown(extras, lacking, misspelt_only=not is_file)
    if unknown:
        warnings.warn(FieldWarning(f"{source}: {unknown}" if is_file else unknown), stacklevel=2)
    taken = Counter(each.id for each in parsed)
    found = []
    for number, (question, (where, _)) in enumerate(zip(parsed, entries, strict=True)):
        name = str(number) if not question.id else question.id + (f"#{number}" if taken[question.id] > 1 else "")
        found.append((question.source or where, replace(question, id=name)))
    return found


def _renamed(entry: Any, fields: Mapping[str, str], where: str) -> Any:
    """Return a record with fields under our names."""
    if not fields or not isinstance(entry, Mapping):
        return entry
    for ours, theirs in fields.items():
        check_name("field", ours, FIELDS)
        if theirs not in entry and ours == "question":
            raise InvalidQuestion(f"{where}: expected {theirs!r} for {ours}, got {sorted(map(str, entry))}")
    names = {theirs: ours for ours, theirs in fields.items()}
    return {names.get(name, name): each for name, each in entry.items()}


def _entries_of(source: Any) -> list[tuple[str, Any]]:
    """Return where each entry is, and what it says."""
    if isinstance(source, str | Path):
        return read_entries(check_path("questions", source, error=InvalidQuestion))
    if not is_iterable(source) or isinstance(source, bytes):
        raise InvalidQuestion(f"expected a file or a list of questions, got {type(source).__name__}")
    listed = rows_of(source, "questions") if isinstance(source, Mapping) else source
    return [(f"question {index}", each) for index, each in enumerate(listed)]


def as_segment(value: Any) -> Segment:
    """Return a retrieved chunk as a segment: a `Segment`, string, mapping, LangChain document or LlamaIndex node."""
    if isinstance(value, Segment | str):
        return Segment.of(value)
    if isinstance(value, Mapping):
        if "token_ids" in value:
            return Segment(token_ids=value["token_ids"], score=value.get("score"))
        text = value.get("text", value.get("page_content", value.get("content")))
        if not isinstance(text, str):
            keys = sorted(map(str, value))
            raise InvalidQuestion(f"expected a segment with text, title, score and metadata, got {keys}")
        metadata = value.get("metadata") or {}
        if isinstance(metadata, Mapping):
            known = {"text", "page_content", "content", "title", "score", "metadata", "gold"}
            metadata = {**{str(name): each for name, each in value.items() if name not in known}, **metadata}
        return Segment(text, value.get("title"), metadata, value.get("score"))
    if hasattr(value, "page_content"):  # a document of LangChain
        text, metadata, score = value.page_content, dict(value.metadata), value.metadata.get("score")
    elif hasattr(value, "node"):  # a scored node of LlamaIndex
        text, metadata, score = value.node.get_content(), dict(value.node.metadata), value.score
    else:
        raise InvalidQuestion(f"expected a retrieved chunk, got {type(value).__name__}")
    title = metadata.get("title")
    return Segment(text, title if isinstance(title, str) else None, metadata, score)


def as_retrieve_function(retriever: Any, k: int) -> Retrieve:
    """Return a retriever of this package, LangChain or LlamaIndex, or a function, as a function of the question.

    Args:
        retriever: The retriever.
        k: Segments to retrieve, if the retriever takes a number.
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


def _parse_question(entry: Any, where: str) -> Question:
    if isinstance(entry, Question):
        return entry
    record = as_record(entry) if isinstance(entry, Mapping) else {}
    if not isinstance(record.get("question"), str):
        got = ", ".join(sorted(map(str, entry))) or "no keys" if isinstance(entry, Mapping) else type(entry).__name__
        guess = describe_unknown({*map(str, record)} - {"question"}, ["question"], misspelt_only=True)
        if "question" in record:
            got = f"question {shown(record['question'])}"
        raise InvalidQuestion(
            f"{where}: expected a mapping with keys out of {', '.join(FIELDS)}, with question as text, got "
            f"{got}{guess and f'. {guess}'}"
        )
    if not record["question"].strip():
        raise InvalidQuestion(f"{where}: expected question as text, got an empty one")
    given = record.get("segments")
    if isinstance(given, str | Mapping) or not (given is None or is_iterable(given)):
        raise InvalidQuestion(
            f"{where}: expected segments in a list, got {'one text' if isinstance(given, str) else shown(given)}",
            hint="An audit moves documents, so list them one by one; in a test of promptfoo: context: [first, second].",
        )
    listed = list(() if given is None else given)
    marked = [index for index, each in enumerate(listed) if isinstance(each, Mapping) and each.get("gold")]
    try:
        answers = _as_list(record.get("answers"), "answers", str | int | float)
        return Question(
            record["question"],
            tuple(map(as_segment, listed)),
            tuple(str(each) for each in answers if str(each).strip() and each == each),  # noqa: PLR0124 - not NaN
            tuple(sorted({*_as_list(record.get("gold"), "gold", int), *marked})),
            "".join(map(str, _as_list(record.get("id"), "id", str | int | float))),
            tuple(_as_list(record.get("rubrics"), "rubrics", str)),
            {str(name): value for name, value in record.items() if name not in FIELDS},
            where,
        )
    except (InvalidQuestion, InvalidSegment) as error:
        raise InvalidQuestion(f"{where}: {error}") from error


def _as_list(value: Any, name: str, kind: Any) -> Sequence[Any]:
    """Return one value, or a list of values, as a list."""

    def fits(each: Any) -> bool:
        return isinstance(each, kind) and not isinstance(each, bool)

    listed = () if value is None else (value,) if fits(value) else value
    if not isinstance(listed, list | tuple) or not all(map(fits, listed)):
        what = "an index" if kind is int else "a text"
        raise InvalidQuestion(f"expected {name} as {what} or a list of them, got {shown(value)}")
    return listed


def _complete(question: Question, retrieve: Retrieve | None, where: str) -> Question:
    """Return a question with its segments and, where the answers are known, the segments that contain one."""
    if not question.segments:
        if retrieve is None:
            raise InvalidQuestion(
                f"{where}: no segments, and no retriever to find them with",
                hint="Give segments, a retriever, or documents to retrieve from (--docs).",
            )
        question = replace(question, segments=tuple(as_segment(each) for each in retrieve(question.text)))
    texts = map(plain_rendering, question.segments)
    holding = [index for index, each in enumerate(texts) if contains_gold(each, question.answers)]
    known = question.gold or len(holding) == len(question.segments)
    return question if known else replace(question, gold=tuple(holding))
