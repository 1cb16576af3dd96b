"""Left padding: batches of prompts of different lengths, and of their caches; and caches of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig, StaticCache

from invariant_rag.generation.prepare import PreparedPrompt


class PaddedBatch(NamedTuple):
    """A batch of prompts, left-padded to one length.

    Attributes:
        ids: Input ids `[B, L]`.
        mask: Attention mask `[B, L]`.
        padding: Number of padding tokens of each row.
        positions: Rotary positions `[B, L]`, those of padding 0; None if every row has 0, 1, 2... after the padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    padding: list[int]
    positions: torch.Tensor | None


def left_pad(prompts: Sequence[PreparedPrompt], pad_token_id: int, device: torch.device) -> PaddedBatch:
    """Left-pad prompts to the length of the longest."""
    lengths = [len(each.input_ids) for each in prompts]
    padding = [max(lengths) - length for length in lengths]
    ids, mask, positions, is_natural = [], [], [], True
    for prompt, count in zip(prompts, padding, strict=True):
        ids.append([pad_token_id] * count + list(prompt.input_ids))
        mask.append([0] * count + [1] * len(prompt.input_ids))
        positions.append([0] * count + list(prompt.arrangement.positions))
        is_natural = is_natural and prompt.is_natural
    found = None if is_natural else torch.tensor(positions, device=device)
    return PaddedBatch(torch.tensor(ids, device=device), torch.tensor(mask, device=device), padding, found)


def batch_caches(caches: Sequence[DynamicCache], padding: Sequence[int], copies: int = 1) -> DynamicCache:
    """Batch the caches of single prompts, left-padded by `padding`; each row is repeated `copies` times."""
    cache = caches[0]
    if len(caches) > 1:
        cache = DynamicCache()
        for index in range(len(caches[0].layers)):
            layers: list[Any] = [each.layers[index] for each in caches]
            rows = list(zip(layers, padding, strict=True))
            keys = [torch.nn.functional.pad(layer.keys, (0, 0, count, 0)) for layer, count in rows]
            values = [torch.nn.functional.pad(layer.values, (0, 0, count, 0)) for layer, count in rows]
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
