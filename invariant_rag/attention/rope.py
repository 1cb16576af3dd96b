"""The rotary embedding of a layer, identified by observation instead of by family name.

Models differ in layout (half-split or interleaved), in how many dimensions rotate, in their frequencies (scaled, or
different from layer to layer) and in whether a layer rotates at all. Every combination is a candidate; the one that
reproduces what the layer does to its queries and keys is the layer's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from invariant_rag.attention.per_model import once_per_model

_DYNAMIC = ("dynamic", "longrope")


@dataclass(eq=False)
class Rotation:
    """Rotates queries or keys by whole positions, without any scaling.

    Attributes:
        module: The model's rotary module; None for a layer that does not rotate.
        buffer: Name of the buffer with its inverse frequencies `[R / 2]`. Read at every call, since dynamic scalings
            replace it when a sequence outgrows the training length.
        interleaved: Whether dimension pairs are (0, 1), (2, 3)... instead of (0, R/2), (1, R/2 + 1)...
    """

    module: nn.Module | None
    buffer: str = ""
    interleaved: bool = False
    _tables: dict[object, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    def frequencies(self) -> torch.Tensor:
        """Inverse frequencies `[R / 2]`, as the model uses them now."""
        frequencies: torch.Tensor = getattr(self.module, self.buffer)
        return frequencies

    def rotate(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        """Return `x` `[..., D]`, rotated by one shift, in its own dtype."""
        if self.module is None or shift == 0:
            return x
        angles = self.frequencies().double() * shift
        return self._apply(x, angles.cos(), angles.sin()).to(x.dtype)

    def rotate_by(self, x: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Return `x` `[..., D]`, rotated by `shifts` `[...]`, which may be fractions of positions, in its own dtype."""
        if self.module is None:
            return x
        angles = shifts.double()[..., None] * self.frequencies().to(shifts.device).double()
        return self._apply(x, angles.cos(), angles.sin()).to(x.dtype)

    def rotate_each(self, x: torch.Tensor, shifts: torch.Tensor, reach: int) -> torch.Tensor:
        """Return `x` `[..., D]` rotated by `shifts` `[...]`, in float32.

        Args:
            x: What to rotate. Broadcast against the shifts.
            shifts: Whole positions, each between `-reach` and `reach`.
            reach: Bound on the shifts.
        """
        if self.module is None:
            return x.float().expand(*torch.broadcast_shapes(x.shape[:-1], shifts.shape), x.shape[-1])
        cos, sin = self._table(reach, x.device)
        index = shifts + reach
        return self._apply(x.float(), cos[index], sin[index])

    def _table(self, reach: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[2 reach + 1, R / 2]` of every shift, kept until the frequencies or the reach change."""
        frequencies = self.frequencies()
        known = self._tables.get((reach, device))
        if known is None or not torch.equal(known[0], frequencies):
            angles = torch.arange(-reach, reach + 1, dtype=torch.float64)[:, None] * frequencies.double().cpu()
            self._tables.clear()
            known = (frequencies.clone(), angles.cos().float().to(device), angles.sin().float().to(device))
            self._tables[reach, device] = known
        return known[1], known[2]

    def _apply(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate the dimension pairs of `x` by angles `[..., R / 2]`; at least in float32."""
        wide = x if x.dtype == torch.float64 else x.float()
        cos, sin = cos.to(wide), sin.to(wide)
        size = 2 * cos.shape[-1]
        rotating, rest = wide[..., :size], wide[..., size:]
        if self.interleaved:
            a, b = rotating[..., 0::2], rotating[..., 1::2]
            first, second = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
            rotated = torch.stack((first, second), dim=-1).flatten(-2)
        else:
            a, b = rotating.chunk(2, dim=-1)
            rotated = torch.cat((torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)), dim=-1)
        if not rest.shape[-1]:
            return rotated
        return torch.cat((rotated, rest.expand(*rotated.shape[:-1], rest.shape[-1])), dim=-1)


def candidates(model: nn.Module) -> list[Rotation]:
    """Every rotation that the model's rotary modules could mean, and none at all."""
    found = [Rotation(None)]
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1:
                found += [Rotation(module, name, interleaved) for interleaved in (False, True)]
    return found


def identify(
    found: list[Rotation], positions: torch.Tensor, tensors: list[torch.Tensor], tolerance: float
) -> Rotation | None:
    """Pick the candidate that explains what a layer does to one token at several positions.

    Args:
        found: The candidates.
        positions: `[N]` positions, the first of them 0.
        tensors: `[H, N, D]` each: a layer's queries, and its keys, for the same token at these positions.
        tolerance: Largest error of an acceptable candidate, relative to the size of the tensor.

    Returns:
        The candidate with the smallest error, or None where every one of them is worse than the tolerance.
    """

    def error(candidate: Rotation) -> float:
        worst = 0.0
        for tensor in tensors:
            exact = tensor.double()
            if candidate.module is not None and 2 * candidate.frequencies().shape[0] > exact.shape[-1]:
                return float("inf")
            rotated = [candidate.rotate(exact[:, 0], int(position)) for position in positions]
            gap = (torch.stack(rotated, dim=1) - exact).abs().amax()
            worst = max(worst, float(gap / exact.abs().amax().clamp_min(1e-30)))
        return worst

    best = min(found, key=error)
    return best if error(best) <= tolerance else None


def has_dynamic_rope(model: nn.Module) -> bool:
    """Return whether the model's rotary frequencies depend on the length of the prompt (dynamic, LongRoPE)."""
    return bool(_dynamic_rope_modules(model))


@once_per_model
def _dynamic_rope_modules(model: nn.Module) -> list[nn.Module]:
    modules = [(module, str(getattr(module, "rope_type", ""))) for module in model.modules()]
    return [module for module, rope_type in modules if any(kind in rope_type for kind in _DYNAMIC)]


def reset_dynamic_rope(model: nn.Module) -> AbstractContextManager[None]:
    """Run with the rotary frequencies of a freshly loaded model, and restore the current ones afterwards.

    Dynamic scalings remember the longest sequence so far, so the same prompt could give another answer after a long
    one. Inside this context the memory starts empty; outside, the model's own memory is as it was.
    """
    modules = _dynamic_rope_modules(model)
    return _reset_dynamic_rope(modules) if modules else nullcontext()


@contextmanager
def _reset_dynamic_rope(modules: Sequence[nn.Module]) -> Iterator[None]:
    saved: list[tuple[nn.Module, dict[str, torch.Tensor | None], dict[str, int | float | torch.Tensor]]] = []
    for module in modules:
        plain = {name: value for name, value in vars(module).items() if isinstance(value, int | float | torch.Tensor)}
        saved.append((module, dict(module._buffers), plain))
        for name in list(module._buffers):
            if name.endswith("original_inv_freq"):
                current = name.replace("original_inv_freq", "inv_freq")
                module._buffers[current] = getattr(module, name).clone()
        for name in plain:
            if name.endswith("max_seq_len_cached"):
                setattr(module, name, module.original_max_seq_len)
    try:
        yield
    finally:
        for module, buffers, plain in saved:
            module._buffers.update(buffers)
            for name, value in plain.items():
                setattr(module, name, value)
