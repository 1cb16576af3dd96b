"""Attention of whole batches in calls of variable-length kernels, whose number does not grow with the segments."""

from __future__ import annotations

from invariant_rag.attention.varlen.backend import Varlen
from invariant_rag.attention.varlen.kernels import Grouped, TorchVarlen, VarlenKernel, difference, usable_kernel

__all__ = ["Grouped", "TorchVarlen", "Varlen", "VarlenKernel", "difference", "usable_kernel"]
