"""The interfaces: what a layer passes to its attention function, and what a backend computes of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import nn

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement, Span
    from invariant_rag.attention.positions import PositionEncoding


@dataclass(frozen=True)
class LayerInputs:
    """What a layer passes to its attention function."""

    module: nn.Module  # the layer's attention module
    layer: int  # its index
    queries: torch.Tensor  # `[B, H, Q, D]`, rotated
    keys: torch.Tensor  # `[B, H_kv, S, D]`, rotated, those of the cache included
    values: torch.Tensor  # `[B, H_kv, S, D_v]`
    scaling: float  # factor on the scores
    sliding_window: int | None  # in tokens
    dropout: float  # probability, of the attention weights
    extra: dict[str, Any]  # all other keywords of the layer
    alibi: torch.Tensor | None = None  # bias that the layer adds to the scores of keys `[H, S]`, of the first row


class AttentionFunction(Protocol):
    """A replacement of a model's attention."""

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        """Return one layer's attention output `[B, Q, H, D_v]`."""
        ...


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention: for one prompt, or for a left-padded batch of B prompts, whose tensors start with B."""

    queries: torch.Tensor  # `[H, Q, D]`, at their natural positions; they are the last Q of the S tokens
    keys: torch.Tensor  # `[H_kv, S, D]`, at their natural positions
    values: torch.Tensor  # `[H_kv, S, D_v]`
    rotation: PositionEncoding  # of the layer
    scaling: float  # factor on the scores
    sliding_window: int | None = None  # keys at this distance or farther along the row are not visible
    softcap: float | None = None  # scores are squashed to `softcap * tanh(score / softcap)`
    sinks: torch.Tensor | None = None  # `[H]` extra logits that take part in the softmax and have no value
    dropout: float = 0.0  # probability, of the attention weights, while training
    scratch: dict[str, Any] = field(default_factory=dict)  # reused by later forward passes over the same tokens

    @cached_property
    def num_key_value_groups(self) -> int:
        """Query heads that share one key head."""
        return self.queries.shape[-3] // self.keys.shape[-3]

    @cached_property
    def query_start(self) -> int:
        """Index of the first query among the S tokens."""
        return self.keys.shape[-2] - self.queries.shape[-2]

    @cached_property
    def reach(self) -> int:
        """A bound on all shifts: twice the tokens, rounded up, so that tables of angles are rarely rebuilt."""
        return 2 * 256 * -(-self.keys.shape[-2] // 256)

    @cached_property
    def max_split(self) -> float:
        """Most keys to which attention may be computed in parts: all of them for plain softmax attention on a CPU."""
        is_plain = self.softcap is None and self.sinks is None and self.dropout == 0.0
        is_plain = is_plain and not (torch.is_grad_enabled() and self.has_gradients())
        is_fused = self.queries.device.type == "cpu" and self.queries.shape[-1] >= self.values.shape[-1]
        return (self.sliding_window or inf) if is_plain and is_fused else 0

    def queries_of(self, tokens: Span) -> torch.Tensor:
        """Return the queries of some tokens `[H, Q, D]`."""
        first = self.query_start
        return self.queries[..., tokens.start - first : tokens.stop - first, :]

    def cached(self, name: str, make: Callable[[], Any]) -> Any:
        """Return a value that is computed once for the same tokens."""
        if name not in self.scratch:
            self.scratch[name] = make()
        return self.scratch[name]

    def has_gradients(self) -> bool:
        """Return whether gradients flow through this layer, where they are enabled."""
        return any(each.requires_grad for each in (self.queries, self.keys, self.values))


class Backend(Protocol):
    """A way to compute arrangements. All backends compute the same function, up to rounding."""

    name: ClassVar[str]
    batched_prefill: ClassVar[bool]
    """Whether it is a `BatchBackend`: one forward pass, padded, prefills the prompts of a batch."""

    def attend(self, arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention output `[H, Q, D_v]` for one prompt."""
        ...


class BatchBackend(Backend, Protocol):
    """A backend that computes whole batches at once."""

    def batch(
        self, arrangements: Sequence[Arrangement], padding: Sequence[int], call: AttentionCall, plans: dict[Any, Any]
    ) -> torch.Tensor | None:
        """Return `[B, Q, H, D_v]` for left-padded rows; None for a layer that it computes row by row.

        The layers of one forward pass share `plans`.
        """
        ...
