"""What the figures share: colours that are safe for colour-blind readers, a white ground, and stable SVG files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#8c6bb1", "#b3a100", "#666666")
GREY, PALE, DARK = "#888888", "#e8e8e8", "#222222"


def figure(width: float, height: float) -> Figure:
    """Return an empty figure."""
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "invariant-rag", "font.size": 9, "svg.fonttype": "path"})
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def save(drawn: Figure, name: str) -> None:
    """Write a figure beside its script."""
    metadata: Mapping[str, Any] = {"Date": None, "Creator": None}
    path = HERE / f"{name}.svg"
    drawn.savefig(path, metadata=metadata)
    path.write_text("\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n", "utf-8")
