"""Long texts in chunks, in several orders of these: LongBench, 2WikiMultihopQA and LooGLE's timelines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise
from statistics import mean
from typing import Any

from invariant_rag.audit.records import parse_list
from invariant_rag.errors import TokenizerRequired, UnknownName
from pydantic import Field, field_validator, model_validator

from invariant_rag_benchmarks import base
from invariant_rag_benchmarks.base import Benchmark, Case, Example, Record, Scored, Selection, TaskSettings, Text
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset
from invariant_rag_benchmarks.scores import normalize_answer, token_f1

_LONGBENCH = "hub://THUDM/LongBench/data.zip"
_TWO_WIKI = "2wikimqa_e.jsonl"
_LOOGLE = "longdep_qa.jsonl"
_TIMELINES = frozenset({"timeline_reorder", "timeline reorder", "\u65f6\u95f4\u7ebf"})  # its Chinese name at first
_ROMAN = "I II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI XVII XVIII XIX XX".split()
_NUMERALS = {
    "arabic": (
        # Before a sign, or in a list of nothing else: events have dates and counts, too.
        re.compile(r"(?:^|[\n,;>(])[ \t]*(\d{1,9})(?=[.):,;> \t]*(?:[\n,;>]|\Z)|[.):])"),
        re.compile(r"\b(\d{1,9})\b"),
    ),
    "roman": (re.compile(r"\b([IVX]+)\b"),),
}


def token_starts(text: str, selection: Selection) -> list[int]:
    """Return the character offset at which each token of a text starts."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidDataset("expected a text to split into chunks, got one with half of a surrogate pair")
    tokenizer = selection.load_tokenizer()
    if tokenizer is None or not tokenizer.is_fast:
        raise TokenizerRequired("this benchmark counts tokens: it needs a model with a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]


def split_into_chunks(text: str, starts: list[int], tokens: int, limit: int, *, middle: bool = False) -> list[str]:
    """Split a text into chunks of `tokens` tokens. Of one with more than `limit` tokens, its beginning is kept.

    With `middle`, the first and the last half of the limit are kept instead, and split apart.

    >>> split_into_chunks("abcdefgh", [*range(8)], tokens=2, limit=4, middle=True)
    ['ab', 'gh']
    """
    ends, count = [*starts, len(text)], len(starts)
    spans = [(0, min(limit, count))]
    if middle and count > limit:
        spans = [(0, limit // 2), (count - limit + limit // 2, count)]
    bounds = [pairwise([*range(low, high, tokens), high]) for low, high in spans]
    return [text[ends[low] : ends[high]] for each in bounds for low, high in each]


class _Question(Example):
    input: Text
    context: Text
    answers: list[Text]
    all_classes: list[Text] | None = None


@dataclass(frozen=True)
class Task:
    """One task of LongBench, as `longbench.toml` declares it."""

    group: str  # its column in table 2 of arXiv 2406.02536; few-shot and code are continued without the chat template
    metric: str  # `f1`, `class`, or a name in `METRICS`
    max_new_tokens: int
    prefix: str
    suffix: str  # in which `{input}` stands for the question

    def case(self, question: str, example: _Question, **more: Any) -> Case:
        """Return the case of a question, without its chunks."""
        classes = (example.all_classes or ()) if self.metric == "class" else ()
        suffix, gold = self.suffix.replace("{input}", example.input), (*example.answers, *classes)
        return Case(question, prefix=self.prefix, suffix=suffix, gold=gold, query=example.input, **more)


TASKS = {name: Task(**fields) for name, fields in base.declared("tasks/longbench").items()}
GROUPS = {task.group: [name for name, each in TASKS.items() if each.group == task.group] for task in TASKS.values()}
"""Names of the tasks in each group."""


class _ChunkSettings(TaskSettings):
    chunk: int = Field(512, ge=1, description="tokens in a segment")
    limit: int = Field(10_000, ge=1, description="tokens of the text that are kept")


class _LongBenchSettings(_ChunkSettings):
    tasks: str = Field(
        "single-doc",
        description="all, a group (single-doc, multi-doc, synthetic, summaries, few-shot, code), or names with commas",
    )
    limit: int = Field(10_000, ge=2, description="tokens of the context that are kept: its first half and its last")


class LongBench(Benchmark[_LongBenchSettings]):
    """Sixteen English tasks over long contexts in chunks."""

    name = "longbench"
    paper = "Bai et al. 2023, arXiv 2308.14508; groups of arXiv 2406.02536, table 2"
    variants = "none: chunks in their order"
    metric = "score"
    max_new_tokens = 512

    def read(self, source: DataSource, settings: _LongBenchSettings, selection: Selection) -> Iterator[Case]:
        """Read the file of each task, or the archive that contains them."""
        chosen = {"all": list(TASKS), **GROUPS}.get(settings.tasks) or settings.tasks.replace(" ", "").split(",")
        if unknown := [name for name in chosen if name not in TASKS]:
            raise UnknownName("task of longbench", unknown[0], ["all", *GROUPS, *TASKS])
        path = source.path
        if path is not None and path.is_file() and path.suffix != ".zip" and len(chosen) > 1:
            files = f"an archive or a folder with the files of {', '.join(chosen)}"
            raise InvalidDataset(f"expected {files}, got {path.name!r}", hint="Choose one task: `--set tasks=NAME`.")
        for name in chosen:
            member, task = f"{name}.jsonl", TASKS[name]
            chat = task.group not in {"few-shot", "code"}
            more: dict[str, Any] = {"chat": chat, "group": name, "max_new_tokens": task.max_new_tokens}
            records = read_examples(source.file(member, _LONGBENCH, tasks=TASKS), f"/{member}")
            for index, example in selection.parse(_Question, records, f" of {name}"):
                if task.metric == "class" and example.all_classes is None:
                    raise InvalidDataset(f"example {index} of {name}: expected all_classes, got none")
                starts = token_starts(example.context, selection)
                chunks = split_into_chunks(example.context, starts, settings.chunk, settings.limit, middle=True)
                yield from task.case(f"{name}-{index}", example, **more).in_orders({"initial": chunks})

    def score(self, case: Case, output: str) -> Scored:
        """Score an output with its task's metric, the best over accepted answers; of few-shot tasks, its first line."""
        task = TASKS[case.group]
        answer = output.strip().partition("\n")[0] if task.group == "few-shot" else output.strip()
        if task.metric == "class":
            return Scored(answer, {"score": class_share(answer, case.gold[0], case.gold[1:])})
        if task.metric == "f1":
            return Scored(normalize_answer(answer), {"score": token_f1(answer, case.gold)})
        return Scored(answer, {"score": max(METRICS[task.metric](answer, gold) for gold in case.gold)})

    def figures(self, records: Iterable[Record]) -> dict[str, float]:
        """Return the mean of each task, of each group's tasks where all were run, and of all six groups."""
        scores: dict[str, list[float]] = {}
        for record in records:
            scores.setdefault(record["group"], []).append(record["scores"]["score"])
        means = {name: mean(each) for name, each in scores.items()}
        whole = {group: mean(means[name] for name in names) for group, names in GROUPS.items() if {*names} <= {*means}}
        average = {"mean of groups": mean(whole.values())} if len(whole) == len(GROUPS) else {}
        return {**means, **whole, **average}


def rouge_l(prediction: str, gold: str) -> float:
    """Return ROUGE-L at summary level as the package `rouge` computes it, which LongBench uses.

    Precision and recall are the words of any longest common subsequence of two sentences, as a share of the distinct
    words of prediction and gold.

    >>> round(rouge_l("the cat sat", "the cat ran off"), 4)
    0.5714
    """
    answer, golden = ([part.split() or [""] for part in text.split(".") if part] for text in (prediction, gold))
    if not answer or not golden:
        return 0.0
    shared = {word for reference in golden for sentence in answer for word in _common_subsequence(reference, sentence)}
    precision, recall = (len(shared) / len({word for part in text for word in part}) for text in (answer, golden))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> tuple[str, ...]:
    """Return a longest common subsequence; of several, the one with the earliest words of `other`."""
    longest: list[tuple[str, ...]] = [()] * (len(other) + 1)  # of the words of `one` so far and of `other` before
    for word in one:
        row: list[tuple[str, ...]] = [()]
        for column, each in enumerate(other):
            longer = max(row[column], longest[column + 1], key=len)
            row.append((*longest[column], word) if word == each else longer)
        longest = row
    return longest[-1]


def number_share(prediction: str, gold: str) -> float:
    """Return the share of the numbers in a prediction that are the first number of the gold answer."""
    numbers, expected = re.findall(r"\d+", prediction), re.findall(r"\d+", gold)
    return numbers.count(expected[0]) / len(numbers) if numbers else 0.0


def class_share(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes in a prediction, but for parts of the gold one's name, if that is there."""
    named = [each for each in classes if each in prediction and (each == gold or each not in gold)]
    return 1 / len(named) if gold in named else 0.0


def edit_similarity(prediction: str, gold: str) -> float:
    """Return the similarity of the first line of code, in hundredths, as `fuzz.ratio` of fuzzywuzzy computes it."""
    lines = (line for line in prediction.split("\n") if not any(sign in line for sign in ("`", "#", "//")))
    line = next(lines, "")
    return round(100 * SequenceMatcher(None, line, gold).ratio()) / 100 if line and gold else 0.0


METRICS = {each.__name__: each for each in (rouge_l, number_share, edit_similarity)}
"""Metrics of one gold answer, by the names in `longbench.toml`."""


class TwoWiki(Benchmark[_ChunkSettings]):
    """Multi-hop questions over a long context in chunks: initial, reversed, centre-flipped."""

    name = "two-wiki"
    paper = "Bai et al. 2024, arXiv 2308.14508 (LongBench-E); chunk orders of RoToR, arXiv 2502.08662, Appendix J"
    variants = "order of the chunks"
    metric = "f1"
    max_new_tokens = 32

    def read(self, source: DataSource, settings: _ChunkSettings, selection: Selection) -> Iterator[Case]:
        """Read LongBench-E's file, or its archive that contains the file."""
        records = read_examples(source.file(_TWO_WIKI, _LONGBENCH), _TWO_WIKI)
        for index, example in selection.parse(_Question, records):
            starts = token_starts(example.context, selection)
            group = "0-4k" if len(starts) < 4000 else "4-8k" if len(starts) < 8000 else "8k+"
            chunks = split_into_chunks(example.context, starts, settings.chunk, settings.limit)
            middle = (len(chunks) + 1) // 2
            flipped = [*chunks[:middle][::-1], *chunks[middle:][::-1]]
            orders = {"initial": chunks, "reversed": chunks[::-1], "centre-flipped": flipped}
            yield from TASKS["2wikimqa"].case(str(index), example, group=group).in_orders(orders)

    def score(self, case: Case, output: str) -> Scored:
        """Return the F1 of the whole output (LongBench's `qa_f1_score`)."""
        return Scored(normalize_answer(output), {"f1": token_f1(output, case.gold)})


class _Events(Example):
    Q: Text
    A: Text
    type: Text | None = None


class _LongText(Example):
    input: Text
    qa_pairs: list[_Events]

    @model_validator(mode="before")
    @classmethod
    def _from_one_question(cls, record: Any) -> Any:
        if not isinstance(record, dict) or "question" not in record:
            return record
        example = {"Q": record["question"], "A": record.get("answer"), "type": record.get("task", record.get("type"))}
        return {"input": record.get("context", record.get("input")), "qa_pairs": [example]}

    _from_json_or_python = field_validator("qa_pairs", mode="before")(parse_list)


class Timeline(Benchmark[_ChunkSettings]):
    """Put events of a long text into order: a control whose segments are NOT a set."""

    name = "timeline"
    paper = "Li et al. 2023, arXiv 2311.04939 (LooGLE)"
    variants = "order of the text"

    def read(self, source: DataSource, settings: _ChunkSettings, selection: Selection) -> Iterator[Case]:
        """Read LooGLE's long-dependency questions, and keep the timelines."""
        questions: list[tuple[str, _Events]] = []
        records = read_examples(source.file(_LOOGLE, "hub://bigai-nlco/LooGLE/data.zip"), _LOOGLE)
        for index, record in enumerate(records):
            example = base.parse_example(_LongText, record, f"example {index}")
            questions += [(example.input, each) for each in example.qa_pairs if each.type in _TIMELINES]
        if not questions:
            raise InvalidDataset("expected questions of the type timeline_reorder, got none")
        for index, (text, event) in selection.sample(questions):
            chunks = split_into_chunks(text, token_starts(text, selection), settings.chunk, settings.limit)
            yield from Case(
                question=str(index),
                prefix="Please answer the question based on the long texts below. \n",
                suffix=f"\nQuestion: {event.Q}\nAnswer: ",
                gold=tuple(each.strip() for each in event.A.split(",")),
                query=event.Q,
            ).in_orders({"initial": chunks, "reversed": chunks[::-1]})

    def score(self, case: Case, output: str) -> Scored:
        """Score 1 if the numerals of all events are first mentioned in the right order."""
        named = named_events(output, case.gold)
        return Scored(",".join(map(str, named)), {"accuracy": float(named == [*map(_value, case.gold)])})


def named_events(output: str, gold: Sequence[str]) -> list[int]:
    """Return the numbers of the events in the order in which an output first names them.

    Numerals of the question's kind, Arabic or Roman, come first; if they leave an event out, those of the other kind.

    >>> named_events("2) Opened on 1 May 1965, 1) opened in 1966 with 3 others, 3) closed.", ["1", "2", "3"])
    [2, 1, 3]
    """
    expected, named = [*map(_value, gold)], list[int]()
    for kind in ("roman", "arabic") if any(each.isalpha() for each in gold) else ("arabic", "roman"):
        for pattern in _NUMERALS[kind]:
            values = dict.fromkeys(_value(each) for each in pattern.findall(output) if each.isdigit() or each in _ROMAN)
            named = [each for each in values if each in expected]
            if len(named) == len(expected):
                return named
    return named


def _value(numeral: str) -> int:
    bare = numeral.strip("()[]. ")
    return _ROMAN.index(bare) + 1 if bare in _ROMAN else int(bare)
