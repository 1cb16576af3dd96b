"""Judges of pairs: RewardBench and LLMBar ask which of two responses is better, in both orders."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean, mean
from typing import Any, Literal

from invariant_rag.errors import InvalidChoice
from pydantic import Field

from invariant_rag_benchmarks import base
from invariant_rag_benchmarks.base import Benchmark, Case, Example, Record, S, Scored, Selection, TaskSettings, Text
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset

REWARD_BENCH = "filtered-00000-of-00001.parquet"
LLMBAR = "https://raw.githubusercontent.com/princeton-nlp/LLMBar/main/Dataset/LLMBar/"
LLMBAR_SUBSETS = ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")
_SYSTEM = base.declared("tasks/prompts")["judge"]
FIRST, SECOND = "gold first", "gold second"
_VERDICT = re.compile(r"\[\[([AB])\]\]")
SECTIONS: dict[str, dict[str, int]] = base.declared("tasks/reward_bench")
"""Subsets of each section of RewardBench, with their weights."""


class _RewardBenchSettings(TaskSettings):
    explain: bool = Field(True, description="whether the judge explains itself first, or says the likelier verdict")


class _LLMBarSettings(_RewardBenchSettings):
    explain: bool = Field(False, description="as in reward-bench")
    subsets: str = Field("all", description=f"names with commas: {', '.join(LLMBAR_SUBSETS)}")


class _RewardBenchPair(Example):
    prompt: Text
    chosen: Text
    rejected: Text
    subset: Text


class _LLMBarPair(Example):
    input: Text
    output_1: Text
    output_2: Text
    label: Literal[1, 2]


class _Judging(Benchmark[S]):
    max_new_tokens = 500

    def score(self, case: Case, output: str) -> Scored:
        """Score 1 for the better response, 0 for the other, 0.5 without a verdict (as in RewardBench).

        The verdict is in the last line that has one, and not both: an explanation may quote the format. The answer is
        `better`, `worse` or `none`, so that a consistent judge gives the same answer in both orders.
        """
        verdicts = next(filter(None, (set(_VERDICT.findall(line)) for line in reversed(output.split("\n")))), set())
        if len(verdicts) != 1:
            return Scored("none", {"accuracy": 0.5})
        right = verdicts == set(case.gold)
        return Scored("better" if right else "worse", {"accuracy": float(right)})


class RewardBench(_Judging[_RewardBenchSettings]):
    """Which of two responses is better, asked in both orders: 23 subsets in four sections."""

    name = "reward-bench"
    paper = "Lambert et al. 2024, arXiv 2403.13787; set-up of PINE, arXiv 2407.01100"
    variants = "position of the chosen response"

    def read(self, source: DataSource, settings: _RewardBenchSettings, selection: Selection) -> Iterator[Case]:
        """Read the filtered split."""
        path = source.file(REWARD_BENCH, f"hub://allenai/reward-bench/data/{REWARD_BENCH}")
        for index, pair in selection.parse(_RewardBenchPair, read_examples(path)):
            yield from _cases(str(index), pair.prompt, (pair.chosen, pair.rejected), pair.subset, settings.explain)

    def figures(self, records: Iterable[Record]) -> dict[str, float]:
        """Return accuracies and flips by section, such as `Reasoning: gold first`, its weighted accuracy there.

        `shuffled` is the mean of both positions, the expectation of a random one; `flips` the share of pairs whose
        verdict changes with the position (PINE, Table 4); `Full` the mean of the four sections, if all were asked.
        """
        cells: dict[str, dict[str, list[float]]] = {column: defaultdict(list) for column in (FIRST, SECOND, "flips")}
        verdicts: dict[tuple[str, str], set[str]] = defaultdict(set)
        for record in records:
            cells[record["variant"]][record["group"]].append(record["scores"]["accuracy"])
            verdicts[record["group"], record["question"]].add(record["answer"])
        for (group, _), answers in verdicts.items():
            cells["flips"][group].append(float(len(answers) > 1))
        columns: dict[str, float] = {}
        for column, by_subset in cells.items():
            sections = {}
            for name, weights in SECTIONS.items():
                if there := [subset for subset in weights if subset in by_subset]:
                    means = [mean(by_subset[subset]) for subset in there]
                    sections[name] = fmean(means, [weights[subset] for subset in there])
            if len(sections) == len(SECTIONS):
                sections["Full"] = mean(sections.values())
            columns |= {f"{name}: {column}": value for name, value in sections.items()}
        for name in [*SECTIONS, "Full"]:
            if {*(both := [f"{name}: {FIRST}", f"{name}: {SECOND}"])} <= columns.keys():
                columns[f"{name}: shuffled"] = mean(columns[each] for each in both)
        return columns


class LLMBar(_Judging[_LLMBarSettings]):
    """Which of two outputs follows the instruction, asked in both orders: 419 pairs."""

    name = "llmbar"
    paper = "Zeng et al. 2024, arXiv 2310.07641"
    variants = "position of the better output"

    def read(self, source: DataSource, settings: _LLMBarSettings, selection: Selection) -> Iterator[Case]:
        """Read one file per subset, `<subset>.json`, or the one file at the path, which is named after its subset."""
        names = list(LLMBAR_SUBSETS) if settings.subsets == "all" else settings.subsets.split(",")
        if source.path is not None and source.path.is_file():
            names = [source.path.name.partition(".")[0]]
            if settings.subsets not in {"all", *names}:
                raise InvalidDataset(f"expected a file of {settings.subsets}, got {source.path.name!r}")
        if unknown := [name for name in names if name not in LLMBAR_SUBSETS]:
            raise InvalidChoice(f"subsets: expected names among {', '.join(LLMBAR_SUBSETS)}, got {', '.join(unknown)}")
        records = []
        for name in names:
            folder = name if name == "Natural" else f"Adversarial/{name}"
            path = source.file(f"{name}.json", f"{LLMBAR}{folder}/dataset.json")
            records += [(name, f"{name} {index}", each) for index, each in enumerate(read_examples(path))]
        for _, (group, where, record) in selection.sample(records):
            pair = base.parse_example(_LLMBarPair, record, where)
            outputs = (pair.output_1, pair.output_2) if pair.label == 1 else (pair.output_2, pair.output_1)
            yield from _cases(where, pair.input, outputs, group, settings.explain)


def _cases(name: str, question: str, better_first: tuple[str, str], group: str, explain: bool) -> Iterator[Case]:
    """Yield the two cases of a pair: the better response first, and second."""
    candidates = () if explain else ("[[A]]", "[[B]]")
    more: dict[str, Any] = {"query": question, "system": _SYSTEM, "candidates": candidates, "group": group}
    for variant, gold, responses in ((FIRST, "A", better_first), (SECOND, "B", better_first[::-1])):
        segments = [
            f"\n[The Start of Assistant {letter}'s Answer]\n{text}\n[The End of Assistant {letter}'s Answer]\n"
            for letter, text in zip("AB", responses, strict=True)
        ]
        yield Case(name, variant, f"[User Question]\n{question}\n", tuple(segments), gold=(gold,), **more)
