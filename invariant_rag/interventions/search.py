"""Search for the positional dimension to scale (arXiv 2406.02536, section 3.2 and algorithm 1).

Two procedures. `published` is that of the code, PositionalHidden/PositionalHidden at f3bcd55, and of the paper where
the code has nothing (the choice of the factor). `averaged` is this library's own, which also finds dimensions in models
with few layers, such as the embedded one.

|                   | published                                   | averaged                                     |
| ----------------- | ------------------------------------------- | -------------------------------------------- |
| hidden values of  | 200 random texts of 1000 tokens             | the validation prompts, tokens shuffled      |
| layers that count | from the third, without the last            | all but the last                             |
| skipped positions | 300 for monotonicity, 200 for smoothness    | 100 (a quarter of a shorter prompt)          |
| smoothness        | Savitzky-Golay, then the smallest of layers | unfiltered, mean over layers                 |
| validation        | chat prompts with 50 UUIDs                  | plain prompts with up to 50 short keys       |
| loss              | mean over the answer's tokens               | sum over the answer's tokens                 |
| candidates        | each dimension with 0, then its factors     | every dimension with every factor            |
| scaled layers     | 10 to 25                                    | the same fraction of the layers              |

`cookbook/results/dimension_search.md` shows both on the embedded model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from invariant_rag.arrangement import Layout, arrange_rows
from invariant_rag.attention.dynamic_rope import private_dynamic_rope
from invariant_rag.attention.hook import PromptState
from invariant_rag.attention.positions import PositionEncoding
from invariant_rag.attention.probe import input_device, probe
from invariant_rag.checks import check_items, check_name, check_number, check_path, check_real, require_extra
from invariant_rag.errors import InvalidChoice, TokenizerRequired, UnsupportedModel
from invariant_rag.files import write_file
from invariant_rag.interventions.base import PromptBatch
from invariant_rag.interventions.hidden_scaling import HiddenScaling
from invariant_rag.interventions.positional_dimensions import (
    FEWEST_LAYERS,
    POSITIONS,
    averaged_dimensions,
    published_dimensions,
)
from invariant_rag.interventions.search_prompts import Example, key_value_examples, random_texts, uuid_examples
from invariant_rag.models.loading import check_model
from invariant_rag.segments import as_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTORS = (0.5, 0.0, -0.5, -1.0)
"""The published scaling factors."""
PUBLISHED_LAYERS = range(10, 26)
"""Layers that the published search scales, in every model."""
_SKIPPED_POSITIONS = 100  # or a quarter of a shorter prompt
_QUARTER = 4
_SHORTEST = 16  # tokens; shorter curves have no smoothness
_CURVE_POINTS = 400  # maximum number of positions in a stored curve

EXAMPLES = {"published": uuid_examples, "averaged": key_value_examples}
"""What makes the validation prompts, by procedure."""

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Called with a label and a number of steps; the context yields a function to call after each step."""


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
        """Write the result as JSON, for `HiddenScaling.load`."""
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


def search_dimension(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    examples: Sequence[Example] | None = None,
    *,
    procedure: str = "published",
    texts: Sequence[Sequence[int]] | None = None,
    layers: Iterable[int] | None = None,
    keep: int = 10,
    factors: Sequence[float] = FACTORS,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the dimension and factor for which hidden scaling gives the smallest validation loss.

    Args:
        model: A causal LM.
        tokenizer: Its tokenizer. None if examples and texts are given.
        examples: Validation prompts with their answers. None: 100 of the procedure's prompts.
        procedure: `published`, or `averaged`; the module says how they differ.
        texts: Token ids over which hidden values are averaged. None: those of the procedure.
        layers: Layers to scale. None: those of the procedure; in a model with fewer than 26 layers, the same
            fraction of them as 10 to 25 of 32.
        keep: Number of candidate dimensions to validate.
        factors: Factors to validate.
        progress: Reports progress.

    Raises:
        TokenizerRequired: Neither a tokenizer nor examples and texts were given, or the tokenizer has no chat template.
        UnknownName: There is no such procedure.
        UnsupportedModel: The model failed the probe, or none of its dimensions is positional.
        InvalidChoice: There are no examples, or texts are too short.
        ExtraRequired: SciPy is not installed.
    """
    require_extra("scipy", "evaluation")
    check_model(model)
    check_name("search procedure", procedure, EXAMPLES)
    check_number("keep", keep, 1)
    factors = [check_real("factors", each) for each in check_items("factors", factors, Real)]
    if examples is not None:
        examples = check_items("examples", examples, Example)
    if texts is not None:
        texts = [as_token_ids(each, InvalidChoice) for each in check_items("texts", texts, Sequence)]
    rotations = probe(model)
    config = model.config.get_text_config(decoder=True)
    if procedure == "published" and config.num_hidden_layers < FEWEST_LAYERS:
        raise UnsupportedModel(
            f"{config.model_type}: expected at least {FEWEST_LAYERS} layers for the published procedure, which ignores "
            f"the first two and the last one, got {config.num_hidden_layers}",
            hint="Use the procedure 'averaged', which counts all layers but the last.",
        )
    window = getattr(config, "max_position_embeddings", None)
    if examples is None:
        examples = EXAMPLES[procedure](_required(tokenizer), window=window)
    if texts is None:
        length = POSITIONS if window is None else min(POSITIONS, window)
        is_published = procedure == "published"
        texts = random_texts(_required(tokenizer), length) if is_published else _shuffled_prompts(examples)
    shortest = min((len(each) for each in (*texts, *(example.prompt for example in examples))), default=0)
    if not examples or not texts or shortest < _SHORTEST:
        raise InvalidChoice(f"examples and texts: expected at least {_SHORTEST} tokens in each, got {shortest}")
    scaled_layers = _layers(procedure, config.num_hidden_layers) if layers is None else tuple(layers)
    report: Progress = progress or (lambda _label, _steps: nullcontext(lambda: None))
    with torch.no_grad(), private_dynamic_rope(model):
        with report("Measuring", len(texts)) as advance:
            values = _mean_values(model, texts, advance)
        dimensions = _candidates(procedure, values, config.model_type)[:keep]
        at_zero = [HiddenScaling(dimension, 0.0, scaled_layers) for dimension in dimensions]
        every = [HiddenScaling(dimension, factor, scaled_layers) for dimension in dimensions for factor in factors]
        count = len(every) if procedure == "averaged" else len(at_zero) + len({*factors} - {0.0})
        with report("Validating", (1 + count) * len(examples)) as advance:

            def loss(scaling: HiddenScaling | None) -> float:
                return _loss(model, rotations, examples, scaling, procedure == "published", advance)

            plain_loss = loss(None)
            losses = {scaling: loss(scaling) for scaling in (every if procedure == "averaged" else at_zero)}
            tried = every
            if procedure == "published":
                best = min(losses, key=losses.__getitem__)
                tried = [replace(best, factor=float(factor)) for factor in factors]
                losses |= {scaling: loss(scaling) for scaling in tried if scaling not in losses}
    found = min(tried, key=losses.__getitem__)
    stride = -(-values.shape[1] // _CURVE_POINTS)
    skip = _skipped(values.shape[1])
    return SearchResult(
        model=str(config._name_or_path or model.config._name_or_path or config.model_type),
        procedure=procedure,
        found=found,
        loss=losses[found],
        plain_loss=plain_loss,
        trials=tuple(Trial(scaling.dimensions[0], scaling.factor, each) for scaling, each in losses.items()),
        positions=tuple(range(skip, values.shape[1], stride)),
        curves=tuple(tuple(map(float, curve)) for curve in values[:, skip::stride, found.dimensions[0]]),
    )


def _required(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise TokenizerRequired("expected a tokenizer, or examples and texts, got neither")
    return tokenizer


def _layers(procedure: str, count: int) -> range:
    """Return the layers to scale in a model of `count` layers."""
    if procedure == "published" and count >= PUBLISHED_LAYERS.stop:
        return PUBLISHED_LAYERS
    return range(count * PUBLISHED_LAYERS.start // 32, -(-count * PUBLISHED_LAYERS.stop // 32))


def _skipped(positions: int) -> int:
    """Return the positions at the start that curves leave out."""
    return min(_SKIPPED_POSITIONS, positions // _QUARTER)


def _candidates(procedure: str, values: np.ndarray[Any, Any], family: str) -> list[int]:
    """Return the positional dimensions of the mean values `[L, T, D]`, smoothest first.

    Raises:
        UnsupportedModel: There is none.
    """
    if procedure == "published":
        dimensions = published_dimensions(values)
    else:
        dimensions = averaged_dimensions(values, _skipped(values.shape[1]))
    if not dimensions:
        raise UnsupportedModel(
            f"{family}: no hidden dimension is monotone in position in more than a quarter of its {len(values)} layers"
        )
    return dimensions


def _shuffled_prompts(examples: Sequence[Example]) -> list[list[int]]:
    """Return the prompts with their tokens in random order, except the first one, which is usually BOS."""
    generator = np.random.default_rng(0)
    return [[each.prompt[0], *generator.permutation(each.prompt[1:]).tolist()] for each in examples if each.prompt]


def _mean_values(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], advance: Callable[[], None]
) -> np.ndarray[Any, Any]:
    """Return the mean hidden values `[L, T, D]` after each layer, over texts cut to the shortest of them."""
    length = min(map(len, texts))
    total: Any = 0
    for text in texts:
        ids = torch.tensor([text[:length]], device=input_device(model))
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[1:]
        total = total + np.stack([state[0].float().cpu().numpy() for state in states])
        advance()
    mean: np.ndarray[Any, Any] = total / len(texts)
    return mean


def _loss(
    model: PreTrainedModel,
    rotations: Sequence[PositionEncoding],
    examples: Sequence[Example],
    scaling: HiddenScaling | None,
    per_token: bool,
    advance: Callable[[], None],
) -> float:
    """Return the mean negative log-probability of the examples' answers, each summed or averaged over its tokens."""
    losses = []
    for each in examples:
        ids = torch.tensor([[*each.prompt, *each.answer]], device=input_device(model))
        prompt = PromptState(arrange_rows(Layout((len(each.prompt),), ()), []))
        with nullcontext() if scaling is None else scaling.applied(model, PromptBatch([prompt], rotations)):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(each.prompt) - 1 :]
        logprobs = torch.log_softmax(logits.float().to(ids.device), dim=-1).gather(1, ids[0, len(each.prompt) :, None])
        logprobs = logprobs.double()
        losses.append(-float(logprobs.mean() if per_token else logprobs.sum()))
        advance()
    return float(np.mean(losses))
