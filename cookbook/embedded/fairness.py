"""Measure fairness: `python fairness.py [--questions 300]`. Does accuracy depend on where a document lands?

Documents are prefilled in a random physical order, as a salted content ordering would put them, and accuracy is counted
by the slot of the gold document. Invariance cannot show this: sorting is invariant, and still favours places.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from evaluate import BINS, EMBEDDED, interval, items
from tqdm import tqdm

from invariant_rag import InvariantModel, RingAverage

READERS: dict[str, tuple[str, int]] = {
    "plain": ("sequential", 0),
    "RoToR": ("rotor", 0),
    "RoToR, 2 cuts": ("rotor", 2),
    "RoToR, 5 cuts": ("rotor", 5),
    "RoToR, all cuts": ("rotor", 10),
    "PINE": ("pine", 0),
    "NIA": ("isolated", 0),
    "parallel windows": ("parallel-windows", 0),
    "Structured Prompting": ("structured", 0),
    "APE": ("ape", 0),
}
"""Name of a row: method, and cuts of the ring that are averaged."""


def measure(lm: InvariantModel, cuts: int, questions: int, documents: int, about: str) -> dict[str, Any]:
    """Return accuracy in all and by slot, and how much it varies over slots."""
    reader: Any = RingAverage(lm, cuts) if cuts else lm
    bins: list[list[bool]] = [[] for _ in range(BINS)]
    for item in tqdm(items(questions, documents, seed=2), desc=about, leave=False):
        prompt = lm.chat_prompt(item.question.text, item.documents)
        right = reader.generate(prompt, max_new_tokens=20).text == item.question.answer
        bins[item.question.slot * BINS // documents].append(right)
    places = [sum(each) / len(each) for each in bins]
    right = sum(map(sum, bins))
    return {
        "questions": questions,
        "exact_match": right / questions,
        "interval": interval(right, questions),
        "places": places,
        "spread": max(places) - min(places),
        "deviation": statistics.pstdev(places),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=EMBEDDED, help="folder of the checkpoints")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("fairness.json"))
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--documents", type=int, default=10)
    parser.add_argument("--readers", nargs="+", default=list(READERS), choices=list(READERS))
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = InvariantModel.from_pretrained(options.models / "generator", dtype="float32")
    results = {"documents": options.documents, "readers": {}}
    for name in options.readers:
        method, cuts = READERS[name]
        lm = generator.with_method(method, ordering="given")
        results["readers"][name] = measure(lm, cuts, options.questions, options.documents, name)
        print(name, json.dumps(results["readers"][name]), flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
