"""Search for the positional dimension to scale (arXiv 2406.02536, section 3.2 and algorithm 1)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from invariant_rag.arrangement import Layout, arrange_rows
from invariant_rag.attention.hook import PromptState
from invariant_rag.attention.probe import input_device, probe
from invariant_rag.attention.rope import Rotation, reset_dynamic_rope
from invariant_rag.errors import InvalidChoice, TokenizerRequired, UnsupportedModel
from invariant_rag.interventions.base import PromptBatch
from invariant_rag.interventions.hidden_scaling import HiddenScaling
from invariant_rag.interventions.key_value_retrieval import Example, key_value_examples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTORS = (0.5, 0.0, -0.5, -1.0)
"""The published scaling factors."""
_SKIPPED_POSITIONS = 100  # or a quarter of a shorter prompt
_QUARTER = 4
_CURVE_POINTS = 400  # maximum number of positions in a stored curve

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Called with a label and a number of steps; the context yields a function to call after each step."""


@dataclass(frozen=True)
class Trial:
    """Validation loss of one candidate scaling: mean negative log-probability of the answers."""

    dimension: int
    factor: float
    loss: float


@dataclass(frozen=True)
class SearchResult:
    """The result of `search_dimension`.

    Attributes:
        model: Name of the model.
        found: The scaling with the smallest validation loss.
        loss: Its validation loss.
        plain_loss: Validation loss of the plain model. If it is smaller, the scaling does not help.
        trials: All candidates, smoothest dimension first.
        positions: Positions of the curves' points.
        curves: For each hidden state between two layers, the mean value of the found dimension at these positions.
    """

    model: str
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
            **self.found.as_dict(),
            "loss": self.loss,
            "plain_loss": self.plain_loss,
            "trials": [[each.dimension, each.factor, each.loss] for each in self.trials],
            "positions": self.positions,
            "curves": self.curves,
        }
        Path(path).write_text(json.dumps(document) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> SearchResult:
        """Load a result written by `save`.

        Raises:
            OSError: The file cannot be read.
            InvalidChoice: The file does not contain a search result.
        """
        found = HiddenScaling.load(path)
        document = json.loads(Path(path).read_text())
        try:
            return cls(
                model=document["model"],
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


def search_dimension(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    examples: Sequence[Example] | None = None,
    *,
    layers: Iterable[int] | None = None,
    keep: int = 10,
    factors: Sequence[float] = FACTORS,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the dimension and factor for which hidden scaling gives the smallest validation loss.

    Candidates are the smoothest of the dimensions that are monotone in position in more than a quarter of the layers.
    Hidden values are averaged over the examples with their tokens in random order, so that they reflect position only.

    Args:
        model: A causal LM.
        tokenizer: Its tokenizer. None if examples are given.
        examples: Validation prompts with their answers. None: 100 prompts of `key_value_examples`.
        layers: Layers to scale. None: the same fraction of the layers as the paper's 10 to 25 of 32.
        keep: Number of candidate dimensions to validate.
        factors: Factors to validate for each dimension.
        progress: Reports progress.

    Raises:
        TokenizerRequired: Neither a tokenizer nor examples were given.
        UnsupportedModel: The model failed the probe, or none of its dimensions is positional.
        InvalidChoice: There are no examples, or their prompts are too short.
    """
    rotations = probe(model)
    config = model.config.get_text_config(decoder=True)
    if examples is None:
        if tokenizer is None:
            raise TokenizerRequired("expected a tokenizer or examples, got neither")
        examples = key_value_examples(tokenizer, window=getattr(config, "max_position_embeddings", None))
    shortest = min((len(each.prompt) for each in examples), default=0)
    if shortest < 2 * _QUARTER:
        raise InvalidChoice(f"examples: expected prompts of at least {2 * _QUARTER} tokens, got {shortest}")
    count = config.num_hidden_layers
    scaled_layers = range(count * 10 // 32, -(-count * 26 // 32)) if layers is None else tuple(layers)
    report: Progress = progress or (lambda _label, _steps: nullcontext(lambda: None))
    with torch.no_grad(), reset_dynamic_rope(model):
        with report("Measuring", len(examples)) as advance:
            values = _mean_values(model, examples, advance)
        skip = min(_SKIPPED_POSITIONS, values.shape[1] // _QUARTER)
        dimensions = positional_dimensions(values, skip, count)[:keep]
        if not dimensions:
            raise UnsupportedModel(
                f"{config.model_type}: no hidden dimension is monotone in position in more than a quarter of its layers"
            )
        scalings = [HiddenScaling(dimension, factor, scaled_layers) for dimension in dimensions for factor in factors]
        with report("Validating", (1 + len(scalings)) * len(examples)) as advance:
            plain_loss = _loss(model, rotations, examples, None, advance)
            losses = [_loss(model, rotations, examples, each, advance) for each in scalings]
    best = int(np.argmin(losses))
    stride = -(-values.shape[1] // _CURVE_POINTS)
    positions = range(skip, values.shape[1], stride)
    curves = values[:, skip::stride, scalings[best].dimensions[0]]
    return SearchResult(
        model=str(config._name_or_path or model.config._name_or_path or config.model_type),
        found=scalings[best],
        loss=losses[best],
        plain_loss=plain_loss,
        trials=tuple(Trial(s.dimensions[0], s.factor, loss) for s, loss in zip(scalings, losses, strict=True)),
        positions=tuple(positions),
        curves=tuple(tuple(map(float, curve)) for curve in curves),
    )


def positional_dimensions(values: np.ndarray[Any, Any], skip: int, layers: int) -> list[int]:
    """Return the dimensions that are monotone in position in more than a quarter of the layers, smoothest first.

    A dimension is monotone in a layer if the least-squares cubic through its values is. The paper counts layers of both
    directions; since its definition 2.1 requires one direction, only layers of the more frequent one count. Smoothness
    is the sum of squared second differences of the curve scaled to a range of one, averaged over these layers. Without
    the scaling, the dimension with the smallest range would win; with a sum over layers instead of a mean, the one that
    is monotone in the fewest layers.

    Args:
        values: Mean hidden values `[layers measured, positions, dimensions]`.
        skip: Number of positions at the start to ignore; they are often outliers.
        layers: Number of layers of the model.
    """
    curves = values[:, skip:]
    powers = np.vander(np.linspace(-1, 1, curves.shape[1]), 4)
    shape = (curves.shape[0], curves.shape[2])
    rising, falling, roughness = np.zeros(shape, bool), np.zeros(shape, bool), np.zeros(shape)
    for layer, curve in enumerate(curves):
        span = np.ptp(curve, axis=0)
        slopes = np.diff(powers @ np.linalg.lstsq(powers, curve, rcond=None)[0], axis=0)
        rising[layer] = (slopes >= 0).all(axis=0) & (span > 0)
        falling[layer] = (slopes <= 0).all(axis=0) & (span > 0)
        roughness[layer] = (np.diff(curve / np.where(span > 0, span, 1), n=2, axis=0) ** 2).sum(axis=0)
    monotone = np.where(rising.sum(axis=0) >= falling.sum(axis=0), rising, falling)
    counts = monotone.sum(axis=0)
    mean = np.where(monotone, roughness, 0).sum(axis=0) / np.maximum(counts, 1)
    return sorted(np.flatnonzero(4 * counts > layers).tolist(), key=lambda dimension: float(mean[dimension]))


def _mean_values(
    model: PreTrainedModel, examples: Sequence[Example], advance: Callable[[], None]
) -> np.ndarray[Any, Any]:
    """Return the mean hidden values `[L - 1, T, D]` between layers, over the examples with shuffled tokens.

    The first token (usually BOS) is not shuffled. The input embeddings and the last states, which are normalised, are
    excluded, except that a model with one layer uses its last states.
    """
    length = min(len(each.prompt) for each in examples)
    generator = np.random.default_rng(0)
    total: Any = 0
    for each in examples:
        tokens = [each.prompt[0], *generator.permutation(each.prompt[1:])[: length - 1].tolist()]
        ids = torch.tensor([tokens], device=input_device(model))
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        between = states[1:-1] or states[-1:]
        total = total + np.stack([state[0].float().cpu().numpy() for state in between])
        advance()
    mean: np.ndarray[Any, Any] = total / len(examples)
    return mean


def _loss(
    model: PreTrainedModel,
    rotations: Sequence[Rotation],
    examples: Sequence[Example],
    scaling: HiddenScaling | None,
    advance: Callable[[], None],
) -> float:
    """Return the mean negative log-probability of the examples' answers, in one forward pass per example."""
    losses = []
    for each in examples:
        ids = torch.tensor([[*each.prompt, *each.answer]], device=input_device(model))
        prompt = PromptState(arrange_rows(Layout((len(each.prompt),), ()), []))
        with nullcontext() if scaling is None else scaling.applied(model, PromptBatch([prompt], rotations)):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(each.prompt) - 1 :]
        logprobs = torch.log_softmax(logits.float().to(ids.device), dim=-1).gather(1, ids[0, len(each.prompt) :, None])
        losses.append(-float(logprobs.double().sum()))
        advance()
    return float(np.mean(losses))
