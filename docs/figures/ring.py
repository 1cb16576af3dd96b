"""What RoToR does: the segments in a ring, and the row of each segment, itself last. Drawn from the arrangement."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from matplotlib.patches import Circle, FancyArrowPatch, Rectangle
from style import COLOURS, DARK, GREY, PALE, figure, save

from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.methods import RoToR

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = "ABCDE"
PREFIX, LENGTH, SUFFIX = 3, 4, 3


def circle(axis: Axes) -> None:
    """Draw the ring."""
    count = len(NAMES)
    places = [math.pi / 2 - 2 * math.pi * index / count for index in range(count)]
    for index, angle in enumerate(places):
        x, y = math.cos(angle), math.sin(angle)
        axis.add_patch(Circle((x, y), 0.26, fc=COLOURS[index], ec="none"))
        axis.text(x, y, NAMES[index], ha="center", va="center", color="white", weight="bold", size=12)
        start, stop = angle - 0.33, places[(index + 1) % count] + 0.33
        ends = [(math.cos(each), math.sin(each)) for each in (start, stop)]
        axis.add_patch(
            FancyArrowPatch(*ends, arrowstyle="->", mutation_scale=13, color=GREY, connectionstyle="arc3,rad=-0.12")
        )
    axis.set_title("sorted by content,\nclosed to a ring", size=10)
    axis.set_xlim(-1.45, 1.45)
    axis.set_ylim(-1.45, 1.45)
    axis.set_aspect("equal")
    axis.axis("off")


def rows(axis: Axes, arrangement: Arrangement) -> None:
    """Draw the row of each segment, and of the question: every key at its position relative to the last query."""
    spans = arrangement.layout.set_spans[0]
    queries = [
        *((NAMES[i], span.stop - 1) for i, span in enumerate(spans)),
        ("the question", arrangement.layout.length - 1),
    ]
    for line, (name, token) in enumerate(queries):
        (row,) = (each for each in arrangement.rows if each.queries.start <= token < each.queries.stop)
        for run in row.runs:
            for key in range(run.start, run.stop):
                if token < key < row.queries.stop:
                    continue  # causal: a later token of the same text
                owner = next((i for i, span in enumerate(spans) if span.start <= key < span.stop), None)
                colour = PALE if owner is None else COLOURS[owner]
                axis.add_patch(Rectangle((key + run.shift - token, -line), 1, 0.72, fc=colour, ec="white", lw=0.6))
                if owner is not None and key == spans[owner].start + 1:
                    axis.text(
                        key + run.shift - token + 1,
                        -line + 0.34,
                        NAMES[owner],
                        ha="center",
                        va="center",
                        color="white",
                        size=8,
                    )
        axis.text(1.4, -line + 0.34, f"row of {name}", va="center", color=DARK)
    axis.set_xlim(-arrangement.layout.length + 0.5, 9)
    axis.set_ylim(-len(queries) + 0.8, 1.1)
    axis.set_title("the row of each segment, far to near: itself is always last", size=10)
    axis.axis("off")


def main() -> None:
    """Arrange five segments, and draw."""
    arrangement = RoToR().arrange(Layout((PREFIX, SUFFIX), ((LENGTH,) * len(NAMES),)))
    drawn = figure(8.6, 3.2)
    left, right = drawn.subplots(1, 2, width_ratios=(1, 2.2))
    circle(left)
    rows(right, arrangement)
    save(drawn, "ring")


if __name__ == "__main__":
    main()
