"""Write the tables of README.md from every `*/speed.json` beside it: what `invariant-rag bench speed --out` leaves."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def table(measured: dict[str, Any]) -> str:
    """One setting: ratios to the plain model, with the spread of two of them."""
    setting = measured["setting"]
    title = (
        f"### {setting['tokens']:,} tokens, {setting['segments']} segments\n\n"
        f"Shape {setting['shape']}, {setting['layers'] or 'all'} layers, {setting['dtype']}, "
        f"{setting['repeats']} rounds. "
        f"Floor of bidirectional attention: {measured['floor']:.3f}.\n"
    )
    lines = [
        "| | first token | lowest to highest | fastest | further tokens | lowest to highest | all | peak memory |",
        "|" + " --- |" * 8,
    ]
    plain = measured["rows"][0]
    for row in measured["rows"]:
        ratios = row["ratios"]
        peak = "?" if ratios["peak"] is None else f"{ratios['peak']:.2f}"
        fastest = min(row["prefill"]["seconds"]) / min(plain["prefill"]["seconds"])
        first, further = (spread(row[name]["seconds"], plain[name]["seconds"]) for name in ("prefill", "decode"))
        cells = [row["name"], f"{ratios['prefill']:.2f}", first, f"{fastest:.2f}"]
        cells += [f"{ratios['decode']:.2f}", further, f"{ratios['whole']:.2f}", peak]
        lines.append(f"| {' | '.join(cells)} |")
    gains = ", ".join(f"{name} {gain:.1f}" for name, gain in measured["batched"].items())
    count = setting["batch"]
    batched = f"\n\nDecoding {count} prompts as one batch, times the throughput of {count} single calls: {gains}."
    return f"{title}\n" + "\n".join(lines) + (batched if count > 1 else "") + "\n"


def spread(seconds: list[float], plain: list[float]) -> str:
    """Lowest and highest ratio of a round."""
    ratios = [mine / other for mine, other in zip(seconds, plain, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def main() -> None:
    """Fill the page in."""
    files = sorted(HERE.glob("*/speed.json"))
    measured = [each for file in files for each in json.loads(file.read_text(encoding="utf-8"))]
    measured.sort(key=lambda each: (each["setting"]["tokens"], each["setting"]["segments"]))
    machine = measured[0]["environment"]
    about = (
        f"Measured on: {machine['device']}, {machine['threads']} threads; torch {machine['torch']}, transformers "
        f"{machine['transformers']}, Python {machine['python']}.\n"
    )
    content = "\n".join([about, *map(table, measured)])
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    place = re.compile(r"(<!-- measured -->\n).*(<!-- end -->)", re.DOTALL)
    page.write_text(place.sub(lambda match: f"{match[1]}\n{content}\n{match[2]}", text), encoding="utf-8")


if __name__ == "__main__":
    main()
