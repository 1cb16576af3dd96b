"""Which segments attend to which, at which relative positions: rows of seven methods, from the library."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.patches import Rectangle
from style import COLOURS, DARK, PALE, figure, save

from invariant_rag.arrangement import Layout
from invariant_rag.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES, LENGTHS = "ABCD", (3, 2, 4, 3)
DRAWN = ("sequential", "isolated", "pine-in-place", "rotor", "set-based", "parallel-windows", "structured")


def panel(axis: Axes, name: str) -> None:
    """Draw the rows of one method: every key at its position relative to the last token of the querying segment."""
    method = METHODS[name]()
    layout = Layout((3, 2), (LENGTHS,))
    arrangement = method.arrange(layout)
    owners = {key: i for i, span in enumerate(layout.set_spans[0]) for key in range(span.start, span.stop)}
    at = arrangement.positions
    queries = [span.stop - 1 for span in layout.set_spans[0]] + [layout.length - 1]
    for line, token in enumerate(queries):
        (row,) = (each for each in arrangement.rows if each.queries.start <= token < each.queries.stop)
        keys_at: dict[float, list[int | None]] = {}
        for run in row.runs:
            for key in range(run.start, run.stop):
                if key <= token or not row.queries.start <= key < row.queries.stop:
                    keys_at.setdefault(at[key] + run.shift - at[token], []).append(owners.get(key))
        for place, keys in keys_at.items():
            for number, owner in enumerate(keys):  # keys with the same position share its height
                height = 0.76 / len(keys)
                colour = PALE if owner is None else COLOURS[owner]
                axis.add_patch(Rectangle((place, -line + number * height), 1, height, fc=colour, ec="white", lw=0.4))
    axis.set_title(name, size=9, family="monospace")
    axis.set_yticks([0.38 - line for line in range(len(queries))], [*NAMES, "question"], size=7, color=DARK)
    axis.set_xlim(-17.5, 10)
    axis.set_ylim(-len(queries) + 0.8, 1)
    axis.set_xticks([])
    axis.axvline(1, color=DARK, lw=0.6)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)


def main() -> None:
    """Draw all methods."""
    drawn = figure(9.2, 5.4)
    axes = drawn.subplots(4, 2).flat
    for axis, name in zip(axes, DRAWN, strict=False):
        panel(axis, name)
    axes[len(DRAWN)].remove()
    save(drawn, "rows")


if __name__ == "__main__":
    main()
