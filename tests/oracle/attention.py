"""Attention one query and one head at a time, in float64, from the projections of a model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tests.oracle.methods import Row, World
from tests.oracle.rotary import Rotary, rotary_of, slopes_of

APE_TEMPERATURE, APE_SCALE = 0.7, 1.2

RowOf = Callable[[World, int, Callable[..., list[float]]], Row]


@dataclass(frozen=True)
class Layer:
    """One layer: queries `[H, T, D]`, keys and values `[H_kv, T, D]` as they are projected, and what attention adds."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    scaling: float
    rotary: Rotary | None
    slopes: Sequence[float] | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: np.ndarray | None = None

    def outputs(self, world: World, *methods: RowOf) -> np.ndarray:
        """Return the outputs of all tokens `[T, H * D]`, by one method, or by one for each head."""
        heads, tokens, _ = self.queries.shape
        of_heads = list(enumerate(methods if len(methods) == heads else methods * heads))
        return np.array([np.concatenate([self.output(world, m, h, t) for h, m in of_heads]) for t in range(tokens)])

    def output(self, world: World, method: RowOf, head: int, token: int) -> np.ndarray:
        """Return the output of one query `[D]`."""
        group = head // (len(self.queries) // len(self.keys))
        row = method(world, token, lambda queries, segments: self._importance(head, group, queries, segments))
        keys = row.keys if self.sliding_window is None else row.keys[-self.sliding_window :]
        copied = [each for each in keys for _ in range(row.copies(each[0]))]
        indices, positions = (np.array(each) for each in zip(*copied, strict=True))
        rotate = (lambda x, _: x) if self.rotary is None else self.rotary.rotate
        query = rotate(self.queries[head, token], row.position)
        scores = rotate(self.keys[group, indices], positions) @ query * self.scaling
        if self.slopes is not None:
            scores = scores + self.slopes[head] * (positions - row.position)
        if self.softcap is not None:
            scores = self.softcap * np.tanh(scores / self.softcap)
        in_parts = [np.isin(indices, part) for part in row.parts]
        rest = ~np.any([*in_parts, np.zeros(len(indices), dtype=bool)], axis=0)
        sink = [] if self.sinks is None else [self.sinks[head]]  # a logit without a value
        masses = [np.exp([*scores[rest], *sink]).sum()]
        sums = [np.exp(scores[rest]) @ self.values[group, indices[rest]] / masses[0]]
        for inside in in_parts:
            if inside.any():
                weights = np.exp(scores[inside] / APE_TEMPERATURE)
                masses.append(weights.sum() ** (APE_TEMPERATURE * APE_SCALE))
                sums.append(weights @ self.values[group, indices[inside]] / weights.sum())
        return np.average(sums, axis=0, weights=masses)

    def _importance(self, head: int, group: int, queries: Sequence[int], segments: Sequence[range]) -> list[float]:
        """Return PINE's importance: softmax without positions, summed over queries, mean over tokens of a segment."""
        keys = [key for segment in segments for key in segment]
        total = dict.fromkeys(keys, 0.0)
        for query in queries if keys else ():
            weights = np.exp(self.keys[group, keys] @ self.queries[head, query] * self.scaling)
            for key, weight in zip(keys, weights / weights.sum(), strict=True):
                total[key] += float(weight)
        return [math.fsum(total[key] for key in segment) / len(segment) for segment in segments]


def logits_with(
    model: PreTrainedModel, ids: Sequence[int], attend: Callable[[Any, torch.Tensor], np.ndarray]
) -> torch.Tensor:
    """Return the logits of all tokens `[T, V]` with other attention `[T, H * D]`, from a module and its inputs."""
    modules = [each for each in model.modules() if hasattr(each, "layer_idx") and _output_projection(each) is not None]
    if [each.layer_idx for each in modules] != list(range(len(modules))) or not modules:
        raise AssertionError(f"expected one attention module per layer, got {[type(each) for each in modules]}")

    def replacement(module: Any) -> Callable[..., Any]:
        def forward(hidden_states: torch.Tensor, *args: Any, **_: Any) -> tuple[torch.Tensor, None]:
            projected = _output_projection(module)(torch.from_numpy(attend(module, hidden_states[0]))[None])
            return (projected + args[0] if model.config.model_type == "bloom" else projected), None

        return forward

    for module in modules:
        vars(module)["forward"] = replacement(module)
    try:
        # GPT-J looks up positions in a table that may end before these. The replaced modules need none.
        is_short = model.config.model_type == "gptj" and len(ids) > model.config.max_position_embeddings
        more = {"position_ids": torch.zeros(1, len(ids), dtype=torch.long)} if is_short else {}
        return model(input_ids=torch.tensor([ids]), use_cache=False, **more).logits[0]
    finally:
        for module in modules:
            del vars(module)["forward"]


def layer_of(module: Any, config: Any, hidden: torch.Tensor, largest: float) -> Layer:
    """Return one layer's projections of its inputs `[T, hidden size]`."""
    heads = config.num_attention_heads
    queries, keys, values = (each.transpose(0, 1).numpy() for each in _projections(module, heads, hidden))
    scaling = queries.shape[-1] ** -0.5
    if config.model_type in ("gemma2", "gemma3_text"):
        scaling = config.query_pre_attn_scalar**-0.5
    if config.model_type == "granite":
        scaling = config.attention_multiplier
    index, kinds = module.layer_idx, getattr(config, "layer_types", None)
    is_sliding = kinds is None or kinds[index] == "sliding_attention"
    return Layer(
        queries,
        keys,
        values,
        scaling=scaling,
        rotary=rotary_of(config, index, largest),
        slopes=slopes_of(config),
        sliding_window=getattr(config, "sliding_window", None) if is_sliding else None,
        softcap=getattr(config, "attn_logit_softcapping", None),
        sinks=module.sinks.numpy() if hasattr(module, "sinks") else None,
    )


def _projections(module: Any, heads: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries `[T, H, D]`, keys and values `[T, H_kv, D]`, with the norms of a family that has some."""
    if hasattr(module, "q_proj"):
        flat = [each(hidden) for each in (module.q_proj, module.k_proj, module.v_proj)]
        size = flat[0].shape[-1] // heads
        for i, norm in enumerate(getattr(module, name, None) for name in ("q_norm", "k_norm")):
            if norm is not None:  # of each head, or of all heads at once (OLMo 2)
                parts = flat[i] if norm.weight.numel() == flat[i].shape[-1] else flat[i].unflatten(-1, (-1, size))
                flat[i] = norm(parts).flatten(1) if parts.ndim == 3 else norm(parts)
        queries, keys, values = (each.unflatten(-1, (-1, size)) for each in flat)
    elif hasattr(module, "qkv_proj") and hasattr(module, "num_key_value_groups"):  # Phi-3
        key_heads = heads // module.num_key_value_groups
        split = module.qkv_proj(hidden).unflatten(-1, (heads + 2 * key_heads, -1))
        queries, keys, values = split.split([heads, key_heads, key_heads], dim=1)
    elif hasattr(module, "Wqkv"):  # MPT
        queries, keys, values = module.Wqkv(hidden).unflatten(-1, (3, heads, -1)).unbind(dim=1)
    elif getattr(module, "multi_query", False):  # Falcon
        split = module.query_key_value(hidden).unflatten(-1, (heads + 2, -1))
        queries, keys, values = split.split([heads, 1, 1], dim=1)
    else:  # GPT-NeoX, BLOOM
        queries, keys, values = module.query_key_value(hidden).unflatten(-1, (heads, 3, -1)).unbind(dim=2)
    return queries, keys, values


def _output_projection(module: nn.Module) -> Any:
    """Return the projection after attention; None for a module that is no attention."""
    names = ("o_proj", "dense", "out_proj")
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wide = [torch.float64 if each is torch.float32 else each for each in args]
        named = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return function(*wide, **named)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Compute in float64 wherever code asks for float32: transformers has float32 sines, norms and softmaxes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), _Doubling():
            yield
    finally:
        torch.set_default_dtype(before)
