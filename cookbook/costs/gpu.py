"""Measure RoToR and PINE against the plain model on a GPU, and write gpu.md: `make bench-gpu`.

Every setting is one run of `invariant-rag bench speed`; its ratios are of alternating runs. Random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from invariant_rag.attention.varlen import Varlen

PAGE = Path(__file__).parent / "gpu.md"
SHAPES = ("1b", "8b")
HEAD_SIZES = (64, 128)  # of these shapes
TOKENS = (2500, 8192, 32_768, 131_072)
SEGMENTS = (5, 20, 100)
HEAD = ["shape", "tokens", "segments", "method", "first token", "floor", "further tokens", "peak memory"]


def measure(shape: str, tokens: int, segments: int, folder: Path) -> list[list[str]]:
    """Return the rows of one setting."""
    settings = {"shape": shape, "tokens": tokens, "segments": segments, "device": "cuda", "dtype": "bfloat16"}
    words = [f"--{name}={value}" for name, value in settings.items()]
    program = Path(sys.executable).with_name("invariant-rag")
    command = [str(program), "bench", "speed", *words, "--method=rotor", "--method=pine"]
    done = subprocess.run(  # noqa: S603 - our own program
        [*command, f"--out={folder}"], check=False, capture_output=True, text=True
    )
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["?"]
        return [[shape, f"{tokens:,}", str(segments), "not measured: " + reason[0], *[""] * (len(HEAD) - 4)]]
    (found,) = json.loads((folder / "speed.json").read_text(encoding="utf-8"))
    return rows_of(found)


def rows_of(found: dict[str, Any]) -> list[list[str]]:
    """Return the rows of what `bench speed` found for one setting."""
    setting, rows = found["setting"], []
    for row in found["rows"][1:]:
        ratios = row["ratios"]
        peak = "?" if ratios["peak"] is None else f"{ratios['peak']:.2f}"
        cells = [f"{ratios['prefill']:.2f}", f"{found['floor']:.2f}", f"{ratios['decode']:.2f}", peak]
        rows.append([setting["shape"], f"{setting['tokens']:,}", str(setting["segments"]), row["name"], *cells])
    return rows


def main() -> None:
    """Measure everything, or say that there is no GPU."""
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing was measured, and gpu.md was not written")
    rows = []
    for shape, tokens, segments in product(SHAPES, TOKENS, SEGMENTS):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(shape, tokens, segments, Path(folder))
    kernels = {
        Varlen().kernel_for(torch.device("cuda", torch.cuda.current_device()), torch.bfloat16, size).name
        for size in HEAD_SIZES
    }
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, random weights"
    device += f", kernel {', '.join(sorted(kernels))}"
    table = [HEAD, ["---"] * len(HEAD), *rows]
    lines = [f"# On a GPU\n\n{device}. Ratios to the plain model.\n", *(f"| {' | '.join(row)} |" for row in table)]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
