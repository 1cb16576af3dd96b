"""The names of dtypes, and the check of a device's name before transformers is imported."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from invariant_rag.errors import InvalidChoice

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16", "float64"]
_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")  # device maps that spread a model over devices


def check_device(device_map: Any, name: str = "device_map") -> None:
    """Check that this machine has a device, before anything is loaded, or raise InvalidChoice; maps are not checked."""
    if not isinstance(device_map, str) or device_map in (*_SPREAD, "cpu"):
        return
    import torch  # takes two seconds, which no usual name costs

    try:
        device = torch.device(device_map)
        there = device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()
        there = there and (device.type != "mps" or torch.backends.mps.is_available())
    except RuntimeError:
        there = False
    if not there:
        raise InvalidChoice(
            f"{name}: expected auto, cpu or another device of this machine, got {device_map}",
            hint=f"PyTorch sees {torch.cuda.device_count()} CUDA devices.",
        )
