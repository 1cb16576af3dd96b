"""The command line: one file for each command."""

from __future__ import annotations

from invariant_rag.cli.app import app

__all__ = ["app"]
