"""The fast default: few large calls of PyTorch's fused attention."""

from __future__ import annotations

from typing import ClassVar

import torch

from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import can_split
from invariant_rag.attention.ring import Ring, attend_ring
from invariant_rag.attention.rowwise import RowWise


class SDPA(RowWise):
    """Compute attention with `scaled_dot_product_attention`, or matrix products where the model has what it lacks."""

    name: ClassVar[str] = "sdpa"

    def attend_ring(self, ring: Ring, call: AttentionCall, out: torch.Tensor) -> bool:
        """Read a ring in parts where the layer allows it."""
        if not can_split(call, max(row.length for row in ring.rows)):
            return False
        attend_ring(ring, call, out)
        return True
