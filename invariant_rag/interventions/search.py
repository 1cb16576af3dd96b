"""Search for the positional dimension to scale (arXiv 2406.02536, section 3.2 and algorithm 1).

As in `experiments/search_dimension` of PositionalHidden/PositionalHidden at f3bcd55, and in the paper where that code
has nothing (the choice of the factor): hidden values are averaged over 200 random texts of 1000 tokens; those
dimensions are candidates that follow the position in enough layers, smoothest first; each is validated with the factor
0, by the loss of the answers to chat prompts with 50 random UUIDs, and the best of them with the other factors.
"""

from __future__ import annotations

import json
import random
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from invariant_rag.arrangement import Layout, arrange_rows
from invariant_rag.attention.dynamic_rope import private_dynamic_rope
from invariant_rag.attention.hook import PromptState
from invariant_rag.attention.per_model import input_device
from invariant_rag.attention.positions import PositionEncoding
from invariant_rag.attention.probe import probe
from invariant_rag.checks import check_items, check_number, check_path, check_real, require_extra
from invariant_rag.errors import ContextOverflow, InvalidChoice, TokenizerRequired, UnsupportedModel
from invariant_rag.files import write_file
from invariant_rag.interventions.base import PromptBatch
from invariant_rag.interventions.hidden_scaling import HiddenScaling
from invariant_rag.models.loading import check_model
from invariant_rag.segments import as_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FACTORS = (0.5, 0.0, -0.5, -1.0)
"""The published scaling factors."""
PUBLISHED_LAYERS = range(10, 26)
"""Layers that the published search scales, in every model."""
CHARACTERS = string.ascii_letters + string.digits + "!#$%&'()*+,./:;<>?@[\\]^_{|}"
"""The characters of `corpus/random_string.txt` of the published code."""
_POSITIONS, _TEXTS = 1000, 200  # that are measured
_CHARACTERS_PER_TOKEN = 10
_SKIPPED_FOR_MONOTONICITY, _SKIPPED_FOR_SMOOTHNESS = 300, 200  # of the positions
_WINDOW, _DEGREE = 10, 3  # of the Savitzky-Golay filter
_FEWEST_LAYERS = 5  # with fewer, those that count cannot be more than a quarter of all
_SHORTEST = 16  # tokens; shorter curves have no smoothness
_CURVE_POINTS = 400  # maximum number of positions in a stored curve
_SKIPPED_IN_CURVES = 100  # or a quarter of a shorter text

Progress = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""Called with a label and a number of steps; the context yields a function to call after each step."""
Values: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TokenExample:
    """Token ids of a prompt and of its expected answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """Validation loss of one candidate scaling: mean negative log-probability of the tokens of an answer."""

    dimension: int
    factor: float
    loss: float


@dataclass(frozen=True)
class SearchResult:
    """The result of `search_dimension`: the scaling with the smallest validation loss.

    Attributes:
        model: Name of the model.
        found: The scaling.
        loss: Its validation loss.
        plain_loss: Validation loss of the plain model. If it is smaller, the scaling does not help.
        trials: All candidates, smoothest dimension first.
        positions: Positions of the curves' points.
        curves: For each layer's output, the mean value of the found dimension at these positions.
    """

    model: str
    found: HiddenScaling
    loss: float
    plain_loss: float
    trials: tuple[Trial, ...]
    positions: tuple[int, ...]
    curves: tuple[tuple[float, ...], ...]

    def save(self, path: str | Path) -> None:
        """Write the result as JSON, for `HiddenScaling.load`."""
        plain = {name: getattr(self, name) for name in ("model", "loss", "plain_loss", "positions", "curves")}
        trials = [[each.dimension, each.factor, each.loss] for each in self.trials]
        document = {**plain, **self.found.as_dict(), "trials": trials}
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
        axes.plot(self.positions, np.mean(self.curves, axis=0), color="black", linewidth=2, label="mean over layers")
        title = f"Dimension {self.found.dimensions[0]} of {Path(self.model).name}"
        axes.set(title=title, xlabel="position", ylabel="mean hidden value")
        axes.legend()
        figure.savefig(path)


def search_dimension(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    examples: Sequence[TokenExample] | None = None,
    *,
    texts: Sequence[Sequence[int]] | None = None,
    layers: Iterable[int] | None = None,
    keep: int = 10,
    factors: Sequence[float] = FACTORS,
    progress: Progress | None = None,
) -> SearchResult:
    """Find the dimension and factor for which hidden scaling gives the smallest validation loss.

    Args:
        model: A causal LM with at least five layers.
        tokenizer: Its tokenizer. None if examples and texts are given.
        examples: Validation prompts with their answers. None: those of `uuid_examples`.
        texts: Token ids over which hidden values are averaged. None: those of `random_texts`.
        layers: Layers to scale. None: 10 to 25; in a model with fewer than 26 layers, the same fraction of them as 10
            to 25 of 32.
        keep: Number of candidate dimensions to validate.
        factors: Factors to validate.
        progress: Reports progress.

    Raises:
        TokenizerRequired: Neither a tokenizer nor examples and texts were given, or the tokenizer has no chat template.
        UnsupportedModel: The model failed the probe, has too few layers, or none of its dimensions is positional.
        InvalidChoice: There are no examples, or texts are too short.
        ExtraRequired: SciPy is not installed.
    """
    require_extra("scipy", "evaluation")
    check_model(model)
    check_number("keep", keep, 1)
    factors = [check_real("factors", each) for each in check_items("factors", factors, Real)]
    if examples is not None:
        examples = check_items("examples", examples, TokenExample)
    if texts is not None:
        texts = [as_token_ids(each, InvalidChoice) for each in check_items("texts", texts, Sequence)]
    rotations = probe(model)
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    if count < _FEWEST_LAYERS:
        raise UnsupportedModel(
            f"{config.model_type}: expected at least {_FEWEST_LAYERS} layers for the published search, which ignores "
            f"the first two and the last one, got {count}",
            hint="Name the parameters yourself: HiddenScaling(dimensions, factor, layers).",
        )
    window = getattr(config, "max_position_embeddings", None)
    if examples is None or texts is None:
        if tokenizer is None:
            raise TokenizerRequired("expected a tokenizer, or examples and texts, got neither")
        examples = uuid_examples(tokenizer, window=window) if examples is None else examples
        texts = random_texts(tokenizer, min(_POSITIONS, window or _POSITIONS)) if texts is None else texts
    shortest = min((len(each) for each in (*texts, *(example.prompt for example in examples))), default=0)
    if not examples or not texts or shortest < _SHORTEST:
        raise InvalidChoice(f"examples and texts: expected at least {_SHORTEST} tokens in each, got {shortest}")
    if layers is None:
        part = range(count * PUBLISHED_LAYERS.start // 32, -(-count * PUBLISHED_LAYERS.stop // 32))
        layers = PUBLISHED_LAYERS if count >= PUBLISHED_LAYERS.stop else part
    scaled_layers = tuple(layers)
    report: Progress = progress or (lambda _label, _steps: nullcontext(lambda: None))
    with torch.no_grad(), private_dynamic_rope(model):
        with report("Measuring", len(texts)) as advance:
            values = _mean_values(model, texts, advance)
        dimensions = positional_dimensions(values)[:keep]
        if not dimensions:
            raise UnsupportedModel(
                f"{config.model_type}: no hidden dimension is monotone in position in more than a quarter of its "
                f"{count} layers"
            )
        with report("Validating", (1 + len(dimensions) + len({*factors} - {0.0})) * len(examples)) as advance:

            def loss(scaling: HiddenScaling | None) -> float:
                return _loss(model, rotations, examples, scaling, advance)

            plain_loss = loss(None)
            at_zero = (HiddenScaling(dimension, 0.0, scaled_layers) for dimension in dimensions)
            losses = {scaling: loss(scaling) for scaling in at_zero}
            best = min(losses, key=losses.__getitem__)
            tried = [replace(best, factor=float(factor)) for factor in factors]
            losses |= {scaling: loss(scaling) for scaling in tried if scaling not in losses}
    found = min(tried, key=losses.__getitem__)
    skip, stride = min(_SKIPPED_IN_CURVES, values.shape[1] // 4), -(-values.shape[1] // _CURVE_POINTS)
    return SearchResult(
        model=str(config._name_or_path or model.config._name_or_path or config.model_type),
        found=found,
        loss=losses[found],
        plain_loss=plain_loss,
        trials=tuple(Trial(scaling.dimensions[0], scaling.factor, each) for scaling, each in losses.items()),
        positions=tuple(range(skip, values.shape[1], stride)),
        curves=tuple(tuple(map(float, curve)) for curve in values[:, skip::stride, found.dimensions[0]]),
    )


def _mean_values(model: PreTrainedModel, texts: Sequence[Sequence[int]], advance: Callable[[], None]) -> Values:
    """Return the mean hidden values `[L, T, D]` after each layer, over texts cut to the shortest of them."""
    length = min(map(len, texts))
    total: Any = 0
    for text in texts:
        ids = torch.tensor([text[:length]], device=input_device(model))
        states = model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[1:]
        total = total + np.stack([state[0].float().cpu().numpy() for state in states])
        advance()
    mean: Values = total / len(texts)
    return mean


def _loss(
    model: PreTrainedModel,
    rotations: Sequence[PositionEncoding],
    examples: Sequence[TokenExample],
    scaling: HiddenScaling | None,
    advance: Callable[[], None],
) -> float:
    """Return the mean negative log-probability of the tokens of an answer, over the examples."""
    losses = []
    for each in examples:
        ids = torch.tensor([[*each.prompt, *each.answer]], device=input_device(model))
        prompt = PromptState(arrange_rows(Layout((len(each.prompt),), ()), []))
        with nullcontext() if scaling is None else scaling.applied(model, PromptBatch([prompt], rotations)):
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0, len(each.prompt) - 1 :]
        logprobs = torch.log_softmax(logits.float().to(ids.device), dim=-1).gather(1, ids[0, len(each.prompt) :, None])
        losses.append(-float(logprobs.double().mean()))
        advance()
    return float(np.mean(losses))


def positional_dimensions(values: Values) -> list[int]:
    """Return the hidden dimensions that follow the position, smoothest first, as in `seach_dim_by_statistic.py`.

    A dimension is monotone in a layer if the cubic through its values is, without the first 300 of 1000 positions. The
    outputs of the first two layers and of the last one do not count. Dimensions that are monotone in one direction in
    more than a quarter of the layers are kept; where both directions are equally frequent, the falling ones count. They
    are ranked by the smallest roughness over these layers: the sum of squared second differences of the values, without
    the first 200 positions, scaled to a range of one and smoothed by a Savitzky-Golay filter.

    With fewer than 1000 positions, the same fractions of them are skipped. That code keeps the input embeddings for
    models with an odd number of layers; they are never an entry here.

    Args:
        values: Mean hidden values `[layers, positions, dimensions]`, one entry per layer's output.
    """
    layers, positions = values.shape[:2]
    middle = values[2 : layers - 1]
    rising, falling = _monotone_layers(middle[:, positions * _SKIPPED_FOR_MONOTONICITY // _POSITIONS :])
    monotone = np.where(rising.sum(axis=0) > falling.sum(axis=0), rising, falling)
    kept = np.flatnonzero(monotone.sum(axis=0) > layers // 4)
    if not len(kept):
        return []
    from scipy.signal import savgol_filter

    curves = _scale_to_one(middle[:, positions * _SKIPPED_FOR_SMOOTHNESS // _POSITIONS :][:, :, kept])
    smooth = savgol_filter(curves, window_length=_WINDOW, polyorder=_DEGREE, axis=1)
    squares = (np.diff(smooth, n=2, axis=1) ** 2).sum(axis=1)  # equation 3
    roughness = np.where(monotone[:, kept], squares, np.inf).min(axis=0, initial=np.inf)
    return [int(dimension) for dimension in kept[np.argsort(roughness, kind="stable")]]


def _monotone_layers(curves: Values) -> tuple[Values, Values]:
    """Return in which layers the least-squares cubic through each dimension rises, and in which it falls."""
    powers = np.vander(np.linspace(-1, 1, curves.shape[1]), _DEGREE + 1)
    rising, falling = np.zeros((2, curves.shape[0], curves.shape[2]), bool)
    for layer, curve in enumerate(_scale_to_one(curves)):
        slopes = np.diff(powers @ np.linalg.lstsq(powers, curve, rcond=None)[0], axis=0)
        moves = np.ptp(curve, axis=0) > 0
        rising[layer], falling[layer] = (slopes >= 0).all(axis=0) & moves, (slopes <= 0).all(axis=0) & moves
    return rising, falling


def _scale_to_one(curves: Values) -> Values:
    span = np.ptp(curves, axis=1, keepdims=True)
    scaled: Values = (curves - curves.min(axis=1, keepdims=True)) / np.where(span > 0, span, 1)
    return scaled


def uuid_examples(
    tokenizer: PreTrainedTokenizerBase, count: int = 100, *, pairs: int = 50, window: int | None = None, seed: int = 0
) -> list[TokenExample]:
    """Return chat prompts that ask for the value of one UUID in a JSON object, as in `eval_on_valid_set.py`.

    The published sets have 50 pairs in a prompt, and ask for those at 25, 50 and 75 per cent.

    Prompts have fewer than `pairs` pairs where prompt and answer would exceed `window` tokens.

    Raises:
        TokenizerRequired: The tokenizer has no chat template.
        ContextOverflow: Two pairs do not fit.
    """
    if not tokenizer.chat_template:
        raise TokenizerRequired(
            f"expected a tokenizer with a chat template, got {tokenizer.name_or_path!r} without one",
            hint="Set tokenizer.chat_template, or give examples of your own.",
        )
    while True:
        source = random.Random(seed)
        indices = [(pairs - 1) * (1 + index % 3) // 4 for index in range(count)]
        examples = [_uuid_example(tokenizer, source, pairs, index) for index in indices]
        longest = max((len(each.prompt) + len(each.answer) for each in examples), default=0)
        if window is None or longest <= window:
            return examples
        if pairs <= 2:
            raise ContextOverflow(f"expected a context window that fits two key-value pairs, got {window} tokens")
        pairs = max(2, min(pairs - 1, pairs * window // longest))


def _uuid_example(tokenizer: PreTrainedTokenizerBase, source: random.Random, pairs: int, index: int) -> TokenExample:
    keys, values = ([str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(pairs)] for _ in range(2))
    listed = ",\n ".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
    question = (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        f'JSON data:\n{{{listed}}}\n\nKey: "{keys[index]}"\nCorresponding value:'
    )
    messages = [{"role": "user", "content": question}]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    prompt, answer = (tokenizer(text, add_special_tokens=False).input_ids for text in (rendered, values[index]))
    return TokenExample(tuple(prompt), tuple(answer))


def random_texts(
    tokenizer: PreTrainedTokenizerBase, length: int = _POSITIONS, count: int = _TEXTS, seed: int = 0
) -> list[list[int]]:
    """Return the token ids of texts, without special tokens, in which a hidden value can only follow the position.

    As in `get_avg_hidden_state.py`, each has at most `length` tokens, of ten times as many characters.
    """
    source = random.Random(seed)
    texts = ("".join(source.choices(CHARACTERS, k=length * _CHARACTERS_PER_TOKEN)) for _ in range(count))
    return [tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:length] for text in texts]
