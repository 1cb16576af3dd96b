"""Measure ensembles with the embedded model: `python ensembles.py [--limit 20] [--llmbar FOLDER]`.

Three questions: how many rounds attention sorting needs, what one expert per document does, and what CapCal does to a
judge that always says the same letter. The result is one page.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from invariant_rag_benchmarks import resolve_benchmark
from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.data import DataSource
from measure import HERE, contexts

from invariant_rag import AttentionSorting, CapCal, ContextExperts, InvariantModel, Judge
from invariant_rag.audit.statistics import wilson_interval
from invariant_rag.cli.progress import progress_bar
from invariant_rag.errors import ContextOverflow

DOCUMENTS = 30
SLOTS = "0,9,19,29"
NEW_TOKENS = 20
BENCHMARK = resolve_benchmark("lost-in-the-middle")

INTRODUCTION = """\
# Ensembles with the embedded model

Written by `python cookbook/results/ensembles.py{arguments}`, seed {seed}. Per cent;
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
JUDGE = """\
## CapCal: the favourite letter

How often each letter wins, and how often the right answer does. *42 questions*: those of notebook 7, each with
the answer to another question as the wrong one. Pairs that do not fit the context window are left out.
The model was never taught to judge, and which letter wins after calibration depends on the placeholder.
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


def judged_pairs(folder: Path | None) -> dict[str, list[tuple[str, str, str]]]:
    """Return question, right answer and wrong answer of every pair, by source."""
    path = HERE.parent / "data" / "questions.jsonl"
    atlas = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {
        f"{len(atlas)} questions": [
            (row["question"], row["answer"], atlas[(number + 7) % len(atlas)]["answer"])
            for number, row in enumerate(atlas)
        ]
    }
    for part in sorted(folder.glob("*.json")) if folder else []:
        pairs = json.loads(part.read_text(encoding="utf-8"))
        found[f"LLMBar {part.stem}"] = [
            (each["input"], each[f"output_{each['label']}"], each[f"output_{3 - each['label']}"]) for each in pairs
        ]
    return found


def judge_table(lm: InvariantModel, folder: Path | None) -> list[str]:
    setups = {"none": None, "1": CapCal(), "`adaptive`": CapCal("adaptive"), "1, empty": CapCal(placeholder="")}
    rows = []
    for source, pairs in judged_pairs(folder).items():
        for name, calibration in setups.items():
            judge, letters, rights, left_out = Judge(lm, calibration=calibration), Counter[str](), [], 0
            for pair in pairs:
                try:
                    verdict = judge.compare(*pair)
                except ContextOverflow:
                    left_out += 1
                    continue
                letters["tie" if verdict.winner is None else verdict.labels[verdict.winner]] += 1
                rights.append(verdict.winner == 0)
            counts = [str(letters[each]) for each in ("A", "B", "tie")]
            rows.append([source, name, *counts, accuracy(rights), str(left_out)])
    return table(["pairs", "strength, placeholder", "A", "B", "tie", "right", "left out"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=20, help="questions over documents")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--llmbar", type=Path, help="a folder with the files of LLMBar, Natural.json and others")
    parser.add_argument("--page", type=Path, default=HERE / "ensembles.md", help="the page to write")
    chosen = parser.parse_args()
    lm = InvariantModel.from_pretrained()
    plain = lm.with_method("sequential", ordering="given", overflow="drop_last")
    asked = cases(chosen.limit, chosen.seed)
    arguments = " --llmbar FOLDER" if chosen.llmbar else ""
    lines = [INTRODUCTION.format(arguments=arguments, seed=chosen.seed)]
    with progress_bar("Measuring", 4 * len(asked) + 3 * chosen.limit) as advance:
        lines += [SORTING.format(limit=chosen.limit, documents=DOCUMENTS), *sorting_table(plain, asked, advance)]
        lines += [EXPERTS, *experts_table(plain, asked, advance)]
    lines += [JUDGE, *judge_table(lm, chosen.llmbar)]
    chosen.page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {chosen.page}")


if __name__ == "__main__":
    main()
