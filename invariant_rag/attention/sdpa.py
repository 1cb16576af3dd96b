"""The default backend: few large calls of PyTorch's fused attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from invariant_rag.attention.blockwise import Blockwise
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.merge_states import can_split
from invariant_rag.attention.ring import attend_ring

if TYPE_CHECKING:
    from invariant_rag.methods.rotor import Ring


class SDPA(Blockwise):
    """Compute attention with fused kernels, or with matrix products where a layer needs what these lack."""

    name: ClassVar[str] = "sdpa"

    def ring(self, block: Ring, call: AttentionCall, out: torch.Tensor) -> None:
        """Fill `out` `[H, Q, D_v]`: in parts where the layer allows it, else row by row."""
        if can_split(call, block.stop):
            attend_ring(block, call, out)
        else:
            self.row_by_row(block, call, out)
