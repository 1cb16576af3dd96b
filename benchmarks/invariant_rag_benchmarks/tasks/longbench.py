"""LongBench: questions over long contexts in chunks, in several orders of these."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from pathlib import Path
from statistics import mean

from invariant_rag.audit.metrics import normalize_answer, token_f1
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
from invariant_rag_benchmarks.variants import chunk_orders, split_into_chunks, token_starts

PUBLIC = "hub://THUDM/LongBench/data.zip"
TWO_WIKI = "2wikimqa_e.jsonl"


@dataclass(frozen=True)
class Task:
    """One task, as `longbench.toml` declares it.

    Attributes:
        group: Its column in table 2 of arXiv 2406.02536. Few-shot and code tasks are continued as text, without the
            chat template.
        metric: `f1`, `class`, or a name in `METRICS`.
        max_new_tokens: Longest output.
        prefix: The prompt before the context.
        suffix: The prompt after the context; `{input}` stands for the question.
    """

    group: str
    metric: str
    max_new_tokens: int
    prefix: str
    suffix: str


@cache
def tasks() -> dict[str, Task]:
    """Return every task by its name."""
    with Path(__file__).with_name("longbench.toml").open("rb") as file:
        return {name: Task(**fields) for name, fields in tomllib.load(file).items()}


def groups() -> dict[str, list[str]]:
    """Return the names of the tasks in each group."""
    return {
        group: [name for name, task in tasks().items() if task.group == group]
        for group in dict.fromkeys(task.group for task in tasks().values())
    }


class LongBenchSettings(Settings):
    """Settings of the benchmark."""

    tasks: str = Field(
        "single-doc",
        description="all, a group (single-doc, multi-doc, synthetic, summaries, few-shot, code), or names with commas",
    )
    chunk: int = Field(512, ge=1, description="tokens in a segment")
    limit: int = Field(10_000, ge=2, description="tokens of the context that are kept: its first half and its last")
    reorder: bool = Field(False, description="ask also with the segments reversed, and with both halves reversed")


class TwoWikiSettings(Settings):
    """Settings of the benchmark."""

    chunk: int = Field(512, ge=1, description="tokens in a segment")
    limit: int = Field(10_000, ge=1, description="tokens of the context that are kept; the paper kept 10,000")


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
        chosen = {"all": list(tasks()), **groups()}.get(settings.tasks) or settings.tasks.replace(" ", "").split(",")
        if unknown := [name for name in chosen if name not in tasks()]:
            raise UnknownName("task of longbench", unknown[0], ["all", *groups(), *tasks()])
        _check_file(source.path, chosen)
        for name in chosen:
            member, task = f"{name}.jsonl", tasks()[name]
            for index, record in selection.sample(read_examples(source.file(member, PUBLIC), f"/{member}")):
                asked = parse_example(_Question, record, f"example {index} of {name}")
                if task.metric == "class" and asked.all_classes is None:
                    raise InvalidDataset(f"example {index} of {name}: expected all_classes, got none")
                starts = token_starts(asked.context, selection.load_tokenizer)
                chunks = split_into_chunks(asked.context, starts, settings.chunk, settings.limit, middle=True)
                for variant, listed in (chunk_orders(chunks) if settings.reorder else {"initial": chunks}).items():
                    yield Case(
                        question=f"{name}-{index}",
                        variant=variant,
                        prefix=task.prefix,
                        segments=tuple(listed),
                        suffix=task.suffix.replace("{input}", asked.input),
                        gold=(*asked.answers, *((asked.all_classes or ()) if task.metric == "class" else ())),
                        query=asked.input,
                        chat=task.group not in {"few-shot", "code"},
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
            return Scored(normalize_answer(said), {"score": token_f1(said, case.gold)})
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


class TwoWiki(Benchmark[TwoWikiSettings]):
    """2WikiMultihopQA of LongBench-E: the context as it is, reversed, and with both halves reversed."""

    name = "two-wiki"
    about = "Multi-hop questions over a long context in chunks: initial, reversed, centre-flipped."
    paper = "Bai et al. 2024, arXiv 2308.14508 (LongBench-E); chunk orders of RoToR, arXiv 2502.08662, Appendix J"
    variants = "order of the chunks"
    settings = TwoWikiSettings
    metric = "f1"
    max_new_tokens = 32

    def read(self, source: DataSource, settings: TwoWikiSettings, selection: Selection) -> Iterator[Case]:
        """Read LongBench-E's file, or its archive that contains the file."""
        task = tasks()["2wikimqa"]
        for index, record in selection.sample(read_examples(source.file(TWO_WIKI, PUBLIC), TWO_WIKI)):
            asked = parse_example(_Question, record, f"example {index}")
            starts = token_starts(asked.context, selection.load_tokenizer)
            chunks = split_into_chunks(asked.context, starts, settings.chunk, settings.limit)
            for variant, listed in chunk_orders(chunks).items():
                yield Case(
                    question=str(index),
                    variant=variant,
                    prefix=task.prefix,
                    segments=tuple(listed),
                    suffix=task.suffix.replace("{input}", asked.input),
                    gold=tuple(asked.answers),
                    query=asked.input,
                    group="0-4k" if len(starts) < 4000 else "4-8k" if len(starts) < 8000 else "8k+",
                )

    def score(self, case: Case, output: str) -> Scored:
        """Return the F1 of the whole output (LongBench's `qa_f1_score`)."""
        return Scored(normalize_answer(output), {"f1": token_f1(output, case.gold)})


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
