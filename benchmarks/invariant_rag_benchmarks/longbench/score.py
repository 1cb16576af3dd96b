"""Score: the metric of the task, the best over the accepted answers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from statistics import mean

from invariant_rag.evaluation.metrics import normalise_answer, token_f1

from invariant_rag_benchmarks.base import Case, Record, Scored
from invariant_rag_benchmarks.longbench.tasks import groups, tasks


def score(case: Case, output: str) -> Scored:
    """Score an output with its task's metric; of few-shot tasks, its first line."""
    task = tasks()[case.group]
    said = output.strip()
    if task.group == "few-shot":
        said = said.partition("\n")[0]
    if task.metric == "class":
        return Scored(said, {"score": class_share(said, case.gold[0], case.gold[1:])})
    if task.metric == "f1":
        return Scored(normalise_answer(said), {"score": token_f1(said, case.gold)})
    metric = {
        "rouge_l": rouge_l,
        "paragraph": number_share,
        "count": number_share,
        "edit_similarity": edit_similarity,
    }[task.metric]
    return Scored(said, {"score": max(metric(said, gold) for gold in case.gold)})


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


def figures(records: Iterable[Record]) -> dict[str, float]:
    """Return the mean of each task, of each group's tasks where all were asked, and of all six groups."""
    scores: dict[str, list[float]] = {}
    for record in records:
        if record["variant"] == "initial":
            scores.setdefault(record["group"], []).append(record["scores"]["score"])
    means = {name: mean(each) for name, each in scores.items()}
    whole = {group: mean(means[name] for name in names) for group, names in groups().items() if {*names} <= {*means}}
    average = {"mean of groups": mean(whole.values())} if len(whole) == len(groups()) else {}
    return {**means, **whole, **average}
