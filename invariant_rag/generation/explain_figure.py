"""The figure of an explanation, without pyplot, whose state is global."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from invariant_rag.checks import require_extra
from invariant_rag.errors import InvalidChoice

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from invariant_rag.generation.explain import Explanation

_ATTENTION, _ALONE = "#0072b2", "#e69f00"  # of the Okabe-Ito palette, which is safe for colour-blind readers
_KINDS = (".png", ".svg", ".pdf")
_MOST_NUMBERS = 12  # segments up to which cells hold their numbers


def check_figure_file(path: str | Path) -> str | Path:
    """Return the path of a figure that can be drawn.

    Raises:
        InvalidChoice: Its name ends with none of the kinds of files.
        ExtraRequired: matplotlib is not installed.
    """
    require_extra("matplotlib", "plots")
    if Path(path).suffix.lower() not in _KINDS:
        raise InvalidChoice(
            f"expected a figure in a file of {', '.join(_KINDS)}, got {str(path)!r}", hint="Name it so: explain.png."
        )
    return path


def draw(explanation: Explanation) -> Figure:
    """Return a figure of three panels: distances as a map, and attention and confidence by segment as bars."""
    require_extra("matplotlib", "plots")
    from matplotlib.figure import Figure

    count = len(explanation.order)
    side = max(3.0, min(0.5 * count, 10.0))
    figure = Figure(figsize=(side + 6.5, side + 1.6), layout="constrained")
    grid, attention, confidence = figure.subplots(1, 3, width_ratios=(side + 1.5, 2.0, 2.0))
    _draw_distances(grid, explanation, figure)
    _draw_bars(
        attention,
        [explanation.sights[None][each].attention for each in explanation.order],
        explanation.elsewhere,
        _ATTENTION,
        "attention of the answer",
    )
    _draw_bars(
        confidence,
        [explanation.alone[each] for each in explanation.order],
        explanation.without,
        _ALONE,
        "confidence with it alone",
    )
    confidence.axvline(explanation.confidence, color="#555555", lw=1, ls="--")
    confidence.set_xlabel("dashed: together", size=8)
    said = explanation.answer.text if len(explanation.answer.text) <= 60 else explanation.answer.text[:59] + "…"
    figure.suptitle(_printable(f"{explanation.setting['method']}: {said}"), size=10, parse_math=False)
    return figure


def _draw_distances(axis: Axes, explanation: Explanation, figure: Figure) -> None:
    order, readers = explanation.order, list(explanation.sights)
    rows = [[explanation.sights[reader][each].distance for each in order] for reader in readers]
    values = [[float("nan") if value is None else value for value in row] for row in rows]
    image = axis.imshow(values, cmap="viridis_r", aspect="auto")
    figure.colorbar(image, ax=axis, location="bottom", label="distance in tokens; white: not seen", shrink=0.8)
    axis.set_xticks(range(len(order)), [f"[{each}]" for each in order], size=8)
    names = [_printable(explanation.name(each)) for each in readers]
    axis.set_yticks(range(len(readers)), names, size=8, parse_math=False)
    axis.xaxis.tick_top()
    axis.set_title("this segment is seen", size=9)
    axis.set_ylabel("by this reader")
    known = [value for row in rows for value in row if value is not None]
    middle = (min(known) + max(known)) / 2
    for line, row in enumerate(rows if len(order) <= _MOST_NUMBERS else ()):
        for column, value in enumerate(row):
            if value is not None:
                shown = "self" if readers[line] == order[column] else f"{value:.0f}"
                axis.text(column, line, shown, ha="center", va="center", size=7, color="wk"[value < middle])


def _draw_bars(axis: Axes, values: list[float], last: float, colour: str, title: str) -> None:
    """Draw one bar for each segment, in line with the map's readers, and a pale one for no segment."""
    axis.barh(range(len(values)), values, color=colour)
    axis.barh([len(values)], [last], color=colour, alpha=0.35)
    axis.set_ylim(len(values) + 0.5, -0.5)
    axis.set_yticks([len(values)], ["no\nsegment"], size=8)
    axis.set_xlim(0, max(1e-9, *values, last) * 1.1)
    axis.set_title(title, size=9)
    axis.spines[["top", "right"]].set_visible(False)


def _printable(text: str) -> str:
    """Return text in which nothing is a control character, for which fonts have no glyph."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)
