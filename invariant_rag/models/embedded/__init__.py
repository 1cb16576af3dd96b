"""The models that come with the package: trained on made-up documents, small, for machines without network and GPU."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

EMBEDDED: dict[str, Path] = {name: _HERE / name for name in ("generator", "native", "monot5")}
"""Folder of each: the causal LM, the same after fine-tuning with RoToR attention, and the MonoT5 that ranks."""


def model_card(name: str) -> str:
    """Return the model card of an embedded model, in Markdown.

    Args:
        name: A key of `EMBEDDED`.
    """
    return (EMBEDDED[name] / "README.md").read_text(encoding="utf-8")
