"""Measure the effect of order, and write page and picture: `python measure.py [--questions 200] [--out runs]`.

Prompts have 30 documents, more than most training contexts of the embedded model: there its weakness is real. Each
question is asked with the gold document in seven slots; nothing else changes. An interrupted measurement
continues.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "embedded"))

from invariant_rag_benchmarks.config import BenchmarkConfig  # noqa: E402
from invariant_rag_benchmarks.report import means_by  # noqa: E402
from invariant_rag_benchmarks.runner import BenchmarkRun, run_benchmark  # noqa: E402
from page import write_page  # noqa: E402
from world import lost_in_the_middle  # noqa: E402

import invariant_rag  # noqa: E402
from invariant_rag import InvariantModel  # noqa: E402
from invariant_rag.audit.statistics import mean_difference  # noqa: E402
from invariant_rag.cli.progress import progress_bar  # noqa: E402

DOCUMENTS = 30
READERS = {
    "plain model": ("sequential", "given"),
    "RoToR": ("rotor", "lexical"),
    "plain model, documents sorted": ("sequential", "lexical"),
}
"""Name of a row: method and ordering."""


def figures(run: BenchmarkRun, plain: BenchmarkRun) -> dict[str, Any]:
    """Return the figures of one method as plain data, and its paired difference from the plain model."""
    metric = run.summary["metric"]
    change = mean_difference(means_by("question", run.records, metric), means_by("question", plain.records, metric))
    return {
        **{name: run.summary[name] for name in ("mean", "worst", "best", "flips")},
        "slots": {name: each[metric] for name, each in run.summary["variants"].items()},
        "against_plain": change.as_dict(),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs and of the data")
    parser.add_argument("--page", type=Path, default=HERE, help="folder of page, picture and figures")
    chosen = parser.parse_args()
    data = chosen.out / "data" / f"effect-{chosen.questions}-{chosen.seed}.jsonl"
    data.parent.mkdir(parents=True, exist_ok=True)
    questions = lost_in_the_middle(chosen.questions, DOCUMENTS, f"effect-{chosen.seed}")
    lines = [json.dumps(record) + "\n" for record in questions]
    data.write_text("".join(lines), encoding="utf-8")
    lm = InvariantModel.from_pretrained()
    runs = {}
    for name, (method, ordering) in READERS.items():
        config = BenchmarkConfig(
            "lost-in-the-middle",
            settings={"documents": DOCUMENTS, "template": "plain"},
            method=method,
            ordering=ordering,
            data=data,
            batch_size=4,
            max_new_tokens=20,
        )
        runs[name] = run_benchmark(config, chosen.out, resume=True, model=lm, progress=progress_bar)
    measured = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "version": invariant_rag.__version__,
        "documents": DOCUMENTS,
        "questions": chosen.questions,
        "seed": chosen.seed,
        "readers": {name: figures(run, runs["plain model"]) for name, run in runs.items()},
    }
    write_page(chosen.page, measured)
    print(f"wrote {chosen.page}")


if __name__ == "__main__":
    main()
