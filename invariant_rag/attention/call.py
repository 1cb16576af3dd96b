"""The interface of backends: one layer's attention for one prompt, and the functions that compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from invariant_rag.attention.positions import PositionEncoding

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention for one prompt.

    Attributes:
        queries: `[H, Q, D]`, at their natural positions. They are the last Q of the S tokens.
        keys: `[H_kv, S, D]`, at their natural positions.
        values: `[H_kv, S, D_v]`.
        rotation: The layer's position encoding.
        scaling: Factor on the scores.
        sliding_window: Keys at this distance or farther along the row are not visible. None: no limit.
        softcap: Scores are squashed to `softcap * tanh(score / softcap)`. None: they are not.
        sinks: `[H]` extra logits that take part in the softmax and have no value. None: there are none.
        dropout: Dropout probability of the attention weights, while training.
        scratch: Values that this layer keeps for later forward passes over the same prompt.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rotation: PositionEncoding
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    scratch: dict[str, Any] = field(default_factory=dict)

    @property
    def num_key_value_groups(self) -> int:
        """Query heads that share one key head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def query_start(self) -> int:
        """Index of the first query among the S tokens."""
        return self.keys.shape[1] - self.queries.shape[1]

    def new_output(self) -> torch.Tensor:
        """Return an uninitialised output `[H, Q, D_v]`, laid out in memory as `[Q, H, D_v]`, which layers read."""
        heads, count, _ = self.queries.shape
        return self.values.new_empty(count, heads, self.values.shape[-1]).transpose(0, 1)


@dataclass(frozen=True)
class BatchCall:
    """One layer's attention for a left-padded batch of prompts. All rows have Q queries, the last of their S tokens.

    Attributes:
        queries: `[B, H, Q, D]`, rotated at their natural positions.
        keys: `[B, H_kv, S, D]`, rotated at their natural positions.
        values: `[B, H_kv, S, D_v]`.
        rotation: The layer's position encoding.
        scaling: Factor on the scores.
        sliding_window: As for `AttentionCall`, like all that follow.
        softcap: See there.
        sinks: See there.
        dropout: See there.
        scratch: Values that this layer keeps for later forward passes over the same batch.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rotation: PositionEncoding
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    scratch: dict[str, Any] = field(default_factory=dict)


class Backend(Protocol):
    """A way to compute arrangements. All backends compute the same function, up to rounding.

    Attributes:
        name: Its name.
        reads_together: Whether one forward pass, padded, prefills the prompts of a batch, rather than one each.
    """

    name: ClassVar[str]
    reads_together: ClassVar[bool]

    def batch(
        self, arrangements: Sequence[Arrangement], padding: Sequence[int], call: BatchCall, plans: dict[Any, Any]
    ) -> torch.Tensor | None:
        """Return `[B, Q, H, D_v]` for a whole batch at once; None where this backend computes each row by itself.

        Args:
            arrangements: What the tokens of each row see.
            padding: Tokens of padding on the left of each row.
            call: The layer's tensors.
            plans: What the layers of one forward pass share.
        """
        ...

    def attend(self, arrangement: Arrangement, call: AttentionCall) -> torch.Tensor:
        """Return one layer's attention output `[H, Q, D_v]` for one prompt.

        Raises:
            UnsupportedCombination: The backend has no function for this kind of arrangement.
        """
        ...
