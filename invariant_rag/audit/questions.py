"""Questions of an audit with their retrieved segments: of files and records of any tool, or retrieved now."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from invariant_rag.audit.matching import contains_gold
from invariant_rag.audit.question_files import read_entries
from invariant_rag.audit.records import FIELDS, as_record, describe_unknown, join_rows, rename
from invariant_rag.checks import check_items, check_path, check_text, is_iterable
from invariant_rag.errors import FieldWarning, InvalidQuestion, InvalidSegment, UnsupportedCombination
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.shown import shown

Retrieve = Callable[[str], Iterable[Any]]  # the segments for a question, best first, as what `as_segment` takes


@dataclass(frozen=True)
class Question:
    """A question with its retrieved segments.

    Attributes:
        text, id, segments: The question, its name in reports, and its segments in retrieval order.
        answers: Gold answers, any of which is right; empty if unknown.
        gold: Indices of the segments that hold the answer.
        rubrics: What a right answer does, for a judge.
    """

    text: str
    segments: tuple[Segment, ...]
    answers: tuple[str, ...] = ()
    gold: tuple[int, ...] = ()
    id: str = ""
    rubrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_text("question", self.text, error=InvalidQuestion)
        check_text("id", self.id, error=InvalidQuestion)
        for name, kind in (("segments", Segment), ("answers", str), ("gold", Integral), ("rubrics", str)):
            listed = check_items(name, getattr(self, name), kind, error=InvalidQuestion)
            object.__setattr__(self, name, tuple(listed))
        if not all(0 <= index < len(self.segments) for index in self.gold):
            raise InvalidQuestion(f"{self.text!r}: expected gold indices below {len(self.segments)}, got {self.gold}")

    def as_dict(self) -> dict[str, Any]:
        """Return the question as a record that `read_questions` reads."""
        lists = {name: list(getattr(self, name)) for name in ("answers", "gold", "rubrics")}
        return {"id": self.id, "question": self.text, "segments": list(map(_as_dict, self.segments)), **lists}


def _as_dict(segment: Segment) -> dict[str, Any]:
    fields = {name: getattr(segment, name) for name in ("text", "title", "score", "token_ids")}
    fields["metadata"] = dict(segment.metadata)
    return {name: each for name, each in fields.items() if each not in (None, {})}


Questions = str | Path | Iterable[Question | Mapping[str, Any]]


def read_questions(
    source: Questions, retrieve: Retrieve | None, fields: Mapping[str, str] | None = None
) -> list[Question]:
    """Read the questions of a file or of a collection of questions and mappings.

    A mapping, like a line of a .jsonl file or a row of a table (.csv, .xlsx, .parquet), has `question`, and may have
    `segments` (strings, or mappings with `text`, `title`, `score`, `metadata` and `gold`: true), `answers` (or
    `answer`), `gold` (indices), `rubrics` and `id`. Or it has one `segment` of a question, with its `title`, `score`
    and `gold` (1 or 0), and several have the same `id` or `question`; there, answers are separated by `|`. Records of
    ragas, promptfoo, deepeval and inspect are read as well.

    If the answers are known and the gold segments are not, the segments that contain an answer as whole tokens are
    gold, unless all of them do. `retrieve` finds the segments of questions that have none, `fields` are names of your
    fields by ours, such as `{"question": "frage"}`.

    Raises:
        InvalidQuestion: The source cannot be read, or an entry is invalid or has no segments, without `retrieve`.

    Warns:
        FieldWarning: Records have fields that mean nothing here.
    """
    return [_complete(question, retrieve) for question in parse_questions(source, fields)]


def parse_questions(source: Questions, fields: Mapping[str, str] | None = None) -> list[Question]:
    """Parse questions as `read_questions` does, without retrieval."""
    prefix = ""
    if isinstance(source, str | Path):
        prefix, entries = f"{source}: ", read_entries(check_path("questions", source, error=InvalidQuestion))
    elif is_iterable(source) and not isinstance(source, bytes | Mapping):
        entries = [(f"question {index}", each) for index, each in enumerate(source)]
    else:
        raise InvalidQuestion(f"expected a file or a list of questions, got {type(source).__name__}")
    entries = join_rows([(where, rename(entry, fields or {}, where)) for where, entry in entries])
    if not entries:
        raise InvalidQuestion(f"{prefix}expected at least one question, got none")
    unknown = set[str]()
    parsed = [_parse_question(entry, where, unknown) for where, entry in entries]
    lacking = [name for name in ("segments", "answers", "gold") if not all(getattr(each, name) for each in parsed)]
    if described := describe_unknown(unknown, lacking):
        warnings.warn(FieldWarning(prefix + described), stacklevel=2)
    taken = Counter(each.id for each in parsed)
    return [
        replace(each, id=each.id + (f"#{number}" if taken[each.id] > 1 else "") if each.id else str(number))
        for number, each in enumerate(parsed)
    ]


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
    title = metadata["title"] if isinstance(metadata.get("title"), str) else None
    return Segment(text, title, metadata, score)


def as_retrieve_function(retriever: Any, k: int) -> Retrieve:
    """Return a retriever (of `k` segments, if it takes a number) or a function as a function of the question."""
    find: Any = getattr(retriever, "retrieve", None) or getattr(retriever, "invoke", None) or retriever
    if not callable(find):
        raise UnsupportedCombination(f"expected a retriever, got {type(retriever).__name__}", hint="Pass a function.")
    takes_k = hasattr(retriever, "retrieve") and "k" in inspect.signature(find).parameters
    return lambda question: map(as_segment, find(question, k) if takes_k else find(question))


def _parse_question(entry: Any, where: str, unknown: set[str]) -> Question:
    """Return a question; the names of its fields that mean nothing are added to `unknown`."""
    if isinstance(entry, Question):
        return entry
    record = as_record(entry) if isinstance(entry, Mapping) else {}
    if not isinstance(record.get("question"), str) or not record["question"].strip():
        got = ", ".join(sorted(map(str, record))) or ("no keys" if isinstance(entry, Mapping) else type(entry).__name__)
        got = f"question {shown(record['question'])}" if "question" in record else got
        wanted = f"expected a mapping with keys out of {', '.join(FIELDS)}, with question as text"
        guess = describe_unknown(record, ["question"])
        hint = f"{InvalidQuestion.hint} A field of another name: --field question=NAME, or fields= in Python."
        raise InvalidQuestion(f"{where}: {wanted}, got {got}{guess and f'. {guess}'}", hint=hint)
    unknown |= {str(name) for name in record}
    given = record.get("segments")
    if isinstance(given, str | Mapping) or not (given is None or is_iterable(given)):
        hint = "An audit moves documents, so list them one by one; in a test of promptfoo: context: [first, second]."
        got = "one text" if isinstance(given, str) else shown(given)
        raise InvalidQuestion(f"{where}: expected segments in a list, got {got}", hint=hint)
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
        )
    except (InvalidQuestion, InvalidSegment) as error:
        raise InvalidQuestion(f"{where}: {error}") from error


def _as_list(value: Any, name: str, kind: Any) -> Sequence[Any]:
    listed = () if value is None else value if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(each, kind) and not isinstance(each, bool) for each in listed):
        what = "an index" if kind is int else "a text"
        raise InvalidQuestion(f"expected {name} as {what} or a list of them, got {shown(value)}")
    return listed


def _complete(question: Question, retrieve: Retrieve | None) -> Question:
    """Return a question with its segments and, where the answers are known, the segments that contain one."""
    if not question.segments:
        if retrieve is None:
            hint = "Give segments, a retriever, or documents to retrieve from (--docs)."
            raise InvalidQuestion(f"{shown(question.text)}: no segments, and no retriever to find them with", hint=hint)
        question = replace(question, segments=tuple(as_segment(each) for each in retrieve(question.text)))
    texts = map(plain_rendering, question.segments)
    holding = [index for index, each in enumerate(texts) if contains_gold(each, question.answers)]
    known = question.gold or len(holding) == len(question.segments)
    return question if known else replace(question, gold=tuple(holding))
