"""Attention of whole batches in calls of variable-length kernels, whose number does not grow with the segments."""

from __future__ import annotations

from invariant_rag.attention.varlen.backend import Varlen
from invariant_rag.attention.varlen.kernels import Dense, Grouped, VarlenKernel
from invariant_rag.attention.varlen.selection import difference, fastest_kernel

__all__ = ["Dense", "Grouped", "Varlen", "VarlenKernel", "difference", "fastest_kernel"]
