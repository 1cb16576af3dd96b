"""Batches of prompts of different lengths: padding on the left, and one cache of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from invariant_rag.generation.prepare import PreparedPrompt


@dataclass(frozen=True)
class PaddedBatch:
    """Prompts, padded on the left to one length.

    Attributes:
        ids: Input ids `[B, L]`.
        mask: Attention mask `[B, L]`.
        padding: Tokens of padding of each row.
        positions: Rotary positions `[B, L]`; None where every token's position is its index behind the padding.
    """

    ids: torch.Tensor
    mask: torch.Tensor
    padding: tuple[int, ...]
    positions: torch.Tensor | None


def left_pad(prompts: Sequence[PreparedPrompt], pad_token_id: int, device: torch.device) -> PaddedBatch:
    """Pad prompts on the left to the length of the longest."""
    longest = max(len(each.input_ids) for each in prompts)
    ids, mask, padding = [], [], []
    for each in prompts:
        missing = longest - len(each.input_ids)
        ids.append([pad_token_id] * missing + list(each.input_ids))
        mask.append([0] * missing + [1] * len(each.input_ids))
        padding.append(missing)
    positions = None
    if not all(each.is_natural for each in prompts):
        rows = [[0] * missing + list(each.positions) for each, missing in zip(prompts, padding, strict=True)]
        positions = torch.tensor(rows, device=device)
    return PaddedBatch(torch.tensor(ids, device=device), torch.tensor(mask, device=device), tuple(padding), positions)


def batch_caches(caches: Sequence[DynamicCache], padding: Sequence[int], copies: int) -> DynamicCache:
    """Batch the caches of single prompts, padded on the left; every row `copies` times."""
    if len(caches) == 1:
        cache = caches[0]
    else:
        cache = DynamicCache()
        for index in range(len(caches[0].layers)):
            layers: list[Any] = [each.layers[index] for each in caches]
            keys = [_left_pad_states(layer.keys, missing) for layer, missing in zip(layers, padding, strict=True)]
            values = [_left_pad_states(layer.values, missing) for layer, missing in zip(layers, padding, strict=True)]
            cache.update(torch.cat(keys), torch.cat(values), index)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


def _left_pad_states(states: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, missing, 0))
