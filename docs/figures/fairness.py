"""Invariance is not fairness: published accuracy by slot of the gold document (RoToR, arXiv 2502.08662, Table 1)."""

from __future__ import annotations

from invariant_rag_benchmarks.published_tables import resolve_table
from style import COLOURS, DARK, figure, save

MODELS = ("Llama-3.1-8B-Instruct", "Qwen1.5-4B-Chat", "Qwen1.5-7B-Chat")
ROWS = {"Original": "plain model", "PINE": "PINE", "RoToR": "RoToR", "RoToR-lexical": "RoToR"}
STYLE = {"plain model": (DARK, "o"), "PINE": (COLOURS[1], "s"), "RoToR": (COLOURS[0], "^")}


def main() -> None:
    """Draw the columns with 30 documents."""
    table = resolve_table("rotor-table-1")
    chosen = [index for index, column in enumerate(table.columns) if column.settings["documents"] == 30]
    places = [int(table.columns[index].variants[0]) + 1 for index in chosen]
    drawn = figure(9.2, 3.2)
    axes = drawn.subplots(1, len(MODELS), sharey=True)
    for axis, model in zip(axes, MODELS, strict=True):
        for row in table.rows:
            if row.model.endswith(f"/{model}") and row.name in ROWS:
                colour, marker = STYLE[ROWS[row.name]]
                values = [row.values[index] for index in chosen]
                axis.plot(places, values, color=colour, marker=marker, ms=4, lw=1.4, label=ROWS[row.name])
        axis.set_title(model, size=9)
        axis.set_xlabel("place of the answer among 30")
        axis.set_xticks(places)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd")
    axes[0].set_ylabel("accuracy, per cent")
    axes[0].legend(frameon=False, loc="upper right")
    save(drawn, "fairness")


if __name__ == "__main__":
    main()
