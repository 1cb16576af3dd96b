"""Position encodings: rotary embeddings (RoPE), identified for each layer, and ALiBi.

In both, scores depend on position differences only, and a shift of a query or a key is a linear map of it. So
arrangements and backends do not depend on which of the two a layer uses.

Rotary embeddings differ in layout (half-split or interleaved), in the number of rotary dimensions, in their frequencies
(scaled, or different per layer) and in whether a layer uses them at all. Every combination is a candidate; the one that
reproduces the layer's queries and keys is selected.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from invariant_rag.attention.dynamic_rope import private_modules

if TYPE_CHECKING:
    from invariant_rag.arrangement import Arrangement
    from invariant_rag.attention.base import AttentionCall


class PositionEncoding:
    """The position encoding of one layer. "Rotate" means its map, which is a rotation for rotary embeddings."""

    def encoded(self, call: AttentionCall, arrangement: Arrangement) -> AttentionCall:
        """Return a layer's call with positions in its queries and keys, so that scores are their products.

        Positions after the arrangement of the prompt count on from its last one.
        """
        return call

    def rotate_by(self, x: torch.Tensor, shifts: torch.Tensor | int) -> torch.Tensor:
        """Move queries or keys `[..., D]` by `shifts` `[...]`, which may be fractional; returns the dtype of `x`."""
        raise NotImplementedError

    def rotate_each(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Move `x` `[..., D]` by integer `shifts` `[...]` between `-reach` and `reach`; returns float32."""
        return self.rotate_by(x.float(), shifts)

    def unscaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return queries or keys `[..., D]` without the attention factor of their position encoding (YaRN, LongRoPE).

        At position 0 they are then what the layer projects.
        """
        return x

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        """Lay out queries or keys `[..., D]` for `rotate_paired`; the product of two of them stays the same."""
        return x

    def rotate_paired(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Move `x` `[..., D]`, laid out by `pair`, as `rotate_each` does; faster where one `x` moves many times."""
        return self.rotate_each(x, shifts, reach)


@dataclass(eq=False)
class Rotation(PositionEncoding):
    """The rotary embedding of one layer.

    The buffer of inverse frequencies `[R / 2]` is looked up at every call, in the module that this thread uses, since
    dynamic scalings replace it for sequences beyond the training length.
    """

    module: nn.Module | None  # the model's rotary module; None for a layer that does not rotate
    buffer: str = ""  # its name in the module
    interleaved: bool = False  # whether dimension pairs are (0, 1), (2, 3)... instead of (0, R/2), (1, R/2 + 1)...
    _table_of: tuple[torch.Tensor, object, torch.Tensor] | None = field(default=None, repr=False)

    def frequencies(self) -> torch.Tensor:
        """Return the current inverse frequencies `[R / 2]`."""
        frequencies: torch.Tensor = getattr(private_modules.get().get(self.module, self.module), self.buffer)
        return frequencies

    def unscaled(self, x: torch.Tensor) -> torch.Tensor:
        """Divide the rotary dimensions by the attention factor."""
        module = private_modules.get().get(self.module, self.module)
        factor = float(getattr(module, self.buffer.replace("inv_freq", "attention_scaling"), 1.0))
        if factor == 1.0:
            return x
        size = 2 * self.frequencies().shape[0]
        return torch.cat((x[..., :size] / factor, x[..., size:]), dim=-1)

    def rotate_by(self, x: torch.Tensor, shifts: torch.Tensor | int) -> torch.Tensor:
        """Rotate `x` `[..., D]` by `shifts` `[...]`, computed in float64."""
        if self.module is None:
            return x
        shifts = torch.as_tensor(shifts, dtype=torch.float64, device=x.device)
        angles = shifts[..., None] * self.frequencies().to(x.device, torch.float64)
        return self._apply(x, angles.cos(), angles.sin()).to(x.dtype)

    def rotate_with(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Rotate `x` `[..., D]` by complex `factors` `[..., R / 2]`, one for each pair of dimensions."""
        return self._apply(x, factors.real, factors.imag).to(x.dtype)

    def rotate_each(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Rotate `x` `[..., D]` by `shifts` `[...]`, with tables of cosines and sines, one for each `reach`."""
        if self.module is None:
            return x.float().expand(*torch.broadcast_shapes(x.shape[:-1], shifts.shape), x.shape[-1])
        return self._apply(x.float(), *self._angles(shifts, reach, x.device))

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        """Make dimensions that rotate together neighbours."""
        if self.module is None or self.interleaved:
            return x
        size = 2 * self.frequencies().shape[0]
        paired = x[..., :size].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return paired if size == x.shape[-1] else torch.cat((paired, x[..., size:]), dim=-1)

    def rotate_paired(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Rotate what `pair` laid out, in one pass over memory."""
        if self.module is None:
            return self.rotate_each(x, shifts, reach)
        cos, sin = self._angles(shifts, reach, x.device)
        size = 2 * cos.shape[-1]
        pairs = torch.view_as_complex(x[..., :size].float().unflatten(-1, (-1, 2)))
        rotated = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
        if size == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., size:].float().expand(*rotated.shape[:-1], -1)), dim=-1)

    def _angles(self, shifts: torch.Tensor, reach: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of shifts `[..., R / 2]`, from a table `[2 reach + 1, R]` of those of all shifts.

        It is cached for the last reach and frequencies. The tensor identifies the frequencies: comparing its numbers
        would wait for the device.
        """
        frequencies = self.frequencies()
        changes = 0 if frequencies.is_inference() else frequencies._version  # inference tensors count none
        state = (frequencies.data_ptr(), changes, reach, device)
        known = self._table_of  # another thread may replace it meanwhile
        if known is None or known[0] is not frequencies or known[1] != state:
            angles = torch.arange(-reach, reach + 1, dtype=torch.float64)[:, None] * frequencies.double().cpu()
            known = (frequencies, state, torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device))
            self._table_of = known
        cos, sin = torch.nn.functional.embedding(shifts + reach, known[2]).chunk(2, dim=-1)
        return cos, sin

    def _apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the dimension pairs of `x` by angles with cosines and sines `[..., R / 2]`, at least in float32."""
        x_float = x if x.dtype == torch.float64 else x.float()
        cos, sin = cos.to(x_float), sin.to(x_float)
        size = 2 * cos.shape[-1]
        rotating, rest = x_float[..., :size], x_float[..., size:]
        a, b = (rotating[..., 0::2], rotating[..., 1::2]) if self.interleaved else rotating.chunk(2, dim=-1)
        both = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
        rotated = torch.stack(both, dim=-1).flatten(-2) if self.interleaved else torch.cat(both, dim=-1)
        if not rest.shape[-1]:
            return rotated
        return torch.cat((rotated, rest.expand(*rotated.shape[:-1], rest.shape[-1])), dim=-1)


def candidates(model: nn.Module) -> list[Rotation]:
    """Return all rotary embeddings that the model's modules may use, including none."""
    encodings, tables = [Rotation(None)], list[Rotation]()  # GPT-J has tables of all positions, the same in every layer
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1:
                encodings += [Rotation(module, name, interleaved) for interleaved in (False, True)]
            if name == "embed_positions" and buffer.ndim == 2 and not tables:
                tables = [of_table(buffer, interleaved=each) for each in (False, True)]
    return encodings + tables


def of_table(table: torch.Tensor, *, interleaved: bool) -> Rotation:
    """Return the rotary embedding of a table of sines and cosines `[positions, R]`, such as GPT-J has.

    The frequencies are the angles of position 1. The angles of positions 2, 4, 8... make them more exact, if their
    whole revolutions are known from the position before.
    """
    sines, cosines = table.double().cpu().chunk(2, dim=-1)
    angles, position = torch.atan2(sines, cosines), 1
    frequencies = angles[1]
    while 2 * position < len(table):
        position *= 2
        revolutions = ((frequencies * position - angles[position]) / (2 * torch.pi)).round()
        frequencies = (angles[position] + 2 * torch.pi * revolutions) / position
    module = nn.Module()
    module.register_buffer("inv_freq", frequencies.to(table.device))
    return Rotation(module, "inv_freq", interleaved)


def identify(
    rotations: list[Rotation], positions: torch.Tensor, tensors: list[torch.Tensor], tolerance: float
) -> Rotation | None:
    """Return the candidate that reproduces a layer's queries and keys of one token at several positions best.

    These are `[H, N, D]`, at positions `[N]`, the first of them 0. None if the errors of all candidates, relative to
    the largest value of a tensor, exceed the tolerance.
    """

    def error(candidate: Rotation) -> float:
        worst = 0.0
        for tensor in tensors:
            exact = tensor.double()
            if candidate.module is not None and 2 * candidate.frequencies().shape[0] > exact.shape[-1]:
                return float("inf")
            rotated = [candidate.rotate_by(exact[:, 0], position) for position in positions]
            difference = (torch.stack(rotated, dim=1) - exact).abs().amax()
            worst = max(worst, float(difference / exact.abs().amax().clamp_min(1e-30)))
        return worst

    best = min(rotations, key=error)
    return best if error(best) <= tolerance else None


_ADDED = 4


@dataclass(frozen=True, eq=False)
class Alibi(PositionEncoding):
    """The linear biases of one layer: scores lose a constant per head for each position between query and key.

    The bias (arXiv 2108.12409, section 3) is written into queries and keys, as four more dimensions. With slope `m`,
    divided by the factor on the scores,

        query at position i: (m, -m i, 0, m)        key at position j: (j, 1, 1, 0)

    has the product `m (j - i)`. A shift by `s` adds `s` times the third dimension to the first, and subtracts `s` times
    the fourth from the second: one linear map for queries and keys alike.

    Positions do not fit into half precision, so queries, keys and values are computed in float32 at least.
    """

    slopes: torch.Tensor  # bias per position `[H]`, in float64

    def encoded(self, call: AttentionCall, arrangement: Arrangement) -> AttentionCall:
        """Return the call with four more dimensions of queries and keys, at least in float32."""
        queries, keys, values = (
            each.to(torch.promote_types(each.dtype, torch.float32)) for each in (call.queries, call.keys, call.values)
        )
        if "positions" not in call.scratch:
            positions = torch.tensor(arrangement.positions, dtype=torch.float64, device=keys.device)
            call.scratch.update(positions=positions, slopes=self.slopes.to(keys.device)[:, None] / call.scaling)
        known, length = call.scratch["positions"], keys.shape[1]
        later = known[-1] + torch.arange(1, 1 + max(0, length - len(known)), device=keys.device)
        at = torch.cat((known, later))[:length]
        slopes = call.scratch["slopes"].expand(-1, queries.shape[1])
        one, zero = torch.ones_like(at), torch.zeros_like(at)
        of_queries = torch.stack((slopes, -slopes * at[call.query_start :], torch.zeros_like(slopes), slopes), dim=-1)
        of_keys = torch.stack((at, one, one, zero), dim=-1).expand(len(keys), -1, -1)
        queries = torch.cat((queries, of_queries.to(queries)), dim=-1)
        return replace(call, queries=queries, keys=torch.cat((keys, of_keys.to(keys)), dim=-1), values=values)

    def rotate_by(self, x: torch.Tensor, shifts: torch.Tensor | int) -> torch.Tensor:
        """Move queries or keys `[..., D + 4]` by `shifts` `[...]`."""
        position, offset, key, slope = x[..., -_ADDED:].unbind(dim=-1)
        by = torch.as_tensor(shifts, dtype=x.dtype, device=x.device)
        moved = torch.stack(torch.broadcast_tensors(position + by * key, offset - by * slope, key, slope), dim=-1)
        content = x[..., :-_ADDED]
        return torch.cat((content.expand(*moved.shape[:-1], content.shape[-1]), moved), dim=-1)


def find_slopes(bias: torch.Tensor, tolerance: float) -> torch.Tensor | None:
    """Return the slopes `[H]`, in float64, of biases `[H, S]` that a layer adds to the scores of neighbouring keys.

    They may be off by a constant per head. None if they deviate from a line by more than the tolerance, relative to the
    largest bias.
    """
    bias = (bias - bias[:, :1]).double()
    steps = torch.arange(bias.shape[1], dtype=torch.float64, device=bias.device)
    slopes = (bias @ steps) / (steps @ steps)
    error = (bias - slopes[:, None] * steps).abs().amax()
    return slopes if float(error) <= tolerance * float(bias.abs().amax()) else None
