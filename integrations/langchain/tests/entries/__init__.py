"""The matrix of entries: every way in which an experienced user of LangChain gets documents to a model."""

from __future__ import annotations

from .chains import ENTRIES as CHAINS
from .runs import ENTRIES as RUNS

ENTRIES = [*CHAINS, *RUNS]
