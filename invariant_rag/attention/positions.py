"""What positions do to attention: the interface that rotary embeddings and ALiBi share.

In both, scores depend on position differences only, and moving a query or a key by a shift is a linear map of it. So
arrangements and backends need not know which of the two a layer uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement
    from invariant_rag.attention.call import AttentionCall


class PositionEncoding(Protocol):
    """The position encoding of one layer. "Rotate" stands for its map, which is a rotation for rotary embeddings."""

    def encoded(self, call: AttentionCall, arrangement: Arrangement) -> AttentionCall:
        """Return a layer's call with positions in its queries and keys, so that scores are their products.

        Args:
            call: The call, with queries and keys as the layer passes them on.
            arrangement: The arrangement of the prompt; positions after it count on from its last one.
        """
        ...

    def rotate(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        """Move queries or keys `[..., D]` by one shift, in positions; returns the dtype of `x`."""
        ...

    def rotate_by(self, x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Move `x` `[..., D]` by `shifts` `[...]`, which may be fractional positions; returns the dtype of `x`."""
        ...

    def rotate_each(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Move `x` `[..., D]` by integer `shifts` `[...]` between `-reach` and `reach`; returns float32."""
        ...

    def unscaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries or keys `[..., D]` without the attention factor of their position encoding (YaRN, LongRoPE).

        At position 0 they are then what the layer projects.
        """
        ...

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        """Lay out queries or keys `[..., D]` for `turn`; the product of two of them stays what it is."""
        ...

    def turn(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Move `x` `[..., D]`, laid out by `pair`, as `rotate_each` does; faster where one `x` moves many times."""
        ...
