"""Left padding: batches of prompts of different lengths, and of their caches; and caches of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache

from invariant_rag.generation.prepare import PreparedPrompt


@dataclass(frozen=True)
class PaddedBatch:
    """A batch of prompts, left-padded to one length.

    Attributes:
        ids: Input ids `[B, L]`.
        mask: Attention mask `[B, L]`.
        padding: Number of padding tokens of each row.
        positions: Rotary positions `[B, L]`; None if the positions of every row are 0, 1, 2... after the padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    padding: tuple[int, ...]
    positions: torch.Tensor | None

    def explicit_positions(self) -> torch.Tensor:
        """Return the positions `[B, L]`, also where they count from 0; those of padding are 0."""
        return (self.mask.cumsum(dim=1) - 1).clamp(min=0) if self.positions is None else self.positions


def left_pad(prompts: Sequence[PreparedPrompt], pad_token_id: int, device: torch.device) -> PaddedBatch:
    """Left-pad prompts to the length of the longest."""
    longest = max(len(each.input_ids) for each in prompts)
    padding = tuple(longest - len(each.input_ids) for each in prompts)
    rows = list(zip(prompts, padding, strict=True))
    ids = [[pad_token_id] * count + list(each.input_ids) for each, count in rows]
    mask = [[0] * count + [1] * len(each.input_ids) for each, count in rows]
    positions = None
    if not all(each.is_natural for each in prompts):
        positions = torch.tensor([[0] * count + list(each.positions) for each, count in rows], device=device)
    return PaddedBatch(torch.tensor(ids, device=device), torch.tensor(mask, device=device), padding, positions)


def batch_caches(caches: Sequence[DynamicCache], padding: Sequence[int], copies: int) -> DynamicCache:
    """Batch the caches of single prompts, left-padded by `padding`; each row is repeated `copies` times."""
    if len(caches) == 1:
        cache = caches[0]
    else:
        cache = DynamicCache()
        for index in range(len(caches[0].layers)):
            layers: list[Any] = [each.layers[index] for each in caches]
            keys = [_left_pad_states(layer.keys, count) for layer, count in zip(layers, padding, strict=True)]
            values = [_left_pad_states(layer.values, count) for layer, count in zip(layers, padding, strict=True)]
            cache.update(torch.cat(keys), torch.cat(values), index)
    if not cache.get_seq_length():
        return DynamicCache()  # of a prompt with one token; transformers does not repeat an empty cache
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


def unbatch_cache(cache: DynamicCache, padding: Sequence[int], lengths: Sequence[int]) -> list[DynamicCache]:
    """Take a batch apart: `lengths` tokens of each row, behind its `padding`."""
    rows = [DynamicCache() for _ in lengths]
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        for number, (row, start, length) in enumerate(zip(rows, padding, lengths, strict=True)):
            kept = (number, slice(None), slice(start, start + length))
            row.update(layer.keys[kept][None], layer.values[kept][None], index)
    return rows


def to_static(cache: Cache, config: PreTrainedConfig, length: int) -> StaticCache:
    """Copy a cache into one with room for `length` tokens, whose tensors stay where they are: decoding compiles."""
    static = StaticCache(config=config, max_cache_len=length)
    layers: list[Any] = cache.layers
    for index, layer in enumerate(layers):
        static.update(layer.keys, layer.values, index)
    return static


def _left_pad_states(states: torch.Tensor, count: int) -> torch.Tensor:
    """Pad `[B, H, T, D]` with `count` zero tokens on the left."""
    return torch.nn.functional.pad(states, (0, 0, count, 0))
