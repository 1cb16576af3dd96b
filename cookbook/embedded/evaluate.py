"""Measure the embedded models: `python evaluate.py --out results.json [--questions 500]`.

Fresh contexts use held-out names and a uniform gold slot. The questions of the atlas are answered over ten chunks that
the package's own retriever finds. Every method answers the same questions over the same documents in the same order.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from names import Names
from tqdm import tqdm
from world import UNKNOWN, Difficulty, Question, make_context

from invariant_rag import RAG, InvariantModel, Segment
from invariant_rag.audit.statistics import wilson_interval
from invariant_rag.orderings import MonoT5
from invariant_rag.rag.retrieval import index_documents
from invariant_rag.segments import document_rendering

DATA = Path(__file__).parent.parent / "data"
EMBEDDED = Path(__file__).parent.parent.parent / "invariant_rag" / "models" / "embedded"
READERS: dict[str, tuple[str, str, str]] = {
    "plain, order given": ("generator", "sequential", "given"),
    "plain, lexical": ("generator", "sequential", "lexical"),
    "RoToR, lexical": ("generator", "rotor", "lexical"),
    "RoToR, lexical-reversed": ("generator", "rotor", "lexical-reversed"),
    "RoToR, frequency": ("generator", "rotor", "frequency"),
    "RoToR, monot5": ("generator", "rotor", "monot5"),
    "PINE": ("generator", "pine", "lexical"),
    "native RoToR, lexical": ("native", "rotor", "lexical"),
    "native, plain attention": ("native", "sequential", "given"),
}
"""Name of a row: checkpoint, method, ordering."""
BINS = 5


@dataclass(frozen=True)
class Item:
    """One question, the documents that it is asked of, and how many of them there are."""

    documents: list[Segment]
    question: Question


def items(count: int, documents: int, seed: int | str, unknown: float = 0.0) -> list[Item]:
    """Return fresh questions over held-out names; the gold slot is uniform, and all are without answer or none."""
    names = Names(random.Random(f"evaluate-{seed}-{documents}-{unknown}"), "test")
    level = Difficulty(unknown=unknown)
    found: list[Item] = []
    while len(found) < count:
        context = make_context(names, documents, 4, skew=0.0, level=level)
        segments = [Segment(document.text, title=document.title) for document in context.documents]
        found += [Item(segments, question) for question in context.questions]
    return found[:count]


def interval(right: int, count: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share (Wilson)."""
    estimate = wilson_interval(right, count)
    return estimate.low, estimate.high


def answers(lm: InvariantModel, asked: list[Item], about: str) -> list[str]:
    """Return the answers, a few prompts at a time."""
    found: list[str] = []
    for start in tqdm(range(0, len(asked), 4), desc=about, leave=False):
        prompts = [lm.chat_prompt(item.question.text, item.documents) for item in asked[start : start + 4]]
        found += [reply.text for reply in lm.generate(prompts, max_new_tokens=20)]
    return found


def measure(lm: InvariantModel, asked: list[Item], about: str) -> dict[str, Any]:
    """Return exact match, in all and by gold slot, and the share of questions that were declined."""
    replies = answers(lm, asked, about)
    right = [reply == item.question.answer for reply, item in zip(replies, asked, strict=True)]
    bins: list[list[bool]] = [[] for _ in range(BINS)]
    for item, good in zip(asked, right, strict=True):
        if item.question.slot is not None:
            bins[item.question.slot * BINS // len(item.documents)].append(good)
    return {
        "questions": len(asked),
        "exact_match": round(sum(right) / len(right), 4),
        "interval": [round(bound, 4) for bound in interval(sum(right), len(right))],
        "slots": [[round(sum(each) / len(each), 4), len(each)] for each in bins if each],
        "declined": round(sum(reply == UNKNOWN for reply in replies) / len(replies), 4),
    }


def atlas(lm: InvariantModel) -> list[str]:
    """Return the questions of the atlas that are answered rightly."""
    rag = RAG(lm, index_documents(DATA / "atlas", "faiss"), k=10)
    rows = [json.loads(line) for line in (DATA / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["question"] for row in rows if rag.ask(row["question"], max_new_tokens=20).text == row["answer"]]


def ranked_first(folder: Path, count: int, documents: int) -> dict[str, Any]:
    """Return how often the MonoT5 puts the gold document first."""
    scorer, first = MonoT5(folder), 0
    asked = items(count, documents, seed=1)
    for item in tqdm(asked, desc="MonoT5", leave=False):
        texts = [document_rendering(segment) for segment in item.documents]
        scores = scorer.score_texts(texts, item.question.text)
        first += max(range(documents), key=scores.__getitem__) == item.question.slot
    return {"questions": count, "first": round(first / count, 4), "interval": interval(first, count)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=EMBEDDED, help="folder of the three checkpoints")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=int, nargs="+", default=[10, 20, 30])
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--readers", nargs="+", default=list(READERS), choices=list(READERS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"reading": {}, "unanswerable": {}, "atlas": {}}
    loaded: dict[str, InvariantModel] = {}
    for reader in options.readers:
        checkpoint, method, ordering = READERS[reader]
        if checkpoint not in loaded:
            loaded[checkpoint] = InvariantModel.from_pretrained(options.models / checkpoint, dtype="float32")
        chosen = MonoT5(options.models / "monot5") if ordering == "monot5" else ordering
        lm = loaded[checkpoint].with_method(method, ordering=chosen)
        results["reading"][reader] = {}
        for documents in options.documents:
            asked = items(options.questions, documents, seed=0)
            results["reading"][reader][documents] = measure(lm, asked, f"{reader}, {documents}")
        asked = items(options.questions // 2, options.documents[0], seed=0, unknown=1.0)
        results["unanswerable"][reader] = measure(lm, asked, f"{reader}, unanswerable")
        results["atlas"][reader] = atlas(lm)
        print(reader, json.dumps({name: results[name][reader] for name in ("reading", "unanswerable")}), flush=True)
        print(f"  atlas: {len(results['atlas'][reader])} right", flush=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results["monot5"] = ranked_first(options.models / "monot5", options.questions, documents=20)
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
