"""What a backend is given, and what it has to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from invariant_rag.attention.rope import Rotation

if TYPE_CHECKING:
    from invariant_rag.arrangement import RowArrangement, WeightedArrangement
    from invariant_rag.methods.pine import ImportanceArrangement


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention for one prompt. Everything lies at its own position.

    Attributes:
        queries: `[H, Q, D]`, rotated at their positions. They are the last Q of the S tokens.
        keys: `[H_kv, S, D]`, rotated at their positions.
        values: `[H_kv, S, D_v]`.
        rotation: The layer's rotary embedding.
        scaling: Factor on the scores.
        window: Keys at this distance or farther along the row are not visible. None: no limit.
        softcap: Scores are squashed to `softcap * tanh(score / softcap)`. None: they are not.
        sinks: `[H]` extra logits that take part in the softmax and have no value. None: there are none.
        dropout: Dropout probability on the attention weights, while training.
        memory: Scratch that lives as long as the prompt is being worked on, for this layer alone.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    rotation: Rotation
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    dropout: float = 0.0
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> int:
        """Query heads that share one key head."""
        return self.queries.shape[0] // self.keys.shape[0]

    @property
    def first(self) -> int:
        """Index of the first query among the S tokens."""
        return self.keys.shape[1] - self.queries.shape[1]

    def empty(self) -> torch.Tensor:
        """Return room for what the layer's attention gives `[H, Q, D_v]`, laid out so that no copy has to follow."""
        heads, count, _ = self.queries.shape
        return self.values.new_empty(count, heads, self.values.shape[-1]).transpose(0, 1)


class Backend(Protocol):
    """A way to compute arrangements. All of them compute the same thing."""

    name: ClassVar[str]

    def rows(self, arrangement: RowArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for an arrangement that is the same for every head.

        The queries are the prompt's, or its last text's and those of tokens behind it: `RowArrangement.rows_from`.
        """
        ...

    def weighted(self, arrangement: WeightedArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for rows that weigh the sets before them: Structured Prompting, APE."""
        ...

    def importance(self, arrangement: ImportanceArrangement, call: AttentionCall) -> torch.Tensor:
        """Return `[H, Q, D_v]` for an arrangement that depends on the input: PINE."""
        ...
