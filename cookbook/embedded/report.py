"""Write the tables of README.md, the pictures and the model cards from the logs and `results.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from safetensors import safe_open

mpl.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
EMBEDDED = HERE.parent.parent / "invariant_rag" / "models" / "embedded"
RUNS = {"generator": "generator", "native": "native", "monot5": "MonoT5"}
COLUMNS = {
    "generator": ("step", "stage", "tokens", "seconds", "answer loss", "text loss", "first token right"),
    "native": ("step", "tokens", "seconds", "answer loss", "text loss", "first token right"),
    "monot5": ("step", "tokens", "seconds", "loss", "right"),
}

MACHINES = {
    "generator": "a busy EPYC with AVX-512, in bfloat16",
    "native": "a busy EPYC with AVX-512, in bfloat16",
    "monot5": "a busy Xeon with AMX, in bfloat16",
}


def curves(name: str) -> list[dict[str, float]]:
    """Return the loss table of a run."""
    lines = (HERE / "losses" / f"{name}.tsv").read_text(encoding="utf-8").splitlines()
    return [dict(zip(COLUMNS[name], map(float, line.split("\t")), strict=True)) for line in lines]


def draw_curves() -> None:
    """Draw the loss and the accuracy of every run over its tokens."""
    figure, axes = plt.subplots(1, len(RUNS), figsize=(13, 3.6), constrained_layout=True)
    for axis, (name, title) in zip(axes, RUNS.items(), strict=True):
        table = curves(name)
        tokens = [row["tokens"] / 1e6 for row in table]
        loss, right = ("loss", "right") if name == "monot5" else ("answer loss", "first token right")
        axis.plot(tokens, [row[loss] for row in table], color="tab:red", linewidth=1, label=loss)
        twin = axis.twinx()
        twin.plot(tokens, [row[right] for row in table], color="tab:blue", linewidth=1, label=right)
        twin.set_ylim(0, 1)
        axis.set(title=title, xlabel="million tokens", ylabel=loss, ylim=(0, None))
        twin.set_ylabel(right)
    figure.savefig(HERE / "losses.svg", metadata={"Date": None})
    plt.close(figure)


def draw_slots(results: dict[str, Any]) -> None:
    """Draw accuracy over the slot of the gold document."""
    counts = list(next(iter(results["reading"].values())))
    figure, axes = plt.subplots(1, len(counts), figsize=(14, 3.8), sharey=True, constrained_layout=True)
    for axis, documents in zip(axes, counts, strict=True):
        for reader, measured in results["reading"].items():
            if documents not in measured:
                continue
            axis.plot([100 * share for share, _ in measured[documents]["slots"]], marker="o", linewidth=1, label=reader)
        axis.set(title=f"{documents} documents", xlabel="fifth that holds the gold document, farthest first")
    axes[0].set_ylabel("exact match, %")
    axes[-1].legend(fontsize=7)
    figure.savefig(HERE / "slots.svg", metadata={"Date": None})
    plt.close(figure)


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{100 * share:.1f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def slots_table(results: dict[str, Any], documents: str) -> str:
    """Return accuracy in all and by fifth of the slots, one checkpoint with its method and ordering a row."""
    rows = []
    for reader, measured in results["reading"].items():
        if documents not in measured:
            continue
        found = measured[documents]
        low, high = found["interval"]
        rows.append(
            [reader, f"{percent(found['exact_match'])} ({percent(low)} to {percent(high)})"]
            + [percent(share) for share, _ in found["slots"]]
            + [percent(found["declined"]), percent(results["unanswerable"][reader]["declined"])]
            + [str(len(results["atlas"][reader]))]
        )
    header = ["method and ordering", "exact match", "1st fifth", "2nd", "3rd", "4th", "5th"]
    return table([*header, "declined though answerable", "declined rightly", "atlas, of 42"], rows)


def fill(text: str, places: dict[str, str]) -> str:
    """Replace the text between `<!-- name -->` and `<!-- end -->`."""
    for name, content in places.items():
        head, _, rest = text.partition(f"<!-- {name} -->\n")
        _, _, tail = rest.partition("<!-- end -->")
        text = f"{head}<!-- {name} -->\n{content}\n<!-- end -->{tail}"
    return text


def facts(name: str) -> str:
    """Return size and training of a checkpoint, as a table."""
    file = EMBEDDED / name / "model.safetensors"
    with safe_open(file, "pt") as weights:
        count = sum(weights.get_tensor(key).numel() for key in weights.keys())  # noqa: SIM118 - no mapping
    last = curves(name)[-1]
    return table(
        ["", ""],
        [
            ["parameters", f"{count:,}"],
            ["file", f"{file.stat().st_size / 1e6:.1f} MB, float32"],
            ["trained on", f"{last['tokens'] / 1e6:.1f} million tokens of made-up text, {last['step']:,.0f} steps"],
            ["time and machine", f"{last['seconds'] / 60:.0f} minutes on one core of {MACHINES[name]}, no GPU"],
            ["licence", "that of the package"],
        ],
    )


def shares(results: dict[str, Any], readers: list[str]) -> str:
    """Return the measured shares of some rows of results.json, for a model card."""
    counts = list(next(iter(results["reading"].values())))
    rows = []
    for reader in readers:
        measured = results["reading"][reader]
        cells = [short(measured[documents]) if documents in measured else "" for documents in counts]
        rows.append([reader, *cells, percent(results["unanswerable"][reader]["declined"])])
    header = ["exact match, %, fresh questions", *(f"{documents} documents" for documents in counts)]
    return table([*header, "unanswerable declined, %"], rows)


def fairness_table(results: dict[str, Any]) -> str:
    """Return accuracy in all and by slot, and how much it varies, one method a row."""
    rows = []
    for reader, found in results["readers"].items():
        low, high = found["interval"]
        rows.append(
            [reader, f"{percent(found['exact_match'])} ({percent(low)} to {percent(high)})"]
            + [percent(share) for share in found["places"]]
            + [percent(found["spread"]), percent(found["deviation"])]
        )
    header = ["method", "exact match", "1st fifth", "2nd", "3rd", "4th", "5th", "spread", "standard deviation"]
    return table(header, rows)


def short(found: dict[str, Any]) -> str:
    """Return exact match in percent with half the width of its 95% interval."""
    low, high = found["interval"]
    return f"{percent(found['exact_match'])} ± {percent((high - low) / 2)}"


def main() -> None:
    """Write everything."""
    results = json.loads((HERE / "results.json").read_text(encoding="utf-8"))
    draw_curves()
    draw_slots(results)
    scores = results["monot5"]
    low, high = scores["interval"]
    first = (
        f"The gold document came first among 20 in {percent(scores['first'])}% of {scores['questions']} fresh "
        f"questions (95% interval {percent(low)} to {percent(high)})."
    )
    readme = HERE / "README.md"
    places = {
        f"slots {documents}": slots_table(results, documents) for documents in next(iter(results["reading"].values()))
    }
    fairness = json.loads((HERE / "fairness.json").read_text(encoding="utf-8"))
    places |= {"fairness": fairness_table(fairness), "monot5": first, **{f"facts {name}": facts(name) for name in RUNS}}
    readme.write_text(fill(readme.read_text(encoding="utf-8"), places), encoding="utf-8")
    generator = [reader for reader, measured in results["reading"].items() if not reader.startswith("native")]
    native = [reader for reader in results["reading"] if reader.startswith("native")]
    measured = {"generator": shares(results, generator), "native": shares(results, native), "monot5": first}
    for name, content in measured.items():
        card = EMBEDDED / name / "README.md"
        card.write_text(
            fill(card.read_text(encoding="utf-8"), {"facts": facts(name), "results": content}), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
