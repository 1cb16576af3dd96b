"""Positional hidden-state scaling: the last tokens' queries and all keys use scaled hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from invariant_rag.attention.base import LayerInputs
from invariant_rag.attention.hook import active_attention, override_attention
from invariant_rag.attention.per_model import input_device, once_per_model
from invariant_rag.attention.softmax import plain_attention
from invariant_rag.checks import check_flag, check_items, check_number, check_path, check_real, check_text
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination, UnusableFile
from invariant_rag.files import read_bytes, write_file
from invariant_rag.interventions.base import BatchRow, Intervention, PromptBatch, stack_rows
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.attention.base import AttentionCall

PUBLISHED: dict[str, tuple[int, float, range]] = {
    "meta-llama/Llama-2-7b-chat-hf": (2393, -1.0, range(10, 26)),
    "meta-llama/Llama-2-13b-chat-hf": (4283, -1.0, range(10, 35)),
    "lmsys/vicuna-7b-v1.5-16k": (2393, 0.0, range(10, 26)),
    "lmsys/vicuna-13b-v1.5-16k": (4923, 0.0, range(10, 35)),
    "mistralai/Mistral-7B-Instruct-v0.2": (213, 0.0, range(10, 26)),
    "google/gemma-1.1-7b-it": (1665, 0.0, range(10, 23)),
    "Qwen/Qwen1.5-7B-Chat": (1081, 0.2, range(10, 26)),
    "mosaicml/mpt-30b-chat": (6926, 0.0, range(10, 43)),
}
"""Dimension, factor and layers by hub id, as in arXiv 2406.02536, table 5.

The files `configs` of its code (PositionalHidden/PositionalHidden at f3bcd55) have other factors for Llama-2-13b (0),
Qwen (0) and MPT (-1), and the layers 10 to 25 for Gemma. MPT has ALiBi instead of rotary positions; its row does not
depend on how positions are encoded, so it applies wherever the probe accepts the model.
"""
_MOST_TOKENS = 1 << 31
"""More than any prompt has."""


@dataclass(frozen=True)
class HiddenScaling(Intervention):
    """Scale the positional hidden dimension for the last token's attention (arXiv 2406.02536, section 3.3).

    In the given layers, queries and keys are computed a second time from an attention input with scaled dimensions. The
    last prompt token and every generated token attend with these queries and keys, to unscaled values. All earlier
    tokens attend as in the plain model. The cache stores the scaled keys.

    Ablations of table 3: two dimensions in `dimensions`, `last_tokens=16`, and `last_tokens=None` for all tokens.
    `skip_first` and `scale_values` are settings of the published code (`skip_first`, `change_value`). That code counts
    from the start of each forward pass, so that it cannot decode with 16 last tokens, and leaves generated tokens
    unscaled with `skip_first`; here every generated token is a last token.

    Attributes:
        dimensions: Hidden dimensions to scale.
        factor: Scaling factor.
        layers: Layer indices, from 0.
        last_tokens: Number of tokens at the end of the prompt that attend with scaled states; None for all tokens.
        skip_first: Number of tokens at the start of the prompt whose states are never scaled.
        scale_values: Whether these tokens attend to values of scaled states too.

    Raises:
        InvalidChoice: `dimensions` or `layers` is empty or has a negative index, or a number of tokens is too small.
    """

    name: ClassVar[str] = "hidden-scaling"
    paper: ClassVar[str] = "arXiv 2406.02536"
    cost: ClassVar[str] = "second query and key projection in its layers"

    dimensions: tuple[int, ...]
    factor: float
    layers: tuple[int, ...]

    last_tokens: int | None = 1
    skip_first: int = 0
    scale_values: bool = False

    def __init__(
        self,
        dimensions: int | Iterable[int],
        factor: float,
        layers: Iterable[int],
        *,
        last_tokens: int | None = 1,
        skip_first: int = 0,
        scale_values: bool = False,
    ) -> None:
        values = (
            _indices("dimensions", [dimensions] if isinstance(dimensions, Integral) else dimensions),
            check_real("factor", factor),
            _indices("layers", layers),
            None if last_tokens is None else check_number("last_tokens", last_tokens, 1, _MOST_TOKENS),
            check_number("skip_first", skip_first, 0, _MOST_TOKENS),
            check_flag("scale_values", scale_values),
        )
        for attribute, value in zip(fields(self), values, strict=True):
            object.__setattr__(self, attribute.name, value)

    @classmethod
    def published(cls, model: str) -> Self:
        """Return the published parameters for a model, given its hub id or the last part of it; refuse any other.

        >>> HiddenScaling.published("mistralai/Mistral-7B-Instruct-v0.2").dimensions
        (213,)
        """
        check_text("model", model)
        published = {_short_name(name): parameters for name, parameters in PUBLISHED.items()}
        if (name := _short_name(model)) not in published:
            hint = (
                "`interventions.search.search_dimension` finds parameters for a model; HiddenScaling.load loads them."
            )
            raise UnknownName("model in the published table", model, PUBLISHED, hint=hint)
        return cls(*published[name])

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Self:
        """Return the paper's parameters for a model, by its name."""
        return cls.published(str(model.config._name_or_path or model.config.model_type))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load parameters from a file of `save`, of these or of a search; refuse any other file."""
        try:
            content = read_bytes(check_path("path", path))
        except OSError as error:
            raise UnusableFile(f"cannot read {str(path)!r}: {error}") from error
        try:
            given = json.loads(content)
            options = {name: given[name] for name in ("last_tokens", "skip_first", "scale_values") if name in given}
            return cls(given["dimensions"], given["factor"], given["layers"], **options)
        except (InvalidChoice, KeyError, TypeError, ValueError, RecursionError) as error:
            message = f"expected a JSON object with dimensions, factor and layers in {path}"
            raise InvalidChoice(message, hint=f"It says: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the parameters as JSON; an `UnusableFile` says why it cannot be written."""
        write_file(check_path("path", path), json.dumps(self.as_dict(), indent=2).encode() + b"\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as JSON-serialisable data."""
        return {**asdict(self), "dimensions": list(self.dimensions), "layers": list(self.layers)}

    def check(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedCombination if the model has fewer dimensions or layers."""
        config = model.config.get_text_config(decoder=True)
        sizes = ("dimensions", config.hidden_size), ("layers", config.num_hidden_layers)
        for attribute, size in sizes:
            indices = getattr(self, attribute)
            if max(indices) >= size:
                raise UnsupportedCombination(
                    f"{attribute}: expected indices below {size} for {config.model_type}, got {indices}"
                )

    @contextmanager
    def applied(self, model: PreTrainedModel, batch: PromptBatch) -> Iterator[None]:
        """Apply the intervention to forward passes inside the context; restore the model afterwards."""
        attention = _ScaledAttention(self, batch)
        modules = _attention_modules(model)
        hooks = [
            modules[layer].register_forward_pre_hook(attention.project_scaled, with_kwargs=True)
            for layer in self.layers
        ]
        try:
            with override_attention(model, attention):
                yield
        finally:
            for hook in hooks:
                hook.remove()


def _indices(name: str, values: Any) -> tuple[int, ...]:
    listed = check_items(name, values, Integral)
    if not listed or any(each < 0 for each in listed):
        raise InvalidChoice(f"{name}: expected one or more indices of at least 0, got {shown(listed)}")
    return tuple(check_number(name, each) for each in listed)


def _short_name(model: str) -> str:
    """Return the last part of a hub id or path, lowercase, without the suffix `-hf`."""
    return model.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().removesuffix("-hf")


@dataclass(eq=False)
class _ScaledAttention:
    """An attention function, and a forward pre-hook that projects the scaled input."""

    scaling: HiddenScaling
    batch: PromptBatch
    cache: Cache | None = None  # of the layer that is called, whose keys are replaced
    scaled: LayerInputs | None = None  # queries, keys and values of that layer's scaled input, as it passes them on
    capturing: bool = False  # whether the layer is called with its scaled input

    def project_scaled(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the module, with its own norms, biases and rotary embedding, on a scaled input, and keep projections."""
        if active_attention() is not self:  # a forward pass of the plain model in another thread
            return
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        self.cache = caches[0] if caches else None
        args = tuple(None if isinstance(value, Cache) else value for value in args)
        kwargs = {name: None if isinstance(value, Cache) else value for name, value in kwargs.items()}
        if "hidden_states" in kwargs:
            kwargs["hidden_states"] = self._scale(kwargs["hidden_states"])
        else:
            args = (self._scale(args[0]), *args[1:])
        self.capturing = True
        try:
            forward: Callable[..., Any] = module.forward
            forward(*args, **kwargs)
        finally:
            self.capturing = False

    def _scale(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states `[B, Q, hidden]` with the dimensions multiplied by the factor."""
        factors = torch.ones(states.shape[-1], dtype=states.dtype, device=states.device)
        factors[list(self.scaling.dimensions)] = self.scaling.factor
        return states * factors

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        """Compute one layer's attention: `[B, Q, H, D_v]`."""
        if self.capturing:
            self.scaled = inputs
            return inputs.values.new_zeros((*inputs.queries.transpose(1, 2).shape[:3], inputs.values.shape[3]))
        projections, self.scaled = self.scaled, None
        if projections is None:
            return stack_rows([(row, plain_attention(row.call)) for row in self.batch.rows(inputs)])
        scaled = self._merge(inputs, projections)
        if self.cache is not None:
            layer: Any = self.cache.layers[inputs.layer]
            layer.keys, layer.values = scaled.keys, scaled.values
        rows = zip(self.batch.rows(inputs), self.batch.rows(scaled), strict=True)
        return stack_rows([(plain, self._attend(plain, modified.call)) for plain, modified in rows])

    def _merge(self, inputs: LayerInputs, scaled: LayerInputs) -> LayerInputs:
        """Return a layer's inputs with the scaled keys (and values) of its new tokens, except the skipped ones."""
        new = scaled.keys.shape[2]
        keys = torch.cat((inputs.keys[:, :, :-new], scaled.keys), dim=2)
        values = inputs.values
        if self.scaling.scale_values:
            values = torch.cat((values[:, :, :-new], scaled.values), dim=2)
        if self.scaling.skip_first:
            columns = torch.arange(keys.shape[2], device=keys.device)
            padding = torch.tensor([prompt.padding for prompt in self.batch.prompts], device=keys.device)
            padding = padding.repeat_interleave(keys.shape[0] // len(padding))
            skipped = (columns < (padding + self.scaling.skip_first)[:, None])[:, None, :, None]
            keys, values = torch.where(skipped, inputs.keys, keys), torch.where(skipped, inputs.values, values)
        return replace(inputs, queries=scaled.queries, keys=keys, values=values)

    def _attend(self, row: BatchRow, scaled: AttentionCall) -> torch.Tensor:
        """Return a row's attention output `[H, Q, D_v]`: plain at first, with scaled states for the last tokens."""
        call, last = row.call, self.scaling.last_tokens
        first = self.scaling.skip_first if last is None else max(self.scaling.skip_first, row.prompt_length - last)
        before = min(max(0, first - call.query_start), call.queries.shape[1])
        end = call.query_start + before
        outputs = []
        if before:
            keys, values = call.keys[:, :end], call.values[:, :end]
            outputs.append(plain_attention(replace(call, queries=call.queries[:, :before], keys=keys, values=values)))
        if before < call.queries.shape[1]:
            outputs.append(plain_attention(replace(scaled, queries=scaled.queries[:, before:])))
        return torch.cat(outputs, dim=1)


@once_per_model
def _attention_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """Return each layer's module that calls the attention interface, recorded in a forward pass of one token."""
    modules: dict[int, nn.Module] = {}

    def record(inputs: LayerInputs) -> torch.Tensor:
        modules[inputs.layer] = inputs.module
        groups = inputs.queries.shape[1] // inputs.values.shape[1]
        return inputs.values.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous()

    token = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    with torch.no_grad(), override_attention(model, record):
        model(input_ids=token, use_cache=False)
    return modules
