"""Measure every method with the embedded model: `python measure.py [--limit 80] [--out runs] [--page results.md]`.

The benchmarks are those whose formats the embedded model knows: its own made-up world in the format of Lost in the
Middle (10, 20 and 30 documents), key-value retrieval, and pairwise judging in the format of LLMBar. The result is one
page, with intervals and differences from the plain model. An interrupted measurement continues.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "embedded"))

from invariant_rag_benchmarks import resolve_benchmark  # noqa: E402
from invariant_rag_benchmarks.config import BenchmarkConfig  # noqa: E402
from invariant_rag_benchmarks.report import means_by, percent  # noqa: E402
from invariant_rag_benchmarks.runner import BenchmarkRun, run_benchmark  # noqa: E402
from world import lost_in_the_middle  # noqa: E402

from invariant_rag import InvariantModel  # noqa: E402
from invariant_rag.audit.statistics import mean_difference  # noqa: E402
from invariant_rag.cli.progress import progress_bar  # noqa: E402
from invariant_rag.methods import METHODS  # noqa: E402

DOCUMENTS = (10, 20, 30)
KEYS = (5,)
PLAIN = ("sequential", "given")
SETUPS = [PLAIN, ("sequential", "lexical"), *((name, "") for name in METHODS if name != "sequential")]
"""Method and ordering of every row; an empty ordering is the method's default."""

INTRODUCTION = """\
# What the embedded model shows

Every method with the same model of 1.2 million parameters; {limit} questions of each format, seed {seed}. Per
cent, with 95% intervals. Written by `python cookbook/results/measure.py`.

- *worst variant*: a question counts only if it is answered rightly in all of its variants;
- *spread*: the best slot minus the worst;
- *flips*: questions that are not answered alike in all variants. An invariant method has none, unless the text of the
  segments depends on their order, as that of lettered responses does;
- *against plain*: the difference from the plain model on the same prompts, by paired bootstrap. **loses** marks where
  invariance costs accuracy.
"""


@dataclass(frozen=True)
class Format:
    """A benchmark of the page, and its data."""

    title: str
    about: str
    benchmark: str
    settings: dict[str, Any]
    data: Path | None
    max_new_tokens: int


def contexts(count: int, documents: int, seed: int) -> list[dict[str, Any]]:
    """Make questions in the format of Lost in the Middle."""
    return lost_in_the_middle(count, documents, f"results-{seed}-{documents}")


def pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Make pairs of answers over three documents, in the format of LLMBar; the wrong one is from another world."""
    asked, others = contexts(count, 3, seed), contexts(count, 3, seed + 1)
    source = random.Random(seed)
    records = []
    for record, other in zip(asked, others, strict=True):
        documents = "".join(f"Document (Title: {each['title']}): {each['text']}\n" for each in record["ctxs"])
        outputs = [record["answers"][0], other["answers"][0]]
        label = source.choice((1, 2))
        right, wrong = outputs
        first, second = (right, wrong) if label == 1 else (wrong, right)
        asking = f"{documents}Question: {record['question']}"
        records.append({"input": asking, "output_1": first, "output_2": second, "label": label})
    return records


def formats(folder: Path, count: int, seed: int) -> list[Format]:
    """Write the data, and return the tables of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for documents in DOCUMENTS:
        path = folder / f"world-{documents}-{count}-{seed}.jsonl"
        lines = [json.dumps(record) + "\n" for record in contexts(count, documents, seed)]
        path.write_text("".join(lines), encoding="utf-8")
        about = "The embedded model's own world, in the format of Lost in the Middle, gold at every fifth slot."
        settings = {"documents": documents, "template": "plain"}
        found.append(Format(f"{documents} documents", about, "lost-in-the-middle", settings, path, 20))
    for keys in KEYS:
        about = (
            "Random UUIDs, which the model was never trained on: retrieval by copying alone, in the smallest of tables."
        )
        found.append(Format(f"{keys} keys", about, "key-value", {"keys": keys, "make": count}, None, 40))
    judging = folder / f"judging-{count}-{seed}" / "Natural.json"
    judging.parent.mkdir(exist_ok=True)
    judging.write_text(json.dumps(pairs(count, seed)), encoding="utf-8")
    about = (
        "Which of two answers is right, as the likelier of two verdicts. The model was never taught to judge, so about "
        "half is right by chance; what it shows is whether verdicts follow the position."
    )
    found.append(Format("Pairwise judging", about, "llmbar", {}, judging, 20))
    return found


def table(shown: Format, runs: dict[tuple[str, str], BenchmarkRun]) -> list[str]:
    """Return the table of one benchmark, a row per method and ordering."""
    metric = resolve_benchmark(shown.benchmark).metric
    plain = means_by("question", runs[PLAIN].records, metric)
    header = ["method", "ordering", "mean", "worst variant", "spread", "flips", "against plain"]
    lines = [f"### {shown.title}", "", shown.about, ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header))]
    for setup, done in runs.items():
        change = mean_difference(means_by("question", done.records, metric), plain)
        mark = " **loses**" if change.high < 0 else " **gains**" if change.low > 0 else ""
        written = f"{100 * change.value:+.1f} ({100 * change.low:+.1f} to {100 * change.high:+.1f})"
        summary = done.summary
        cells = [
            f"`{done.config['method']}`",
            f"`{done.config['ordering']}`",
            *(percent(summary[name]) for name in ("mean", "worst", "spread", "flips")),
            "" if setup == PLAIN else written + mark,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    shortened = max(done.summary["shortened"] for done in runs.values())
    if shortened:
        lines += ["", f"Up to {shortened} prompts did not fit into the context window and were shortened."]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=80, help="questions of each format")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of the runs and of the data")
    parser.add_argument("--page", type=Path, default=HERE / "README.md", help="the page to write")
    chosen = parser.parse_args()
    lm = InvariantModel.from_pretrained()
    lines = [INTRODUCTION.format(limit=chosen.limit, seed=chosen.seed)]
    tables = formats(chosen.out / "data", chosen.limit, chosen.seed)
    with progress_bar("Measuring", len(tables) * len(SETUPS)) as advance:
        for shown in tables:
            runs = {}
            for method, ordering in SETUPS:
                config = BenchmarkConfig(
                    shown.benchmark,
                    settings=shown.settings,
                    method=method,
                    ordering=ordering or None,
                    overflow="drop_last",
                    data=shown.data,
                    limit=chosen.limit,
                    seed=chosen.seed,
                    batch_size=4,
                    max_new_tokens=shown.max_new_tokens,
                )
                runs[method, ordering] = run_benchmark(config, chosen.out, resume=True, model=lm)
                advance()
            lines += table(shown, runs)
    chosen.page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print(f"wrote {chosen.page}")


if __name__ == "__main__":
    main()
