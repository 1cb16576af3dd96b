"""Draw the plots of a report, without pyplot, whose state is global."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from invariant_rag.evaluation.audit.measures import RemedyMeasures
    from invariant_rag.evaluation.audit.result import Audit
    from invariant_rag.evaluation.statistics import Estimate

# The Okabe-Ito palette, which is safe for colour-blind readers; black is the system as it is.
_COLOURS = ("#000000", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b3a100")
_MARKERS = "osD^vPX<"
_FASTEST = 1e-9  # seconds: a logarithmic axis has no zero


@dataclass(frozen=True)
class Format:
    """The form of a plot.

    Attributes:
        panel: Width and height of a panel in inches.
        dpi: Pixels in an inch.
        stacked: Whether panels stand below each other, and the legend below them all; else beside each other.
    """

    panel: tuple[float, float]
    dpi: int
    stacked: bool

    def figure(self, panels: int) -> tuple[Figure, Sequence[Axes]]:
        """Return a figure with panels that share their vertical axis."""
        from matplotlib.figure import Figure

        width, height = self.panel
        size = (width, height * panels) if self.stacked else (width, height)
        figure = Figure(figsize=size, layout="constrained")
        shape = (panels, 1) if self.stacked else (1, panels)
        axes = figure.subplots(*shape, squeeze=False, sharey=True).ravel()
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
            each.grid(axis="y", color="#dddddd")
            each.set_axisbelow(True)
        return figure, list(axes)

    def legend(self, figure: Figure, axis: Axes) -> None:
        """Name the curves of a panel beside the figure, or below it."""
        handles = axis.get_legend_handles_labels()
        if self.stacked:
            figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
        else:
            figure.legend(*handles, loc="outside right upper", frameon=False)


WIDE = Format((9.0, 3.8), 144, stacked=False)
NARROW = Format((3.6, 3.4), 200, stacked=True)
"""For a phone: an inch is 100 of its 360 pixels, so that text is as large as that of the page."""


def draw(audit: Audit, form: Format = WIDE) -> dict[str, bytes]:
    """Return PNG images by name; `slots` is missing if no question has gold segments."""
    drawn = {"flips": _flips(audit, form), "cost": _cost(audit, form)}
    if any(each.slots or each.salts for each in audit.measured):
        drawn["slots"] = _slots(audit, form)
    return {name: _png(figure, form.dpi) for name, figure in drawn.items()}


def _png(figure: Figure, dpi: int) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _style(index: int) -> dict[str, Any]:
    return {"color": _COLOURS[index % len(_COLOURS)], "marker": _MARKERS[index % len(_MARKERS)]}


def _slots(audit: Audit, form: Format) -> Figure:
    """Draw accuracy by slot of the gold segments, in the input and in salted canonical orders."""
    figure, axes = form.figure(2)
    for panel, (axis, where) in enumerate(zip(axes, ("in the input", "in salted canonical orders"), strict=True)):
        for index, each in enumerate(audit.measured):
            _curve(axis, each, (each.slots, each.salts)[panel], index, len(audit.measured))
        count = audit.design.slots
        axis.set_xticks(range(count), ["first", *map(str, range(2, count)), "last"])
        axis.set_xlabel(f"slot of the gold document\n{where}")
    axes[0].set_ylabel("accuracy")
    axes[0].set_ylim(-0.03, 1.03)
    form.legend(figure, axes[0])
    return figure


def _curve(axis: Axes, measured: RemedyMeasures, slots: Sequence[Estimate], index: int, count: int) -> None:
    if not slots:
        return
    shift = 0.04 * (index - (count - 1) / 2)  # so that intervals do not overlap
    values = [each.value for each in slots]
    errors = [[each.value - each.low for each in slots], [each.high - each.value for each in slots]]
    places = [slot + shift for slot in range(len(slots))]
    axis.errorbar(places, values, errors, label=measured.name, capsize=2, lw=1.4, ms=5, **_style(index))


def _flips(audit: Audit, form: Format) -> Figure:
    """Draw the sensitivity of every question, most sensitive first."""
    figure, (axis,) = form.figure(1)
    for index, each in enumerate(audit.measured):
        ranked = sorted(each.per_question, reverse=True)
        numbers = range(1, len(ranked) + 1)
        style = _style(index)
        axis.plot(numbers, ranked, label=each.name, lw=1.6, ms=4, markevery=max(1, len(ranked) // 20), **style)
    axis.set_xlabel("questions, those that change most first")
    axis.set_ylabel("probability that two\norders differ in outcome")
    axis.set_ylim(-0.03, 1.03)
    form.legend(figure, axis)
    return figure


def _cost(audit: Audit, form: Format) -> Figure:
    """Draw seconds per answer against today's accuracy or, without gold answers, questions that never flip."""
    figure, (axis,) = form.figure(1)
    has_gold = "today" in audit.measured[0].measures
    for index, each in enumerate(audit.measured):
        seconds = each.measures["seconds"].value
        shown = each.measures.get("today" if has_gold else "flip_rate")
        if shown is None:
            continue
        value, low, high = (shown.value, shown.low, shown.high)
        if not has_gold:
            value, low, high = 1 - shown.value, 1 - shown.high, 1 - shown.low
        errors = [[value - low], [high - value]]
        axis.errorbar(seconds, value, errors, label=each.name, ms=8, capsize=3, ls="", **_style(index))
    axis.set_xscale("log")
    decades = [math.log10(max(each.measures["seconds"].value, _FASTEST)) for each in audit.measured]
    low, high = math.floor(min(decades)), math.ceil(max(decades))
    axis.set_xlim(10.0**low, 10.0 ** max(high, low + 1))
    axis.xaxis.set_minor_formatter("")  # labels between powers of ten overlap
    axis.set_xlabel("seconds per answer\n(one call after the other)")
    axis.set_ylabel("accuracy in the\nretriever's order" if has_gold else "questions that never flip")
    axis.set_ylim(-0.03, 1.03)
    form.legend(figure, axis)
    return figure
