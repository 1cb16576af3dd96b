"""Position encodings from their papers, in float64: rotary embeddings and their scalings, and ALiBi."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

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
