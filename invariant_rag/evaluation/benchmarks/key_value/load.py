"""Cases: a JSON object of random pairs, the asked one moved from slot to slot."""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Any

from invariant_rag.errors import InvalidDataset
from invariant_rag.evaluation.benchmarks.base import Case, Selection
from invariant_rag.evaluation.benchmarks.slots import chosen_slots, quarters, with_gold_at
from invariant_rag.evaluation.benchmarks.sources import Source, entry, read_records

PUBLIC = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/kv_retrieval_data/"

OPENING = "Extract the value corresponding to the specified key in the JSON object below.\n\nJSON data:\n{"


@dataclass(frozen=True)
class Settings:
    """What can be chosen.

    Attributes:
        keys: Pairs in a prompt: 75, 140 or 300 in the paper.
        slots: Slots of the asked pair: empty for 0, 25, 50, 75 and 100 per cent, `all`, or numbers with commas.
        make: Make that many questions from the seed, as the paper's script does, instead of reading a file.
    """

    keys: int = 75
    slots: str = ""
    make: int = 0


def load(source: Source, settings: Settings, selection: Selection) -> list[Case]:
    """Read the official file, or make questions of random UUIDs."""
    count = settings.keys
    if settings.make:
        records = made(settings.make, count, selection.seed)
    else:
        name = f"kv-retrieval-{count}_keys.jsonl.gz"
        records = read_records(source.file(name, PUBLIC + name))
    slots = chosen_slots(settings.slots, count, quarters(count))
    cases = []
    for place, record in selection.of(records):
        where = f"record {place}"
        key, value = entry(record, "key", where), entry(record, "value", where)
        pairs = [tuple(pair) for pair in entry(record, "ordered_kv_records", where)]
        if len(pairs) != count or (key, value) not in pairs:
            raise InvalidDataset(f"{where}: expected {count} pairs, the asked one among them, got {len(pairs)}")
        others = [pair for pair in pairs if pair != (key, value)]
        for slot in slots:
            listed = with_gold_at(slot, (key, value), others)
            cases.append(
                Case(
                    question=str(place),
                    variant=str(slot),
                    prefix=OPENING,
                    segments=tuple(f'"{each}": "{other}",\n ' for each, other in listed),
                    suffix=f'}}\n\nKey: "{key}"\nCorresponding value:',
                    gold=(value,),
                    query=key,
                )
            )
    return cases


def made(questions: int, keys: int, seed: int) -> list[dict[str, Any]]:
    """Return questions of random UUIDs, in the format of the official files."""
    source = random.Random(f"key-value {keys} {seed}")

    def random_uuid() -> str:
        return str(uuid.UUID(int=source.getrandbits(128), version=4))

    records = []
    for _ in range(questions):
        pairs = [(random_uuid(), random_uuid()) for _ in range(keys)]
        key, value = source.choice(pairs)
        records.append({"ordered_kv_records": pairs, "key": key, "value": value})
    return records
