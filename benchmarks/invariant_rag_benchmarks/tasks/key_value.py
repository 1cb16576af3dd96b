"""Key-value retrieval: find the value of a key among 75, 140 or 300 random pairs."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from typing import Any

from invariant_rag.errors import InvalidChoice
from pydantic import Field

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset
from invariant_rag_benchmarks.variants import insert_gold, parse_slots

PUBLIC = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/kv_retrieval_data/"
OPENING = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"


class KeyValueSettings(Settings):
    """Settings of the benchmark.

    The code of arXiv 2406.02536 reads the file of 300, moves the asked pair to its slot among them, and keeps the first
    140: `file_keys` and `keys`.
    """

    keys: int = Field(75, ge=1, description="pairs in a prompt; 75, 140 and 300 in the paper")
    slots: str = Field("", description="`all`, or slots with commas; empty: 0, 25, 50, 75 and 100%, rounded down")
    file_keys: int = Field(0, ge=0, description="pairs in the file, of which the first `keys` are kept; 0: as many")
    make: int = Field(0, ge=0, description="make that many questions from the seed, instead of reading a file")


class _Question(Example):
    ordered_kv_records: list[tuple[Text, Text]]
    key: Text
    value: Text


class KeyValue(Benchmark[KeyValueSettings]):
    """A JSON object of random pairs, the asked one moved from slot to slot."""

    name = "key-value"
    about = "Find the value of a key among 75, 140 or 300 random pairs."
    paper = "Liu et al. 2023, arXiv 2307.03172"
    variants = "slot of the asked pair, from 0"
    settings = KeyValueSettings

    def read(self, source: DataSource, settings: KeyValueSettings, selection: Selection) -> Iterator[Case]:
        """Read the official file, or generate random pairs."""
        count = settings.keys
        in_file = count if settings.make else settings.file_keys or count
        if in_file < count:
            raise InvalidChoice(f"file_keys: expected at least the {count} keys of a prompt, got {in_file}")
        if settings.make:
            examples = random_examples(settings.make, count, selection.seed)
        else:
            name = f"kv-retrieval-{in_file}_keys.jsonl.gz"
            examples = read_examples(source.file(name, PUBLIC + name))
        slots = parse_slots(settings.slots, count, sorted({quarter * (count - 1) // 4 for quarter in range(5)}))
        for index, record in selection.sample(examples):
            asked = parse_example(_Question, record, f"example {index}")
            pair, pairs = (asked.key, asked.value), asked.ordered_kv_records
            if len(pairs) != in_file or pair not in pairs:
                raise InvalidDataset(f"example {index}: expected {in_file} pairs with the asked one, got {len(pairs)}")
            others = [each for each in pairs if each != pair]
            for slot in slots:
                yield Case(
                    question=str(index),
                    variant=str(slot),
                    prefix=OPENING,
                    segments=tuple(f'"{key}": "{value}",\n ' for key, value in insert_gold(slot, pair, others)[:count]),
                    suffix=f'}}\n\nKey: "{asked.key}"\nCorresponding value:',
                    gold=(asked.value,),
                    query=asked.key,
                )

    def score(self, case: Case, output: str) -> Scored:
        """Return accuracy as in Lost in the Middle: the value is a substring of the output, ignoring case."""
        said = output.strip().lower()
        right = case.gold[0].lower() in said
        return Scored(case.gold[0].lower() if right else said, {"accuracy": float(right)})


def random_examples(questions: int, keys: int, seed: int) -> list[dict[str, Any]]:
    """Return random UUID pairs in the format of the official files."""
    source = random.Random(f"key-value {keys} {seed}")
    examples = []
    for _ in range(questions):
        made = [str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(2 * keys)]
        pairs = list(zip(made[::2], made[1::2], strict=True))
        key, value = source.choice(pairs)
        examples.append({"ordered_kv_records": pairs, "key": key, "value": value})
    return examples
