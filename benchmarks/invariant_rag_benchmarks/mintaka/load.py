"""Load the cases: a question over retrieved triples, as retrieved and shuffled."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from invariant_rag.errors import InvalidChoice, InvalidDataset

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

PUBLIC = "https://raw.githubusercontent.com/soyoung97/RoToR/main/src/data_wrapper/kgqa_data/"
OPENINGS = {
    "original": "Below are the facts in the form of the triple meaningful to answer the question. ",
    "swapped": "Below are knowledge statements expressed as triples meaningful to answer the question. ",
}
REQUEST = (
    'Answer the given question in a JSON format, such as {"Answer": "xxx"}. '
    "Only output the JSON, do NOT say any word or explain."
)


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        triples: Triples in a prompt: 30 or 50 in the paper.
        template: `original`, or `swapped`: the other wording of the paper's Appendix K.
        shuffles: How many shuffled orders follow the initial one; their seeds are 0, 1, 2...
    """

    triples: int = 30
    template: str = "original"
    shuffles: int = 3


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the triples that the paper retrieved with MPNet, best first."""
    if settings.template not in OPENINGS:
        raise InvalidChoice(f"template: expected original or swapped, got {settings.template!r}")
    name = f"mintaka_noshuffle_top{settings.triples}.json"
    path = source.file(name, PUBLIC + name)
    kept = re.search(r"top(\d+)", path.name)
    if kept and int(kept[1]) < settings.triples:
        raise InvalidDataset(f"expected a file with {settings.triples} triples, such as {name!r}, got {path.name!r}")
    examples = read_examples(path)
    cases = []
    for index, example in selection.sample(examples):
        where = f"example {index}"
        if isinstance(example, dict) and "knowledges" not in example and "questionEntity" in example:
            raise InvalidDataset(
                f"{where}: expected retrieved triples (`knowledges`), got a question of Mintaka itself, without any",
                hint=f"Use {name} of soyoung97/RoToR.",
            )
        question, answers = get_field(example, "question", where), get_field(example, "answers", where)
        knowledge = get_field(example, "knowledges", where)
        triples = [f"({', '.join(map(str, triple))})\n" for triple in knowledge[0]] if knowledge else []
        triples = triples[: settings.triples] or ["(No information)"]
        variants = {"initial": triples}
        for seed in range(settings.shuffles):
            variants[f"shuffle {seed}"] = random.Random(f"{seed} {index}").sample(triples, len(triples))
        for variant, listed in variants.items():
            cases.append(
                Case(
                    question=str(index),
                    variant=variant,
                    prefix="",
                    segments=tuple(listed),
                    suffix=f"\n\nQuestion: {question}, Answer: ",
                    gold=tuple(map(str, answers)),
                    query=question,
                    system=OPENINGS[settings.template] + REQUEST,
                )
            )
    return cases
