"""Questions of an audit with their retrieved segments: of files and records of any tool, or retrieved now."""

from __future__ import annotations

import ast
import inspect
import io
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from json import detect_encoding
from numbers import Integral
from pathlib import Path
from typing import Any

from invariant_rag.audit.matching import contains_gold
from invariant_rag.checks import check_items, check_name, check_path, check_text, is_iterable
from invariant_rag.errors import ExtraRequired, FieldWarning, InvalidQuestion, InvalidSegment, UnsupportedCombination
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.segments import Segment, plain_rendering
from invariant_rag.shown import reason, shown

Entries = list[tuple[str, Any]]  # where each entry is, such as `questions.jsonl, line 3`, and what it says
FIELDS = ("id", "question", "segments", "answers", "gold", "rubrics")
COLUMNS = ("id", "question", "segment", "title", "score", "gold", "answer")  # of a table, or a record, with one segment
_QUESTIONS = ("question", "user_input", "query", "input")
_SEGMENTS = ("segments", "retrieved_contexts", "retrieval_context", "contexts", "context", "documents")
_ANSWERS = tuple("answers reference ground_truth ground_truths expected expected_output target answer".split())
_NAMES = {"question": _QUESTIONS, "segments": _SEGMENTS, "answers": _ANSWERS}
_OTHERS = set(
    "id gold rubrics segment title score context contexts metadata description response actual_output multi_responses "
    "reference_contexts tools_called options threshold provider providers choices sandbox files setup".split()
)  # fields of this package and of other tools that need no mention
_SUFFIXES = (".jsonl", ".json", ".yaml", ".yml", ".csv", ".tsv", ".xlsx", ".parquet")
_FLAGS = dict.fromkeys(("", "0", "0.0", "false", "no"), False) | dict.fromkeys(("1", "1.0", "true", "yes"), True)
_LITERAL_CHECKS = {"contains", "icontains", "equals", "contains-any", "icontains-any"}
_RUBRICS = {
    "llm-rubric": "{value}",
    "model-graded-closedqa": "{value}",
    "factuality": "It agrees with: {value}",
    "model-graded-factuality": "It agrees with: {value}",
    "similar": "It means the same as: {value}",
    "answer-relevance": "It answers the question.",
}  # checks of promptfoo that take a judge, as what a right answer does

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
    if segment.token_ids is not None:
        return {"token_ids": list(segment.token_ids), "score": segment.score}
    fields = {"text": segment.text, "title": segment.title, "score": segment.score, "metadata": dict(segment.metadata)}
    return {name: each for name, each in fields.items() if each not in (None, {})}


def read_questions(
    source: str | Path | Iterable[Question | Mapping[str, Any]],
    retrieve: Retrieve | None,
    fields: Mapping[str, str] | None = None,
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


def parse_questions(
    source: str | Path | Iterable[Question | Mapping[str, Any]], fields: Mapping[str, str] | None = None
) -> list[Question]:
    """Parse questions as `read_questions` does, without retrieval."""
    prefix = ""
    if isinstance(source, str | Path):
        prefix, entries = f"{source}: ", _read_entries(check_path("questions", source, error=InvalidQuestion))
    elif is_iterable(source) and not isinstance(source, bytes | Mapping):
        entries = [(f"question {index}", each) for index, each in enumerate(source)]
    else:
        raise InvalidQuestion(f"expected a file or a list of questions, got {type(source).__name__}")
    entries = _join_rows([(where, _renamed(entry, fields or {}, where)) for where, entry in entries])
    if not entries:
        raise InvalidQuestion(f"{prefix}expected at least one question, got none")
    unknown = set[str]()
    parsed = [_parse_question(entry, where, unknown) for where, entry in entries]
    lacking = [name for name in ("segments", "answers", "gold") if not all(getattr(each, name) for each in parsed)]
    if said := _describe_unknown(unknown, lacking):
        warnings.warn(FieldWarning(prefix + said), stacklevel=2)
    taken = Counter(each.id for each in parsed)
    return [
        replace(each, id=each.id + (f"#{number}" if taken[each.id] > 1 else "") if each.id else str(number))
        for number, each in enumerate(parsed)
    ]


def _renamed(entry: Any, fields: Mapping[str, str], where: str) -> Any:
    if not fields or not isinstance(entry, Mapping):
        return entry
    for ours, theirs in fields.items():
        check_name("field", ours, dict.fromkeys((*FIELDS, *COLUMNS)))
        if theirs not in entry and ours == "question":
            raise InvalidQuestion(f"{where}: expected {theirs!r} for {ours}, got {sorted(map(str, entry))}")
    names = {theirs: ours for ours, theirs in fields.items()}
    return {names.get(name, name): each for name, each in entry.items() if name in names or name not in fields}


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
    record = _as_record(entry) if isinstance(entry, Mapping) else {}
    if not isinstance(record.get("question"), str) or not record["question"].strip():
        got = ", ".join(sorted(map(str, record))) or ("no keys" if isinstance(entry, Mapping) else type(entry).__name__)
        got = f"question {shown(record['question'])}" if "question" in record else got
        wanted = f"expected a mapping with keys out of {', '.join(FIELDS)}, with question as text"
        guess = _describe_unknown(record, ["question"])
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


def _read_entries(path: Path) -> Entries:
    """Read the entries of a file."""
    suffix = path.suffix.lower()
    try:
        if not path.exists():
            raise InvalidQuestion(f"no such file: {path}", hint="")
        if suffix not in _SUFFIXES:
            raise InvalidQuestion(f"{path}: expected a file of {', '.join(_SUFFIXES)}")
        content = read_bytes(path)
        if suffix in {".xlsx", ".parquet"}:
            return _read_table(io.BytesIO(content), path)
        text = content.decode(detect_encoding(content))
    except (OSError, UnicodeDecodeError) as error:
        hint = "Save it as UTF-8." if isinstance(error, UnicodeDecodeError) else ""
        raise InvalidQuestion(f"{path}: cannot be read: {reason(error)}", hint=hint) from error
    if suffix in {".csv", ".tsv"}:
        return _read_table(io.StringIO(text), path, max(",;\t", key=text.partition("\n")[0].count))
    return _parse_jsonl(text, path) if suffix == ".jsonl" else _parse_document(text, path)


def _parse_jsonl(text: str, path: Path) -> Entries:
    entries: Entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            entries += [(f"{path}, line {number}", parse_json(line))] if line.strip() else []
        except ValueError as error:
            hint = "If the file is one document of JSON, over several lines, name it .json." if number == 1 else None
            raise InvalidQuestion(f"{path}, line {number}: expected JSON: {error}", hint=hint) from error
    return entries


def _parse_document(text: str, path: Path) -> Entries:
    """Parse a list of questions, their columns, or a configuration of promptfoo with its `tests`."""
    try:
        document = parse_json(text) if path.suffix.lower() == ".json" else _parse_yaml(text)
    except ValueError as error:
        raise InvalidQuestion(f"{path}: cannot be parsed: {error}") from error
    shared: Mapping[str, Any] = {}
    if isinstance(document, Mapping) and "tests" in document:
        default, document = document.get("defaultTest"), document["tests"]
        shared = default.get("vars") or {} if isinstance(default, Mapping) else {}
    elif isinstance(document, Mapping):
        document = _rows_of(document, path)
    entries: Entries = []
    for number, each in enumerate(document if isinstance(document, list) else [document], start=1):
        if isinstance(each, str) and each.startswith("file://"):
            entries += _read_entries(path.parent / each.removeprefix("file://"))
        elif isinstance(each, Mapping):
            variables = {"vars": {**shared, **each["vars"]}} if isinstance(each.get("vars"), Mapping) else {}
            entries.append((f"{path}, test {number}", {**each, **variables}))
        else:
            raise InvalidQuestion(f"{path}, test {number}: expected a mapping, got {type(each).__name__}")
    return entries


def _parse_yaml(text: str) -> Any:
    """Parse YAML from outside: an alias within what an alias stands for could grow without bounds."""
    import yaml

    anchored: list[bool] = []
    try:
        for event in yaml.parse(text, yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent) and any(anchored):
                line = event.start_mark.line + 1
                raise ValueError(f"expected no alias within what an alias stands for, line {line}")
            if isinstance(event, yaml.CollectionStartEvent):
                anchored.append(event.anchor is not None)
            elif isinstance(event, yaml.CollectionEndEvent):
                anchored.pop()
        return yaml.safe_load(text)
    except RecursionError:
        raise ValueError("expected YAML nested less deeply") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"expected YAML: {error}") from error  # others than YAMLError: `!!int` of a text


def _read_table(source: Any, path: Path, separator: str = "") -> Entries:
    """Return the rows of a table, read by pandas; cells with a list, as pandas or JSON writes it, are one."""
    try:
        import pandas as pd

        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # a row has more fields than there are columns
            if separator:
                table = pd.read_csv(source, sep=separator, dtype=str, keep_default_na=False, index_col=False)
            else:
                table = (pd.read_excel if path.suffix.lower() == ".xlsx" else pd.read_parquet)(source)
        known = {*_OTHERS, *COLUMNS, *_QUESTIONS, *_SEGMENTS, *_ANSWERS}
        names = [str(each).strip() for each in table.columns]
        table.columns = [name.lower() if name.lower() in known else name for name in names]
        rows = parse_json(table.to_json(orient="records", date_format="iso"))
    except ImportError as error:
        raise ExtraRequired(error.name or "pandas", "evaluation") from None
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, Warning) as error:
        raise InvalidQuestion(f"{path}: expected a table: {str(error)[:200]}") from error
    return [
        (f"{path}, row {number}", {name: _parse_list(cell) for name, cell in row.items() if cell not in ("", None)})
        for number, row in enumerate(rows, start=1)
    ]


def _join_rows(entries: Entries) -> Entries:
    """Join the records of one id (or question) that have one segment each, under `segment`."""
    joined: dict[Any, tuple[str, Any]] = {}
    for number, (where, row) in enumerate(entries):
        if not isinstance(row, Mapping) or "segment" not in row:
            joined[number] = where, row
            continue
        others = {name: each for name, each in row.items() if name not in COLUMNS or name in {"id", "question"}}
        key = str(row.get("id", row.get("question")))
        _, entry = joined.setdefault(key, (where, {**others, "segments": [], "answers": []}))
        answers = [each.strip() for each in str(row.get("answer", "")).split("|")]
        entry["answers"] += [each for each in answers if each and each not in entry["answers"]]
        gold, score = (str(row.get(name, "")).strip().lower() for name in ("gold", "score"))
        if gold not in _FLAGS:
            raise InvalidQuestion(f"{where}: expected gold as 1 or 0, got {shown(row['gold'])}")
        try:
            found = {"score": float(score.replace(",", ".")) if score else None, "gold": _FLAGS[gold]}
        except ValueError:
            raise InvalidQuestion(f"{where}: expected score as a number, got {shown(row['score'])}") from None
        entry["segments"].append({"text": str(row["segment"]), "title": row.get("title"), **found})
    return list(joined.values())


def _rows_of(document: Mapping[str, Any], path: Path) -> list[Any]:
    """Return the records of a document: columns as ragas and pandas write them, its one list of records, or itself."""
    first = next((document[name] for name in _QUESTIONS if name in document), None)
    is_messages = isinstance(first, list) and all(isinstance(each, Mapping) for each in first)
    if isinstance(first, list | Mapping) and not is_messages:
        import pandas as pd

        try:
            return list(pd.DataFrame(document).to_dict("records"))
        except ValueError as error:
            hint = "Write one record per question: in pandas, `to_json(path, orient='records', lines=True)`."
            raise InvalidQuestion(f"{path}: expected columns of {len(first)} rows each: {error}", hint=hint) from error
    lists = [each for each in document.values() if isinstance(each, list) and each]
    records = [each for each in lists if all(isinstance(one, Mapping) for one in each)]
    return records[0] if first is None and "vars" not in document and len(records) == 1 else [document]


def _as_record(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record with `question`, `segments` and `answers`; everything else is kept under its name.

    ragas has `user_input`, `retrieved_contexts` and `reference`, and names of before; its `response`, or its `answer`
    beside those, is what a system said. deepeval has `input`, `retrieval_context` and `expected_output`; inspect
    `input`, `target` and `metadata`; promptfoo `vars`, and `assert` with literal texts or checks that take a judge.
    """
    record = _of_promptfoo(entry) if isinstance(entry.get("vars"), Mapping) else dict(entry)
    if "target" in record and isinstance(record.get("metadata"), Mapping):  # a sample of inspect
        record = {name: each for name, each in record["metadata"].items() if name in _SEGMENTS} | record
    if isinstance(record.get("input"), list):  # messages
        record["input"] = "\n".join(
            str(each.get("content", "")) for each in record["input"] if isinstance(each, Mapping)
        )
    if {"contexts", "retrieved_contexts"} & {*record} and {*_ANSWERS[1:4]} & {*record}:
        record.pop("answer", None)
    found: dict[str, Any] = {}
    for ours, names in _NAMES.items():
        for name in [name for name in names if record.get(name) is not None][:1]:
            found[ours] = record.pop(name)
    wanted, segments = record.get("reference_contexts"), _parse_list(found.get("segments"))
    found |= {} if segments is None else {"segments": segments}
    if "gold" not in record and isinstance(wanted, Sequence) and isinstance(segments, Sequence):
        found["gold"] = [index for index, each in enumerate(segments) if each in wanted]
    return {**record, **found}


def _of_promptfoo(test: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a test, the literal texts it expects as `answers`, and checks for a judge as rubrics."""
    answers, rubrics, unread = [], [], {}
    for each in filter(lambda each: isinstance(each, Mapping), test.get("assert") or ()):
        kind, value = str(each.get("type")), each.get("value")
        values = value if isinstance(value, list) else [value]
        if kind in _LITERAL_CHECKS and value is not None:
            answers += values
        elif kind in _RUBRICS:
            rubrics += [_RUBRICS[kind].format(value=one) for one in values]
        else:
            unread[f"assert: {kind}"] = value
    others = {name: value for name, value in test.items() if name not in {"vars", "assert"}}
    graded = ({"answers": answers} if answers else {}) | ({"rubrics": rubrics} if rubrics else {})
    return {**others, **test["vars"], **graded, **unread}


def _parse_list(text: Any) -> Any:
    """Return a list that is written as JSON or as pandas writes one; anything else as it is."""
    if not isinstance(text, str) or not text.strip().startswith("["):
        return text
    for parse in (parse_json, ast.literal_eval):
        try:
            found = parse(text.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # TypeError: a list as a key
            continue
        if isinstance(found, list):
            return found
    return text


def _describe_unknown(fields: Iterable[str], lacking: Iterable[str]) -> str:
    """Return a sentence on fields that mean nothing, with what of the `lacking` ones may be meant; "" without any."""
    known = [each for name in sorted(lacking) for each in _NAMES.get(name, (name,))]
    said = []
    for name in sorted({*map(str, fields)} - {*FIELDS} - _OTHERS):
        close = get_close_matches(name.lower(), known, 1, 0.75)
        said.append(repr(name) + (f" (did you mean {close[0]!r}?)" if close else ""))
    return f"No field of a question, and not used: {', '.join(said)}." if said else ""
