"""What a layer passes to its attention function, whichever way that function is reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn


@dataclass(frozen=True)
class LayerInputs:
    """What a layer passes to its attention function.

    Attributes:
        module: The layer's attention module.
        layer: Index of the layer.
        queries: `[B, H, Q, D]`, rotated.
        keys: `[B, H_kv, S, D]`, rotated, those of the cache included.
        values: `[B, H_kv, S, D_v]`.
        scaling: Factor on the scores.
        sliding_window: Sliding window of the layer; None without one.
        dropout: Dropout probability of the attention weights.
        extra: All other keywords of the layer.
        alibi: Bias that the layer adds to the scores of keys `[H, S]`, of the first row of the batch; None without one.
    """

    module: nn.Module
    layer: int
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scaling: float
    sliding_window: int | None
    dropout: float
    extra: dict[str, Any]
    alibi: torch.Tensor | None = None


class AttentionFunction(Protocol):
    """A replacement of a model's attention."""

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        """Return one layer's attention output `[B, Q, H, D_v]`."""
        ...
