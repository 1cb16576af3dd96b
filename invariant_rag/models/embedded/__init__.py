"""Small models inside the package, trained on synthetic documents, which need neither network nor GPU."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent

EMBEDDED: dict[str, Path] = {name: _FOLDER / name for name in ("generator", "native", "monot5")}
"""Folder of each: `generator` (a causal LM), `native` (it, fine-tuned with RoToR attention), `monot5` (a reranker)."""


def is_toy(name: str) -> bool:
    """Return whether a name (`InvariantModel.name`) is an embedded model's, which knows synthetic documents only."""
    return name in map(str, EMBEDDED.values())


def model_card(name: str) -> str:
    """Return the model card of an embedded model, a key of `EMBEDDED`, in Markdown."""
    return (EMBEDDED[name] / "README.md").read_text(encoding="utf-8")
