"""ALiBi: scores lose a constant per head for each position between query and key (arXiv 2108.12409, section 3).

The bias is written into queries and keys, as four more dimensions. With slope `m`, divided by the factor on the scores,

    query at position i: (m, -m i, 0, m)        key at position j: (j, 1, 1, 0)

has the product `m (j - i)`. A shift by `s` adds `s` times the third dimension to the first, and subtracts `s` times the
fourth from the second: one linear map for queries and keys alike, as a rotation is for rotary embeddings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement
    from invariant_rag.attention.call import AttentionCall

_ADDED = 4


@dataclass(frozen=True, eq=False)
class Alibi:
    """The linear biases of one layer.

    Positions do not fit into half precision, so queries, keys and values are computed in float32 at least.

    Attributes:
        slopes: Bias per position `[H]`, in float64.
    """

    slopes: torch.Tensor

    def encoded(self, call: AttentionCall, arrangement: Arrangement) -> AttentionCall:
        """Return the call with four more dimensions of queries and keys, at least in float32.

        Args:
            call: The call, with queries and keys that know nothing of their positions.
            arrangement: The arrangement of the prompt; positions after it count on from its last one.
        """
        queries, keys, values = (
            each.to(torch.promote_types(each.dtype, torch.float32)) for each in (call.queries, call.keys, call.values)
        )
        if "positions" not in call.scratch:
            positions = torch.tensor(arrangement.positions, dtype=torch.float64, device=keys.device)
            call.scratch.update(positions=positions, slopes=self.slopes.to(keys.device)[:, None] / call.scaling)
        known, length = call.scratch["positions"], keys.shape[1]
        behind = known[-1] + torch.arange(1, 1 + max(0, length - len(known)), device=keys.device)
        at = torch.cat((known, behind))[:length]
        slopes = call.scratch["slopes"].expand(-1, queries.shape[1])
        one, zero = torch.ones_like(at), torch.zeros_like(at)
        of_queries = torch.stack((slopes, -slopes * at[call.query_start :], torch.zeros_like(slopes), slopes), dim=-1)
        of_keys = torch.stack((at, one, one, zero), dim=-1).expand(len(keys), -1, -1)
        queries = torch.cat((queries, of_queries.to(queries)), dim=-1)
        return replace(call, queries=queries, keys=torch.cat((keys, of_keys.to(keys)), dim=-1), values=values)

    def rotate(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        """Move queries or keys `[..., D + 4]` by one shift, in positions."""
        return x if shift == 0 else self.rotate_by(x, torch.tensor(shift))

    def rotate_by(self, x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Move queries or keys `[..., D + 4]` by `shifts` `[...]`, which may be fractional positions."""
        position, offset, key, slope = x[..., -_ADDED:].unbind(dim=-1)
        by = shifts.to(x)
        moved = torch.stack(torch.broadcast_tensors(position + by * key, offset - by * slope, key, slope), dim=-1)
        content = x[..., :-_ADDED]
        return torch.cat((content.expand(*moved.shape[:-1], content.shape[-1]), moved), dim=-1)

    def rotate_each(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Move queries or keys `[..., D + 4]` by `shifts` `[...]`, in float32."""
        return self.rotate_by(x.float(), shifts)

    def unscaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries or keys as they are: ALiBi has no attention factor."""
        return x

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries or keys as they are."""
        return x

    def turn(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Move queries or keys `[..., D + 4]` by `shifts` `[...]`, in float32."""
        return self.rotate_each(x, shifts, reach)


def find_slopes(bias: torch.Tensor, tolerance: float) -> torch.Tensor | None:
    """Return the slopes `[H]`, in float64, of the biases that a layer adds to the scores of keys, one behind the other.

    Args:
        bias: The biases `[H, S]`, up to a constant per head.
        tolerance: Maximum deviation from a line, relative to the largest bias.

    Returns:
        The slopes; None if some biases are no line.
    """
    bias = (bias - bias[:, :1]).double()
    steps = torch.arange(bias.shape[1], dtype=torch.float64, device=bias.device)
    slopes = (bias @ steps) / (steps @ steps)
    error = (bias - slopes[:, None] * steps).abs().amax()
    return slopes if float(error) <= tolerance * float(bias.abs().amax()) else None
