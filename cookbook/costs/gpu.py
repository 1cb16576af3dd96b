"""Measure RoToR and PINE against the plain model on a GPU, and write gpu.md: `make bench-gpu`.

Every setting is what one `invariant-rag bench speed` measures: ratios of alternating runs, with random weights.
The page is written after every setting, short prompts first: stop when you have seen enough.
"""

from __future__ import annotations

import gc
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
from invariant_rag_benchmarks.config import SpeedConfig
from invariant_rag_benchmarks.speed import environment, measure

PAGE = Path(__file__).parent / "gpu.md"
TOKENS = (2500, 8192, 32_768, 131_072)
SHAPES = ("1b", "8b")
SEGMENTS = (5, 20, 100)
METHODS = ("rotor", "pine")
HEAD = ["tokens", "shape", "segments", "method", "first token", "floor", "further tokens", "peak memory"]


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """Return the rows of what was measured in one setting."""
    setting, floor, rows = found["setting"], f"{found['floor']:.2f}", []
    for row in found["rows"][1:]:
        ratios = {name: "?" if ratio is None else f"{ratio:.2f}" for name, ratio in row["ratios"].items()}
        cells = [f"{setting['tokens']:,}", setting["shape"], str(setting["segments"]), row["name"]]
        rows.append([*cells, ratios["prefill"], floor, ratios["decode"], ratios["peak"]])
    return rows


def main() -> None:
    """Measure everything, or say that there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing was measured, and gpu.md was not written")
    about, backends, rows = environment("cuda"), set[str](), list[list[str]]()
    for tokens, shape, segments in product(TOKENS, SHAPES, SEGMENTS):
        config = SpeedConfig(shape=shape, tokens=tokens, segments=segments, device="cuda", dtype="bfloat16")
        try:
            found = measure(config, METHODS)
        except torch.OutOfMemoryError as error:
            reason = f"not measured: {str(error).partition('.')[0]}"
            more = [[f"{tokens:,}", shape, str(segments), reason, *[""] * (len(HEAD) - 4)]]
        else:
            backends.add(found["environment"]["backend"])
            more = rows_of(found)
        gc.collect()
        torch.cuda.empty_cache()
        rows += more
        versions = f"torch {about['torch']}, transformers {about['transformers']}"
        text = f"{about['device']}, {versions}, bfloat16, random weights, backend {', '.join(sorted(backends)) or '?'}."
        table = [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)]
        PAGE.write_text("\n".join([f"# On a GPU\n\n{text} Ratios to the plain model.\n", *table, ""]), encoding="utf-8")
        print(*table[-len(more) :], sep="\n", flush=True)


if __name__ == "__main__":
    main()
