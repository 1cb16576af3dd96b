"""Attention one query and one head at a time, in float64, from the projections of a model's weights.

Position encodings are those of their papers: rotary embeddings and their scalings, and ALiBi.
"""

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


# --- positions ---

INTERLEAVED = ("glm4", "cohere", "cohere2", "helium", "ernie4_5", "gptj", "codegen")
"""Families that rotate the dimensions (0, 1), (2, 3)... together, as GPT-J does; others (0, R/2), (1, R/2 + 1)..."""


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings of a layer (arXiv 2104.09864): pair i of dimensions turns by `position * frequencies[i]`."""

    frequencies: np.ndarray  # angle per position of each pair `[R / 2]`; dimensions after the first R do not turn
    interleaved: bool = False  # whether pairs are neighbours
    factor: float = 1.0  # what queries and keys are multiplied by while they turn (YaRN, LongRoPE)

    def rotate(self, x: np.ndarray, positions: Any) -> np.ndarray:
        """Return queries or keys `[..., D]` at positions `[...]`."""
        pairs = np.arange(len(self.frequencies))
        first, second = (2 * pairs, 2 * pairs + 1) if self.interleaved else (pairs, pairs + len(pairs))
        angles, out = np.asarray(positions)[..., None] * self.frequencies, x.copy()
        out[..., first] = self.factor * (x[..., first] * np.cos(angles) - x[..., second] * np.sin(angles))
        out[..., second] = self.factor * (x[..., first] * np.sin(angles) + x[..., second] * np.cos(angles))
        return out


def rotary_of(config: Any, layer: int, largest_position: float) -> Rotary | None:
    """Return the rotary embedding of a layer of a model; None for a layer without one."""
    if not _rotates(config, layer):
        return None
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if hasattr(config, "rotary_dim"):  # GPT-J and CodeGen
        options: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
        size = config.rotary_dim
    else:
        kind = config.layer_types[layer] if getattr(config, "layer_types", None) else ""
        options = config.rope_parameters.get(kind, config.rope_parameters)
        size = int(head_size * options.get("partial_rotary_factor", 1.0))
    plain = options["rope_theta"] ** (-np.arange(0, size, 2) / size)
    length, scaling = largest_position + 1, SCALINGS[options["rope_type"]]
    frequencies, factor = scaling(plain, options, config.max_position_embeddings, length)
    return Rotary(frequencies, config.model_type in INTERLEAVED, factor)


def _rotates(config: Any, layer: int) -> bool:
    """Return whether a layer has rotary positions. Some families leave them out where a layer attends to everything."""
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        return False
    if config.model_type in ("cohere2", "exaone4"):
        return bool(config.layer_types[layer] == "sliding_attention")
    return True


def _linear(plain: np.ndarray, options: dict[str, Any], trained: int, length: float) -> tuple[np.ndarray, float]:
    """Position interpolation (arXiv 2306.15595): positions divided by the factor."""
    return plain / options.get("factor", 1.0), 1.0


def _dynamic(plain: np.ndarray, options: dict[str, Any], trained: int, length: float) -> tuple[np.ndarray, float]:
    """Dynamic NTK scaling: beyond the trained length, the base grows with the length."""
    size, grown = 2 * len(plain), options["factor"] * max(length, trained) / trained - (options["factor"] - 1)
    base = options["rope_theta"] * grown ** (size / (size - 2))
    return base ** (-np.arange(0, size, 2) / size), 1.0


def _llama3(plain: np.ndarray, options: dict[str, Any], trained: int, length: float) -> tuple[np.ndarray, float]:
    """Llama 3.1: long wavelengths are interpolated, short ones kept, and those between are mixed."""
    low, high = options["low_freq_factor"], options["high_freq_factor"]
    turns = options["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * plain + (1 - kept) * plain / options["factor"], 1.0


def _yarn(plain: np.ndarray, options: dict[str, Any], trained: int, length: float) -> tuple[np.ndarray, float]:
    """YaRN (arXiv 2309.00071): a ramp over dimensions between kept and interpolated ones, and an attention factor."""
    factor, base, original = options["factor"], options["rope_theta"], options["original_max_position_embeddings"]
    size = 2 * len(plain)

    def dimension(turns: float) -> float:
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = dimension(options.get("beta_fast") or 32), dimension(options.get("beta_slow") or 1)
    if options.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last += 0.001 if first == last else 0
    ramp = np.clip((np.arange(len(plain)) - first) / (last - first), 0.0, 1.0)
    return plain * (1 - ramp) + plain / factor * ramp, options.get("attention_factor") or 0.1 * math.log(factor) + 1


def _longrope(plain: np.ndarray, options: dict[str, Any], trained: int, length: float) -> tuple[np.ndarray, float]:
    """LongRoPE (arXiv 2402.13753): a factor for each dimension, others beyond the original length."""
    original = options["original_max_position_embeddings"]
    factors = options["long_factor" if length > original else "short_factor"]
    grown = options.get("factor") or trained / original
    attention_factor = options.get("attention_factor") or math.sqrt(1 + math.log(grown) / math.log(original))
    return plain / np.array(factors), attention_factor


_PLAIN = {"default": _linear, "linear": _linear}
SCALINGS = {**_PLAIN, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}


def slopes_of(config: Any) -> list[float] | None:
    """Return by how much ALiBi lowers the scores of each head for each position (arXiv 2108.12409); None without it.

    The number of heads is a power of two. Falcon divides its biases by the root of the head size, as it does scores.
    """
    if config.model_type not in ("bloom", "mpt") and not getattr(config, "alibi", False):
        return None
    heads = config.num_attention_heads
    by = (config.hidden_size // heads) ** -0.5 if config.model_type == "falcon" else 1.0
    return [by * 2 ** (-8 * (head + 1) / heads) for head in range(heads)]
