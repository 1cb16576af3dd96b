"""The matrix of entries: every way in which an experienced user of LangChain gets documents to a model."""

from __future__ import annotations

from importlib import import_module

from .base import ENTRIES, Entry, Listed, fill

# Each module registers its entries when it is imported. This order is that of the table.
for _module in ("texts", "segments", "chains", "retrievers", "runnables", "graphs", "untraced"):
    import_module(f"{__name__}.{_module}")

__all__ = ["ENTRIES", "Entry", "Listed", "fill"]
