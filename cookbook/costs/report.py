"""Write the tables of README.md from what `invariant-rag bench speed` and `bench vllm` leave beside it with `--out`."""

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
        f"### {setting['tokens']:,} tokens, {setting['segments']} segments, {setting['layers'] or 'all'} layers, "
        f"{setting['repeats']} rounds\n\n"
        f"Shape {setting['shape']}, {setting['dtype']}. Floor of bidirectional attention: {measured['floor']:.3f}.\n"
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
    return f"{title}\n" + "\n".join(lines) + "\n"


def spread(seconds: list[float], plain: list[float]) -> str:
    """Lowest and highest ratio of a round."""
    ratios = [mine / other for mine, other in zip(seconds, plain, strict=True)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def serving_table(name: str, measured: dict[str, Any]) -> str:
    """Ratios of arranged requests to plain ones of as many clients, in the same state."""
    machine, setting = measured["environment"], measured["setting"]
    title = (
        f"`{name}`, on: {machine['device']}; torch {machine['torch']}, Python {machine['python']}. "
        f"{setting['requests']} requests about sets of {setting['segments']} segments of {setting['words']} words, "
        f"{setting['new_tokens']} new tokens each, {setting['rounds']} rounds; median (lowest to highest).\n"
    )
    names = ("throughput", "first token", "between tokens")
    lines = [f"| clients | questions per set | state | {' | '.join(names)} |", "|" + " --- |" * 6]
    for row in measured["ratios"]:
        cells = [str(row["clients"]), str(row["questions"]), row["state"]]
        cells += ["{:.2f} ({:.2f} to {:.2f})".format(*row[name]) for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return f"{title}\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Fill the page in."""
    measured = [each for file in sorted(HERE.glob("*/speed.json")) for each in _load(file)]
    measured.sort(
        key=lambda each: (each["setting"]["tokens"], -each["setting"]["repeats"], each["setting"]["segments"])
    )
    machine = measured[0]["environment"]
    about = (
        f"Measured on: {machine['device']}, {machine['threads']} threads; torch {machine['torch']}, transformers "
        f"{machine['transformers']}, Python {machine['python']}.\n"
    )
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    text = _fill(text, "measured", "\n".join([about, *map(table, measured)]))
    served = sorted(HERE.glob("vllm*/serve.json"), reverse=True)
    text = _fill(text, "served", "\n".join(serving_table(file.parent.name, _load(file)) for file in served))
    page.write_text(text, encoding="utf-8")


def _load(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def _fill(text: str, name: str, content: str) -> str:
    place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    return place.sub(lambda match: f"{match[1]}\n{content}\n{match[2]}", text)


if __name__ == "__main__":
    main()
