"""LongBench: sixteen English tasks over long contexts in chunks; of contexts that are too long, the middle is cut."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from statistics import mean

from invariant_rag.audit.metrics import normalise_answer, token_f1
from invariant_rag.errors import InvalidDataset, UnknownName
from pydantic import Field

from invariant_rag_benchmarks.base import (
    Benchmark,
    Case,
    Example,
    Record,
    Scored,
    Selection,
    Settings,
    Text,
    parse_example,
)
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.tasks.two_wiki import PUBLIC
from invariant_rag_benchmarks.variants import chunk_orders, split_into_chunks, token_starts


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        group: Its column in table 2 of arXiv 2406.02536.
        metric: `f1`, `rouge_l`, `class`, `paragraph`, `count` or `edit_similarity`.
        max_new_tokens: Longest output.
        prefix: The prompt before the context.
        suffix: The prompt after the context; `{input}` stands for the question.
    """

    group: str
    metric: str
    max_new_tokens: int
    prefix: str
    suffix: str

    @property
    def is_continued(self) -> bool:
        """Whether the prompt is continued as text, without the chat template, as few-shot and code tasks are."""
        return self.group in {"few-shot", "code"}


@cache
def tasks() -> dict[str, Task]:
    """Return every task by its name."""
    with Path(__file__).with_name("longbench.toml").open("rb") as file:
        return {name: Task(**fields) for name, fields in tomllib.load(file).items()}


def groups() -> dict[str, list[str]]:
    """Return the names of the tasks in each group."""
    found: dict[str, list[str]] = {}
    for name, task in tasks().items():
        found.setdefault(task.group, []).append(name)
    return found


def parse_tasks(described: str) -> list[str]:
    """Parse the `tasks` setting: `all`, a group, or comma-separated names.

    >>> parse_tasks("multi-doc")
    ['hotpotqa', '2wikimqa', 'musique']

    Raises:
        UnknownName: There is no such task.
    """
    if described == "all":
        return list(tasks())
    if described in groups():
        return groups()[described]
    names = [name.strip() for name in described.split(",")]
    for name in names:
        if name not in tasks():
            raise UnknownName("task of longbench", name, ["all", *groups(), *tasks()])
    return names


class LongBenchSettings(Settings):
    """Settings of the benchmark."""

    tasks: str = Field(
        "single-doc",
        description="all, a group (single-doc, multi-doc, synthetic, summaries, few-shot, code), or names with commas",
    )
    chunk: int = Field(512, ge=1, description="tokens in a segment")
    limit: int = Field(10_000, ge=2, description="tokens of the context that are kept: its first half and its last")
    reorder: bool = Field(False, description="ask also with the segments reversed, and with both halves reversed")


class _Question(Example):
    input: Text
    context: Text
    answers: list[Text]
    all_classes: list[Text] | None = None


class LongBench(Benchmark[LongBenchSettings]):
    """Questions over long contexts in chunks, each task with its own metric."""

    name = "longbench"
    about = "Sixteen English tasks over long contexts in chunks."
    paper = "Bai et al. 2023, arXiv 2308.14508; groups of arXiv 2406.02536, table 2"
    variants = "order of the chunks"
    settings = LongBenchSettings
    metric = "score"
    max_new_tokens = 512

    def read(self, source: DataSource, settings: LongBenchSettings, selection: Selection) -> Iterator[Case]:
        """Read the file of each task, or the archive that contains them."""
        chosen = parse_tasks(settings.tasks)
        _check_file(source.path, chosen)
        for name in chosen:
            member, task = f"{name}.jsonl", tasks()[name]
            for index, record in selection.sample(read_examples(source.file(member, PUBLIC), f"/{member}")):
                asked = parse_example(_Question, record, f"example {index} of {name}")
                if task.metric == "class" and asked.all_classes is None:
                    raise InvalidDataset(f"example {index} of {name}: expected all_classes, got none")
                starts = token_starts(asked.context, selection.load_tokenizer)
                chunks = split_without_middle(asked.context, starts, settings.chunk, settings.limit)
                for variant, listed in (chunk_orders(chunks) if settings.reorder else {"initial": chunks}).items():
                    yield Case(
                        question=f"{name}-{index}",
                        variant=variant,
                        prefix=task.prefix,
                        segments=tuple(listed),
                        suffix=task.suffix.replace("{input}", asked.input),
                        gold=(*asked.answers, *((asked.all_classes or ()) if task.metric == "class" else ())),
                        query=asked.input,
                        chat=not task.is_continued,
                        group=name,
                        max_new_tokens=task.max_new_tokens,
                    )

    def score(self, case: Case, output: str) -> Scored:
        """Score an output with its task's metric, the best over accepted answers; of few-shot tasks, its first line."""
        task, said = tasks()[case.group], output.strip()
        if task.group == "few-shot":
            said = said.partition("\n")[0]
        if task.metric == "class":
            return Scored(said, {"score": class_share(said, case.gold[0], case.gold[1:])})
        if task.metric == "f1":
            return Scored(normalise_answer(said), {"score": token_f1(said, case.gold)})
        return Scored(said, {"score": max(METRICS[task.metric](said, gold) for gold in case.gold)})

    def figures(self, records: Iterable[Record]) -> dict[str, float]:
        """Return the mean of each task, of each group's tasks where all were asked, and of all six groups."""
        scores: dict[str, list[float]] = {}
        for record in records:
            if record["variant"] == "initial":
                scores.setdefault(record["group"], []).append(record["scores"]["score"])
        means = {name: mean(each) for name, each in scores.items()}
        whole = {
            group: mean(means[name] for name in names) for group, names in groups().items() if {*names} <= {*means}
        }
        average = {"mean of groups": mean(whole.values())} if len(whole) == len(groups()) else {}
        return {**means, **whole, **average}


def _check_file(path: Path | None, chosen: list[str]) -> None:
    """Refuse a file of one task as the data of others."""
    if path is None or not path.is_file() or path.suffix == ".zip":
        return
    known = [name for name in tasks() if re.fullmatch(rf"{re.escape(name)}(_e)?", path.name.partition(".")[0])]
    if len(chosen) > 1 or (known and known != chosen):
        raise InvalidDataset(
            f"expected an archive or a folder with the files of {', '.join(chosen)}, got {path.name!r}",
            hint=f"Choose `--set tasks={(known or chosen)[0]}`.",
        )


def split_without_middle(text: str, starts: list[int], tokens: int, limit: int) -> list[str]:
    """Split a text into chunks; of one with more than `limit` tokens, its first and its last half of them only.

    >>> split_without_middle("abcdefgh", [*range(8)], tokens=2, limit=4)
    ['ab', 'gh']
    """
    if len(starts) <= limit:
        return split_into_chunks(text, starts, tokens, limit)
    tail = limit - limit // 2
    first = starts[-tail]
    end = [start - first for start in starts[-tail:]]
    return [
        *split_into_chunks(text, starts, tokens, limit // 2),
        *split_into_chunks(text[first:], end, tokens, tail),
    ]


def rouge_l(prediction: str, gold: str) -> float:
    """Return ROUGE-L at summary level as the package `rouge` computes it, which LongBench uses.

    Sentences end at full stops. Each word counts once: precision and recall are the words of any longest common
    subsequence of two sentences, as a share of the distinct words of prediction and gold.

    >>> round(rouge_l("the cat sat", "the cat ran off"), 4)
    0.5714
    """
    said, wanted = ([part.split() or [""] for part in text.split(".") if part] for text in (prediction, gold))
    if not said or not wanted:
        return 0.0
    shared = {word for reference in wanted for sentence in said for word in _common_subsequence(reference, sentence)}
    precision, recall = (len(shared) / len({word for part in text for word in part}) for text in (said, wanted))
    return 2 * precision * recall / (precision + recall + 1e-8)


def _common_subsequence(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return a longest common subsequence; of several, the one with the earliest words of `other`."""
    lengths = [[0] * (len(other) + 1)]
    for word in one:
        row = [0]
        for column, each in enumerate(other):
            row.append(lengths[-1][column] + 1 if word == each else max(lengths[-1][column + 1], row[column]))
        lengths.append(row)
    found, i, j = [], len(one), len(other)
    while i and j:
        if one[i - 1] == other[j - 1]:
            found.append(one[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def number_share(prediction: str, gold: str) -> float:
    """Return the share of the numbers in a prediction that are the first number of the gold answer."""
    numbers, wanted = re.findall(r"\d+", prediction), re.findall(r"\d+", gold)
    return numbers.count(wanted[0]) / len(numbers) if numbers else 0.0


def class_share(prediction: str, gold: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that a prediction contains, if the gold one is among them.

    Classes that are a part of the gold one's name do not count.
    """
    named = [each for each in classes if each in prediction and (each == gold or each not in gold)]
    return 1 / len(named) if gold in named else 0.0


def edit_similarity(prediction: str, gold: str) -> float:
    """Return the similarity of a line of code, in hundredths, as `fuzz.ratio` of fuzzywuzzy computes it.

    The line is the first one without a backtick and without the signs of a comment.
    """
    lines = (line for line in prediction.split("\n") if not any(sign in line for sign in ("`", "#", "//")))
    line = next(lines, "")
    return round(100 * SequenceMatcher(None, line, gold).ratio()) / 100 if line and gold else 0.0


METRICS: dict[str, Callable[[str, str], float]] = {
    "rouge_l": rouge_l,
    "paragraph": number_share,
    "count": number_share,
    "edit_similarity": edit_similarity,
}
"""Metrics of one gold answer, by the names in `longbench.toml`."""
