"""Mintaka: questions over triples of a knowledge graph, as retrieved and shuffled."""

from __future__ import annotations

import ast
import json
import random
import re
from collections.abc import Iterator
from typing import Any, Literal

from invariant_rag.audit.metrics import best_subspan_em, exact_match, normalize_answer, token_f1
from invariant_rag.errors import InvalidDataset
from pydantic import Field

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples

PUBLIC = "https://raw.githubusercontent.com/soyoung97/RoToR/main/src/data_wrapper/kgqa_data/"
OPENINGS = {
    "original": "Below are the facts in the form of the triple meaningful to answer the question. ",
    "swapped": "Below are knowledge statements expressed as triples meaningful to answer the question. ",
}
REQUEST = (
    'Answer the given question in a JSON format, such as {"Answer": "xxx"}. '
    "Only output the JSON, do NOT say any word or explain."
)


class MintakaSettings(Settings):
    """Settings of the benchmark."""

    triples: int = Field(30, ge=1, description="triples in a prompt; 30 and 50 in the paper")
    template: Literal["original", "swapped"] = Field("original", description="swapped: the wording of Appendix K")
    shuffles: int = Field(3, ge=0, description="shuffled orders after the initial one; their seeds are 0, 1, 2...")


class _Question(Example):
    question: Text
    answers: list[Any]
    knowledges: list[list[list[Any]]]


class Mintaka(Benchmark[MintakaSettings]):
    """Questions over retrieved triples."""

    name = "mintaka"
    about = "Questions over 30 or 50 retrieved triples, as retrieved and shuffled."
    paper = "Sen et al. 2022; set-up of RoToR, arXiv 2502.08662, Appendix C.2"
    variants = "initial order, and shuffles by seed"
    settings = MintakaSettings

    def read(self, source: DataSource, settings: MintakaSettings, selection: Selection) -> Iterator[Case]:
        """Read the triples that the paper retrieved with MPNet, best first."""
        name = f"mintaka_noshuffle_top{settings.triples}.json"
        path = source.file(name, PUBLIC + name)
        if (kept := re.search(r"top(\d+)", path.name)) and int(kept[1]) < settings.triples:
            raise InvalidDataset(f"expected a file such as {name!r}, got {path.name!r}")
        for index, record in selection.sample(read_examples(path)):
            asked = parse_example(_Question, record, f"example {index}")
            listed = asked.knowledges[0][: settings.triples] if asked.knowledges else []
            triples = [f"({', '.join(map(str, triple))})\n" for triple in listed] or ["(No information)"]
            shuffled = {
                f"shuffle {seed}": random.Random(f"{seed} {index}").sample(triples, len(triples))
                for seed in range(settings.shuffles)
            }
            for variant, segments in {"initial": triples, **shuffled}.items():
                yield Case(
                    question=str(index),
                    variant=variant,
                    prefix="",
                    segments=tuple(segments),
                    suffix=f"\n\nQuestion: {asked.question}, Answer: ",
                    gold=tuple(map(str, asked.answers)),
                    query=asked.question,
                    system=OPENINGS[settings.template] + REQUEST,
                )

    def score(self, case: Case, output: str) -> Scored:
        """Score as RoToR does, after Baek et al. (arXiv 2306.04136): containment, exact match and F1."""
        answer = stated_answer(output)
        scores = {
            "accuracy": best_subspan_em(answer, case.gold),
            "exact_match": exact_match(answer, case.gold),
            "f1": token_f1(answer, case.gold),
        }
        return Scored(normalize_answer(answer), scores)


def stated_answer(output: str) -> str:
    """Return the value of "Answer" in the first JSON object, or the first line if there is none.

    >>> stated_answer('{"Answer": ["Rome", "Oslo"]} I hope this helps')
    'Rome, Oslo'
    """
    text = output.strip()
    if "Answer" in text and "{" in text:
        first = text[text.index("{") :].replace("\n", "").split("}")[0] + "}"
        for parse in (json.loads, ast.literal_eval):
            try:
                found = parse(first)["Answer"]
            except (ValueError, SyntaxError, KeyError, TypeError):
                continue
            return ", ".join(map(str, found)) if isinstance(found, list) else str(found)
    return text.split("\n")[0]
