"""Positional hidden-state scaling: the last token's queries and all keys use scaled hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import Cache, PreTrainedModel

from invariant_rag.attention.hook import LayerInputs, active_attention, override_attention
from invariant_rag.attention.kernels import attend
from invariant_rag.attention.per_model import once_per_model
from invariant_rag.attention.probe import input_device
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.interventions.base import BatchRow, Intervention, PromptBatch, plain_attention, stack_rows

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
"""Dimension, factor and layers of arXiv 2406.02536, table 5, by hub id."""


@dataclass(frozen=True)
class HiddenScaling(Intervention):
    """Scale the positional hidden dimension for the last token's attention (arXiv 2406.02536, section 3.3).

    In the given layers, queries and keys are computed a second time from an attention input with scaled dimensions. The
    last prompt token and every generated token attend with these queries and keys, to unscaled values. All earlier
    tokens attend as in the plain model. The cache stores the scaled keys.

    Attributes:
        dimensions: Hidden dimensions to scale.
        factor: Scaling factor.
        layers: Layer indices, from 0.

    Raises:
        InvalidChoice: `dimensions` or `layers` is empty or has a negative index.
    """

    name: ClassVar[str] = "hidden-scaling"
    paper: ClassVar[str] = "arXiv 2406.02536"
    cost: ClassVar[str] = "second query and key projection in its layers"

    dimensions: tuple[int, ...]
    factor: float
    layers: tuple[int, ...]

    def __init__(self, dimensions: int | Iterable[int], factor: float, layers: Iterable[int]) -> None:
        dimensions = (dimensions,) if isinstance(dimensions, int) else tuple(dimensions)
        for attribute, value in (("dimensions", dimensions), ("factor", float(factor)), ("layers", tuple(layers))):
            object.__setattr__(self, attribute, value)
        for attribute in ("dimensions", "layers"):
            indices = getattr(self, attribute)
            if not indices or min(indices) < 0:
                raise InvalidChoice(f"{attribute}: expected one or more indices of at least 0, got {indices}")

    @classmethod
    def published(cls, model: str) -> Self:
        """Return the paper's parameters for a model, given its hub id or the last part of it.

        >>> HiddenScaling.published("mistralai/Mistral-7B-Instruct-v0.2").dimensions
        (213,)

        Raises:
            UnknownName: The paper has no parameters for it; `invariant-rag search-dimension` finds them.
        """
        published = {_short_name(name): parameters for name, parameters in PUBLISHED.items()}
        if _short_name(model) not in published:
            raise UnknownName(
                "model in the published table",
                model,
                PUBLISHED,
                hint="`invariant-rag search-dimension` finds parameters for a model; HiddenScaling.load loads them.",
            )
        return cls(*published[_short_name(model)])

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Self:
        """Return the paper's parameters for a model, by its name.

        Raises:
            UnknownName: The paper has no parameters for it.
        """
        return cls.published(str(model.config._name_or_path or model.config.model_type))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Load parameters from a file of `save` or of `invariant-rag search-dimension`.

        Raises:
            OSError: The file cannot be read.
            InvalidChoice: The file does not contain parameters.
        """
        try:
            parameters = json.loads(Path(path).read_text())
            return cls(parameters["dimensions"], parameters["factor"], parameters["layers"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise InvalidChoice(f"expected a JSON object with dimensions, factor and layers in {path}") from error

    def save(self, path: str | Path) -> None:
        """Write the parameters as JSON."""
        Path(path).write_text(json.dumps(self.as_dict(), indent=2) + "\n")

    def as_dict(self) -> dict[str, Any]:
        """Return the parameters as JSON-serialisable data."""
        return {"dimensions": list(self.dimensions), "factor": self.factor, "layers": list(self.layers)}

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


def _short_name(model: str) -> str:
    """Return the last part of a hub id or path, lowercase, without the suffix `-hf`."""
    return model.replace("\\", "/").rstrip("/").rpartition("/")[2].lower().removesuffix("-hf")


@dataclass
class _ScaledProjections:
    """Queries `[B, H, Q, D]` and keys `[B, H_kv, Q, D]` of a layer's scaled input, and the cache to update."""

    cache: Cache | None
    queries: torch.Tensor | None = None
    keys: torch.Tensor | None = None


@dataclass(eq=False)
class _ScaledAttention:
    """An attention function, and a forward pre-hook that computes queries and keys of the scaled input."""

    scaling: HiddenScaling
    batch: PromptBatch
    scaled: _ScaledProjections | None = None
    capturing: bool = field(default=False)

    def project_scaled(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the attention module on a scaled input, without a cache, and capture its queries and keys.

        The module applies its own norms, biases and rotary embedding, so this works for every model family.
        """
        if active_attention() is not self:  # a forward pass of the plain model in another thread
            return
        caches = [value for value in (*args, *kwargs.values()) if isinstance(value, Cache)]
        self.scaled = _ScaledProjections(caches[0] if caches else None)
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
        if self.capturing and self.scaled is not None:
            self.scaled.queries, self.scaled.keys = inputs.queries, inputs.keys
            shape = (inputs.queries.shape[0], inputs.queries.shape[2], inputs.queries.shape[1], inputs.values.shape[3])
            return inputs.values.new_zeros(shape)
        scaled, self.scaled = self.scaled, None
        rows = self.batch.rows(inputs)
        if scaled is None or scaled.queries is None or scaled.keys is None:
            return stack_rows([(row, plain_attention(row.call)) for row in rows])
        keys = torch.cat((inputs.keys[:, :, : -scaled.keys.shape[2]], scaled.keys), dim=2)
        if scaled.cache is not None:
            layer: Any = scaled.cache.layers[inputs.layer]
            layer.keys = keys
        return stack_rows([(row, _attend_scaled(row, scaled.queries[row.index], keys[row.index])) for row in rows])


def _attend_scaled(row: BatchRow, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the attention output `[H, Q, D_v]`: plain before the last prompt token, with scaled states from it on."""
    call = row.call
    queries, keys = queries[:, row.padded_queries :], keys[:, keys.shape[1] - call.keys.shape[1] :]
    before = max(0, row.prompt_length - 1 - call.query_start)
    out = attend(call, queries[:, before:], keys, call.values)
    if not before:
        return out
    end = call.query_start + before
    plain = attend(call, call.queries[:, :before], call.keys[:, :end], call.values[:, :end])
    return torch.cat((plain, out), dim=1)


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
