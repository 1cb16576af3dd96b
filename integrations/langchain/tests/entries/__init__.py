"""The matrix of entries: every way in which an experienced user of LangChain gets documents to a model."""

from . import chains, runs  # noqa: F401 - they add them
from .base import ENTRIES

__all__ = ["ENTRIES"]
