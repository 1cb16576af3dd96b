"""Batches of prompts of different lengths, padded on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from invariant_rag.generation.prepare import PreparedPrompt


def batch_caches(caches: Sequence[DynamicCache], padding: Sequence[int], copies: int) -> DynamicCache:
    """Make one batch of the caches of single prompts, padded on the left; each row `copies` times."""
    if len(caches) == 1:
        cache = caches[0]
    else:
        cache = DynamicCache()
        for index in range(len(caches[0].layers)):
            layers: list[Any] = [each.layers[index] for each in caches]
            keys = [_padded(layer.keys, extra) for layer, extra in zip(layers, padding, strict=True)]
            values = [_padded(layer.values, extra) for layer, extra in zip(layers, padding, strict=True)]
            cache.update(torch.cat(keys), torch.cat(values), index)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


def _padded(states: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, extra, 0))


def left_pad(
    prepared: Sequence[PreparedPrompt], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return input ids and attention mask `[B, L]`, padded on the left, and the padding of each row."""
    longest = max(len(each.input_ids) for each in prepared)
    padding = [longest - len(each.input_ids) for each in prepared]
    pairs = list(zip(prepared, padding, strict=True))
    ids = [[pad_token_id] * extra + list(each.input_ids) for each, extra in pairs]
    mask = [[0] * extra + [1] * (longest - extra) for extra in padding]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), padding


def left_pad_positions(
    prepared: Sequence[PreparedPrompt], padding: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return the rotary positions `[B, L]` of a batch that is padded on the left."""
    rows = [[0] * extra + list(each.positions) for each, extra in zip(prepared, padding, strict=True)]
    return torch.tensor(rows, device=device)
