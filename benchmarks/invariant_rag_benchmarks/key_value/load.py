"""Load the cases: a JSON object of random pairs, the asked one moved from slot to slot."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import InvalidChoice, InvalidDataset

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.slots import insert_gold, parse_slots, quarters
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

PUBLIC = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/kv_retrieval_data/"

OPENING = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        keys: Pairs in a prompt: 75, 140 or 300 in the paper.
        slots: Slots of the asked pair: empty for 0, 25, 50, 75 and 100 per cent, `all`, or comma-separated numbers.
        file_keys: Pairs in a prompt of the file; 0 for `keys`. The code of arXiv 2406.02536 reads the file of 300,
            moves the asked pair to its slot among them, and keeps the first 140.
        make: Generate that many questions from the seed, as the paper's script does, instead of reading a file.
    """

    keys: int = 75
    slots: str = ""
    file_keys: int = 0
    make: int = 0


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the official file, or generate random pairs."""
    count = settings.keys
    listed_in_file = count if settings.make else settings.file_keys or count
    if listed_in_file < count:
        raise InvalidChoice(f"file_keys: expected at least the {count} keys of a prompt, got {listed_in_file}")
    if settings.make:
        examples = random_examples(settings.make, count, selection.seed)
    else:
        name = f"kv-retrieval-{listed_in_file}_keys.jsonl.gz"
        examples = read_examples(source.file(name, PUBLIC + name))
    slots = parse_slots(settings.slots, count, quarters(count))
    cases = []
    for index, example in selection.sample(examples):
        where = f"example {index}"
        key, value = get_field(example, "key", where), get_field(example, "value", where)
        pairs = [tuple(pair) for pair in get_field(example, "ordered_kv_records", where)]
        if len(pairs) != listed_in_file or (key, value) not in pairs:
            raise InvalidDataset(
                f"{where}: expected {listed_in_file} pairs, the asked one among them, got {len(pairs)}"
            )
        others = [pair for pair in pairs if pair != (key, value)]
        for slot in slots:
            listed = insert_gold(slot, (key, value), others)[:count]
            cases.append(
                Case(
                    question=str(index),
                    variant=str(slot),
                    prefix=OPENING,
                    segments=tuple(f'"{each}": "{other}",\n ' for each, other in listed),
                    suffix=f'}}\n\nKey: "{key}"\nCorresponding value:',
                    gold=(value,),
                    query=key,
                )
            )
    return cases


def random_examples(questions: int, keys: int, seed: int) -> list[dict[str, Any]]:
    """Return random UUID pairs in the format of the official files."""
    source = random.Random(f"key-value {keys} {seed}")

    def random_uuid() -> str:
        return str(uuid.UUID(int=source.getrandbits(128), version=4))

    examples = []
    for _ in range(questions):
        pairs = [(random_uuid(), random_uuid()) for _ in range(keys)]
        key, value = source.choice(pairs)
        examples.append({"ordered_kv_records": pairs, "key": key, "value": value})
    return examples
