"""Write the page and the picture of the effect: `python page.py` draws what was measured again.

`python page.py --line` prints the one line with which `make demo` ends.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FIGURES = "effect.json"
PUBLISHED = "rotor-table-1"
COLOURS = {"plain": "#000000", "RoToR": "#0072b2"}

PAGE = """\
# What the order of documents does

{questions} questions, each over the same {documents} documents, asked {orders} times: only the slot of the gold
document changes. The model is the embedded one (1.2 million parameters), which was trained on fewer
documents: here its weakness is real. Written by `make effect`; measured on {date}.

![accuracy by slot](effect.svg)

{table}

Per cent, with 95% intervals. *Answers change*: questions whose answer is not the same for every slot. *Worst slot*: a
question counts only if it is right in every slot. *Against plain*: paired difference of the accuracy.

Conclusions:

- The order changes the plain model's answer to {plain_flips} of the questions. RoToR's answers never change.
- That is the promise, and no more: whether an invariant model is also right more often depends on model and data.
  {change}
- Sorting the documents before a plain model is as invariant, and costs nothing. It still favours some slots: which
  documents get them is then fixed instead of random.

## The same on real models

Published accuracy over {documents} documents of NaturalQuestions (Lost in the Middle, 2,655 questions; RoToR, arXiv
2502.08662, Table 1, as printed; without intervals there): the mean over seven slots of the gold document, the worst of
them, and the best minus the worst. These are not our measurements. Invariant methods, too, are not always ahead there.

{published}

The picture above shows these rows, too. `invariant-rag reproduce {id} --model MODEL` measures them on your machine.
"""


def write_page(folder: Path, measured: Mapping[str, Any]) -> None:
    """Write figures, picture and page into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FIGURES).write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    published = published_slots(measured["documents"])
    draw(measured, published).savefig(folder / "effect.svg", metadata={"Date": None})
    (folder / "README.md").write_text(describe(measured, published), encoding="utf-8")


def published_slots(documents: int) -> dict[str, dict[str, list[float]]]:
    """Return the paper's accuracies by slot, of the plain model and of RoToR, for every model that has them."""
    from invariant_rag_benchmarks.published_tables import resolve_table

    table = resolve_table(PUBLISHED)
    places = [each for each, column in enumerate(table.columns) if column.settings["documents"] == documents]
    names = {"Original": "plain", "RoToR": "RoToR", "RoToR-lexical": "RoToR"}
    found: dict[str, dict[str, list[float]]] = {}
    for row in table.rows:
        values = [value for place in places if (value := row.values[place]) is not None]
        if row.name in names and len(values) == len(places):
            found.setdefault(row.model.rpartition("/")[2], {})[names[row.name]] = values
    return found


def show(estimate: Mapping[str, float], sign: str = "") -> str:
    """Return an estimate in per cent with its interval."""
    value, low, high = (100 * estimate[name] for name in ("value", "low", "high"))
    return f"{value:{sign}.1f} ({low:{sign}.1f} to {high:{sign}.1f})"


def describe(measured: Mapping[str, Any], published: Mapping[str, Mapping[str, list[float]]]) -> str:
    """Return the page."""
    readers = measured["readers"]
    lines = ["|  | answers change | accuracy | worst slot | against plain |", "| --- | --- | --- | --- | --- |"]
    for name, each in readers.items():
        against = "" if name == "plain model" else show(each["against_plain"], "+")
        lines.append(f"| {name} | {show(each['flips'])} | {show(each['mean'])} | {show(each['worst'])} | {against} |")
    rows = ["| model | method | mean | worst slot | best minus worst |", "| --- | --- | --- | --- | --- |"]
    for model, each in published.items():
        for name, values in each.items():
            spread = max(values) - min(values)
            rows.append(f"| {model} | {name} | {sum(values) / len(values):.1f} | {min(values):.1f} | {spread:.1f} |")
    change = readers["RoToR"]["against_plain"]
    undecided = change["low"] <= 0 <= change["high"]
    said = "is no more than noise here" if undecided else "is more than noise here"
    return PAGE.format(
        **{name: measured[name] for name in ("questions", "documents", "date")},
        orders=len(readers["plain model"]["slots"]),
        table="\n".join(lines),
        published="\n".join(rows),
        plain_flips=f"{100 * readers['plain model']['flips']['value']:.1f}%",
        change=f"The difference in accuracy, {show(change, '+')} points, {said}.",
        id=PUBLISHED,
    )


def draw(measured: Mapping[str, Any], published: Mapping[str, Mapping[str, list[float]]]) -> Any:
    """Return the picture: accuracy by slot, measured here with intervals, and as published."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "effect"
    figure = Figure(figsize=(3.0 * (1 + len(published)), 3.4), layout="constrained")
    axes = figure.subplots(1, 1 + len(published))
    readers = {"plain": measured["readers"]["plain model"], "RoToR": measured["readers"]["RoToR"]}
    for shift, (name, each) in zip((-0.3, 0.3), readers.items(), strict=True):
        places = [int(slot) + 1 + shift for slot in each["slots"]]
        values = [100 * slot["value"] for slot in each["slots"].values()]
        errors = [
            [100 * (slot["value"] - slot["low"]) for slot in each["slots"].values()],
            [100 * (slot["high"] - slot["value"]) for slot in each["slots"].values()],
        ]
        axes[0].errorbar(places, values, errors, label=name, color=COLOURS[name], marker="o", ms=4, lw=1.4, capsize=2)
    axes[0].set_title(f"embedded model, measured here\n({measured['questions']} questions, {measured['date']})", size=9)
    axes[0].set_ylabel("accuracy, per cent")
    axes[0].legend(frameon=False, loc="lower left")
    numbers = [int(slot) + 1 for slot in readers["plain"]["slots"]]
    for axis, (model, rows) in zip(axes[1:], published.items(), strict=True):
        for name, values in rows.items():
            axis.plot(numbers, values, color=COLOURS[name], marker="o", ms=4, lw=1.4)
        axis.set_title(f"{model},\npublished (arXiv 2502.08662)", size=9)
    for axis in axes:
        axis.set_xlabel(f"slot of the gold document among {measured['documents']}", size=8)
        axis.set_xticks(numbers)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd")
        low, high = axis.get_ylim()
        axis.set_ylim((low + high) / 2 - 14, (low + high) / 2 + 14)  # the same scale for all
    return figure


def line(measured: Mapping[str, Any]) -> str:
    """Return what was measured over many questions, and when, in three lines."""
    plain, ours = (measured["readers"][name] for name in ("plain model", "RoToR"))
    orders = len(plain["slots"])
    return (
        f"One question is luck. Over {measured['questions']} questions, {measured['documents']} documents and {orders} "
        f"orders (measured on {measured['date']}, not just now; `make effect` does it again):\n"
        f"  answers that change with the order: plain model {show(plain['flips'])}%, RoToR {show(ours['flips'])}%\n"
        f"  right in every order: plain model {show(plain['worst'])}%, RoToR {show(ours['worst'])}%"
    )


def main() -> None:
    """Print the line, or write page and picture again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--line", action="store_true", help="print the line of `make demo` and write nothing")
    chosen = parser.parse_args()
    measured = json.loads((HERE / FIGURES).read_text(encoding="utf-8"))
    if chosen.line:
        print(line(measured))
    else:
        write_page(HERE, measured)


if __name__ == "__main__":
    main()
