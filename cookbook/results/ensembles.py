"""Measure ensembles with the embedded model: `python ensembles.py [--limit 20]`.

Two questions: how many rounds attention sorting needs, and what one expert per document does. The result is one page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from invariant_rag_benchmarks import resolve_benchmark
from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.data import DataSource
from measure import HERE, contexts

from invariant_rag import AttentionSorting, ContextExperts, InvariantModel
from invariant_rag.audit.statistics import wilson_interval
from invariant_rag.cli.progress import progress_bar

DOCUMENTS = 30
SLOTS = "0,9,19,29"
NEW_TOKENS = 20
BENCHMARK = resolve_benchmark("lost-in-the-middle")

INTRODUCTION = """\
# Ensembles with the embedded model

Written by `python cookbook/results/ensembles.py`, seed {seed}. Per cent;
95% Wilson intervals over the questions in brackets.
"""
SORTING = """\
## Attention sorting: how many rounds?

{limit} questions over {documents} documents of the embedded model's own world, gold at four slots,
`sequential` with `given` as published. A round is one more prefill. One question at one slot is 5
points: smaller differences show nothing.
"""
EXPERTS = """\
## One expert per document

`ContextExperts` on the same questions, `gamma=0`: the documents have no retriever's score. It is the same for every
slot.
"""


def cases(count: int, seed: int) -> list[Case]:
    """Make the cases: every question with its gold document at four slots."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "world.jsonl"
        path.write_text("".join(json.dumps(each) + "\n" for each in contexts(count, DOCUMENTS, seed)), "utf-8")
        settings = BENCHMARK.parse_settings({"documents": DOCUMENTS, "template": "plain", "slots": SLOTS})
        return BENCHMARK.load(DataSource(path), settings, Selection(seed=seed))


def accuracy(rights: Sequence[bool]) -> str:
    """Write a share with its interval."""
    found = wilson_interval(sum(rights), len(rights))
    return f"{100 * found.value:.1f} ({100 * found.low:.1f} to {100 * found.high:.1f})"


def is_right(system: Any, lm: InvariantModel, case: Case) -> bool:
    """Ask a model or an ensemble, and score its answer."""
    text = system.generate(case.prompt(lm), max_new_tokens=NEW_TOKENS).text
    return BENCHMARK.score(case, text).scores[BENCHMARK.metric] == 1


def table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> list[str]:
    header = list(header)
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)] + [""]


def sorting_table(lm: InvariantModel, asked: Sequence[Case], advance: Any) -> list[str]:
    slots = sorted({int(case.variant) for case in asked})
    rows = []
    for rounds in range(4):
        system = AttentionSorting(lm, rounds) if rounds else lm
        rights: dict[int, list[bool]] = {slot: [] for slot in slots}
        for case in asked:
            rights[int(case.variant)].append(is_right(system, lm, case))
            advance()
        shares = [f"{100 * sum(each) / len(each):.1f}" for each in rights.values()]
        total = sum(map(sum, rights.values()))
        rows.append([str(rounds), *shares, f"{100 * total / len(asked):.1f}"])
    return table(["rounds", *(f"slot {slot}" for slot in slots), "mean"], rows)


def experts_table(lm: InvariantModel, asked: Sequence[Case], advance: Any) -> list[str]:
    first = [case for case in asked if case.variant == "0"]
    rows = []
    for beta in (0.0, 0.5, 1.0):
        experts = ContextExperts(lm, beta=beta, gamma=0)
        rights = []
        for case in first:
            rights.append(is_right(experts, lm, case))
            advance()
        rows.append([f"{beta:g}", accuracy(rights)])
    return table(["beta", "right"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=20, help="questions over documents")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", type=Path, default=HERE / "ensembles.md", help="the page to write")
    chosen = parser.parse_args()
    lm = InvariantModel.from_pretrained()
    plain = lm.with_method("sequential", ordering="given", overflow="drop_last")
    asked = cases(chosen.limit, chosen.seed)
    lines = [INTRODUCTION.format(seed=chosen.seed)]
    with progress_bar("Measuring", 4 * len(asked) + 3 * chosen.limit) as advance:
        lines += [SORTING.format(limit=chosen.limit, documents=DOCUMENTS), *sorting_table(plain, asked, advance)]
        lines += [EXPERTS, *experts_table(plain, asked, advance)]
    chosen.page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {chosen.page}")


if __name__ == "__main__":
    main()
