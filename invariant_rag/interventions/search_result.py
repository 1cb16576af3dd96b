"""The result of a dimension search: its file and its plot."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from invariant_rag.checks import check_path, require_extra
from invariant_rag.errors import InvalidChoice
from invariant_rag.files import write_file
from invariant_rag.interventions.hidden_scaling import HiddenScaling


@dataclass(frozen=True)
class Trial:
    """Validation loss of one candidate scaling: mean negative log-probability of the answers, or of their tokens."""

    dimension: int
    factor: float
    loss: float


@dataclass(frozen=True)
class SearchResult:
    """The result of `search_dimension`.

    Attributes:
        model: Name of the model.
        procedure: The search procedure.
        found: The scaling with the smallest validation loss.
        loss: Its validation loss.
        plain_loss: Validation loss of the plain model. If it is smaller, the scaling does not help.
        trials: All candidates, smoothest dimension first.
        positions: Positions of the curves' points.
        curves: For each hidden state between two layers, the mean value of the found dimension at these positions.
    """

    model: str
    procedure: str
    found: HiddenScaling
    loss: float
    plain_loss: float
    trials: tuple[Trial, ...]
    positions: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, for `SearchResult.load` and `HiddenScaling.load`."""
        document = {
            "model": self.model,
            "procedure": self.procedure,
            **self.found.as_dict(),
            "loss": self.loss,
            "plain_loss": self.plain_loss,
            "trials": [[each.dimension, each.factor, each.loss] for each in self.trials],
            "positions": self.positions,
            "curves": self.curves,
        }
        write_file(check_path("path", path), json.dumps(document).encode() + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> SearchResult:
        """Load a result written by `save`.

        Raises:
            UnusableFile: The file cannot be read.
            InvalidChoice: The file does not contain a search result.
        """
        found = HiddenScaling.load(path)
        document = json.loads(Path(path).read_text())
        try:
            return cls(
                model=document["model"],
                procedure=document["procedure"],
                found=found,
                loss=document["loss"],
                plain_loss=document["plain_loss"],
                trials=tuple(Trial(*each) for each in document["trials"]),
                positions=tuple(document["positions"]),
                curves=tuple(map(tuple, document["curves"])),
            )
        except (KeyError, TypeError) as error:
            raise InvalidChoice(f"expected a JSON file written by SearchResult.save, got {path}") from error

    def draw(self, path: str | Path) -> None:
        """Plot the found dimension over position, one line per layer, to an image file."""
        require_extra("matplotlib", "plots")
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        colors = colormaps["viridis"](np.linspace(0, 1, len(self.curves)))
        for layer, (curve, color) in enumerate(zip(self.curves, colors, strict=True)):
            label = f"after layer {layer}" if layer in {0, len(self.curves) - 1} else None
            axes.plot(self.positions, curve, color=color, linewidth=1, label=label)
        mean = np.mean(self.curves, axis=0)
        axes.plot(self.positions, mean, color="black", linewidth=2, label="mean over layers")
        axes.set(
            title=f"Dimension {self.found.dimensions[0]} of {Path(self.model).name}",
            xlabel="position",
            ylabel="mean hidden value",
        )
        axes.legend()
        figure.savefig(path)
